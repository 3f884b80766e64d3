// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names in an image directory.

/// The name of the manifest in an image directory.
pub const MANIFEST_NAME: &str = "rewake-manifest";

/// The symbolic link to the parent image.
pub(crate) const PARENT: &str = "parent";

/// The name of the manifest in a directory that an image is being copied into: it has not all bytes yet.
pub const PARTIAL_NAME: &str = "rewake-manifest.partial";
