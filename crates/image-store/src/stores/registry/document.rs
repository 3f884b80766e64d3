// SPDX-License-Identifier: MIT OR Apache-2.0
//! The JSON documents of OCI's image specification 1.1, with the members that are used here, in its order.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The type of an index.
pub(super) const INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// The type of a manifest.
pub(super) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// The type of a layer that is a tar.
pub(super) const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// The types of Docker's manifests and lists of manifests.
pub(super) const DOCKER: [&str; 2] = [
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
];

/// A manifest, or an index of manifests.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Document {
    Manifest(Manifest),
    Index(Index),
}

/// What an image consists of.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Manifest {
    pub(super) schema_version: u8,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) media_type: Option<String>,
    pub(super) config: Descriptor,
    pub(super) layers: Vec<Descriptor>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) artifact_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) annotations: Option<BTreeMap<String, String>>,
}

/// Manifests, of which a program takes one.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Index {
    pub(super) schema_version: u8,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) media_type: Option<String>,
    pub(super) manifests: Vec<Descriptor>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) artifact_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) annotations: Option<BTreeMap<String, String>>,
}

/// Names a blob, or a manifest.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Descriptor {
    pub(super) media_type: String,
    pub(super) digest: String,
    /// In bytes.
    pub(super) size: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) annotations: Option<BTreeMap<String, String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) artifact_type: Option<String>,
}
