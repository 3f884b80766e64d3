// SPDX-License-Identifier: MIT OR Apache-2.0
//! A repository of an OCI registry as the objects of a store: packs, indexes and manifests are blobs, and a
//! tag is the name of an image. So all that reads and writes a store works with a registry.
//!
//! * `objects`: blobs as objects, by the names that the layers of an artifact have.
//! * `artifact`: the manifest and the index of OCI, byte by byte. `metadata_layer`: the tar for other tools.
//! * `client`: what is asked of a registry. `requests`: HTTP with it. `answers`: what it sends, which is
//!   hostile input.
//! * `credentials`: the files of podman and Docker. `document`: the JSON of OCI.
//!
//! A registry removes what no tag uses by rules of its own, and refuses a manifest whose blobs it lacks. It
//! may remove blobs while a push runs, so its manual wants it read-only then.

mod answers;
mod artifact;
mod client;
mod credentials;
mod document;
mod metadata_layer;
mod objects;
mod requests;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::sync::{Arc, Mutex, PoisonError};

use rewake_criu_images::ImageDir;
use rewake_manifest::ManifestReader;
use tracing::warn;

use crate::answer::bounded;
use crate::connect::RequestLimits;
use crate::error::{ImageStoreError, Result};
use crate::names::{INDEXES, MANIFESTS, PACKS, WORKING_SETS};
use crate::report::StoredImage;

use artifact::{Artifact, Blob, Tagged};
use client::{RegistryClient, blob_of};
use document::{INDEX, MANIFEST};
use objects::RegistryObjects;
use requests::RegistryError;

/// The longest manifest that a push writes: registries refuse longer ones.
const MAX_MANIFEST: usize = 4 << 20;
/// The longest object of a name.
const MAX_CONFIG: u64 = 4 << 10;

/// A repository of a registry.
#[derive(Debug)]
pub(crate) struct ImageRepository {
    /// For messages.
    url: String,
    client: RegistryClient,
    objects: Arc<RegistryObjects>,
    /// What a push adds to its packs at the end.
    added: Mutex<Option<Added>>,
}

/// What an artifact has in addition to the objects of a store.
#[derive(Debug)]
struct Added {
    files: Blob,
    annotations: BTreeMap<String, String>,
}

impl ImageRepository {
    /// `write`: for a push.
    pub(crate) fn open(registry: &str, repository: &str, write: bool, limits: RequestLimits) -> Result<Self> {
        let url = format!("oci://{registry}/{repository}");
        let setup = |what| ImageStoreError::Setup { url: url.clone(), what };
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let login = credentials::read(registry, variable).map_err(setup)?;
        let client = RegistryClient::new(registry, repository, login, write, limits).map_err(setup)?;
        let objects = Arc::new(RegistryObjects::new(client.clone()));
        Ok(Self { url, client, objects, added: Mutex::default() })
    }

    pub(crate) fn objects(&self) -> Arc<RegistryObjects> {
        Arc::clone(&self.objects)
    }

    /// Forgets the objects that the registry lacks: a push writes them again.
    pub(crate) async fn forget_missing(&self) -> Result<()> {
        self.objects.forget_missing().await.map_err(|error| ImageStoreError::Request {
            act: "read",
            object: self.url.clone(),
            reason: error.to_string(),
        })
    }

    /// Reads what a tag names. Its packs are objects from now on.
    pub(crate) async fn find(&self, tag: &str) -> Result<Option<StoredImage>> {
        let Some(artifact) = self.artifact(tag).await? else { return Ok(None) };
        let (config, object) = (&artifact.config, self.object(tag));
        let damaged =
            |what: String| ImageStoreError::Damaged { object: object.clone(), what: bounded(&what) };
        if config.length > MAX_CONFIG {
            return Err(damaged(format!("its configuration has {} bytes", config.length)));
        }
        let bytes = self.client.range(config, 0..config.length).await.map_err(self.failed("read", tag))?;
        if blob_of(&bytes) != *config {
            return Err(damaged(format!("its configuration is not the blob {}", config.digest)));
        }
        // Copies of an artifact have other tags: the object of the name has none.
        let image = StoredImage::decode(&bytes, "", &object)?;
        self.objects.add(artifact.objects);
        Ok(Some(StoredImage { name: tag.to_owned(), ..image }))
    }

    /// Reads the manifest of a tag, which names it itself or by an index.
    async fn artifact(&self, tag: &str) -> Result<Option<Artifact>> {
        let (object, mut name) = (self.object(tag), tag.to_owned());
        let damaged =
            |what: String| ImageStoreError::Damaged { object: object.clone(), what: bounded(&what) };
        for _ in 0..2 {
            let found = self.client.manifest(&name).await.map_err(self.failed("read", tag))?;
            let Some(bytes) = found else {
                return if name == tag { Ok(None) } else { Err(damaged(format!("it lacks {name}"))) };
            };
            match artifact::parse(&bytes).map_err(damaged)? {
                Tagged::Artifact(artifact) => return Ok(Some(artifact)),
                Tagged::Index(digest) => name = digest,
                Tagged::Other(found) => {
                    return Err(ImageStoreError::OtherArtifact {
                        url: self.object(tag),
                        found: bounded(&found),
                    });
                }
            }
        }
        Err(damaged("an index in an index".to_owned()))
    }

    /// Begins a push: reads what the tag names now, and writes what the artifact has in addition to packs.
    pub(crate) async fn begin(&self, images: &ImageDir, manifest: ManifestReader, tag: &str) -> Result<()> {
        match self.find(tag).await {
            // What is damaged is written again.
            Ok(_) | Err(ImageStoreError::Damaged { .. } | ImageStoreError::Version { .. }) => {}
            Err(error) => return Err(error),
        }
        let annotations = artifact::annotations(manifest.id(), images);
        let (file, length) = metadata_layer::write(images, manifest)?;
        let files = self.put_file(file, length, tag).await?;
        *self.added() = Some(Added { files, annotations });
        Ok(())
    }

    async fn put_file(&self, file: File, length: u64, tag: &str) -> Result<Blob> {
        self.client.put_file(file, length).await.map_err(self.failed("write", tag))
    }

    /// Ends a push: gives the tag to the image that has these packs.
    pub(crate) async fn publish(&self, image: StoredImage, packs: &BTreeSet<Arc<str>>) -> Result<()> {
        let tag = image.name.clone();
        let setup = |what: String| ImageStoreError::Setup { url: self.object(&tag), what };
        let Added { files, annotations } =
            self.added().take().ok_or_else(|| setup("the push had not begun".to_owned()))?;
        let working_set = image.working_set.clone().filter(|name| {
            let is_stored = self.objects.find((WORKING_SETS, name)).is_some();
            if !is_stored {
                warn!("{}: the registry has lost its working set: it has none now", self.object(&tag));
            }
            is_stored
        });
        let image = StoredImage { working_set, ..image };
        let own = [(MANIFESTS, &*image.version), (INDEXES, &*image.version)];
        let working_set = image.working_set.as_deref().map(|name| (WORKING_SETS, name));
        let all = own.into_iter().chain(working_set).chain(packs.iter().map(|pack| (PACKS, &**pack)));
        let objects: Option<Vec<_>> = all.map(|of| self.objects.find(of)).collect();
        let objects = objects.ok_or_else(|| setup("a blob of the push is missing".to_owned()))?;
        let config = StoredImage { name: String::new(), ..image }.encode();
        let config = self.client.put_bytes(config.into()).await.map_err(self.failed("write", &tag))?;

        let json = |error: serde_json::Error| setup(error.to_string());
        let manifest = artifact::manifest(&config, &files, &objects, &annotations).map_err(json)?;
        if manifest.len() > MAX_MANIFEST {
            return Err(setup(format!(
                "its {} packs make a manifest of {} bytes, and registries take {MAX_MANIFEST}: push it to a \
                 bucket",
                packs.len(),
                manifest.len()
            )));
        }
        let blob = blob_of(&manifest);
        let index = artifact::index(&blob, &annotations).map_err(json)?;
        let put = self.client.put_manifest(&blob.digest, MANIFEST, manifest).await;
        put.map_err(self.failed("write", &tag))?;
        let put = self.client.put_manifest(&tag, INDEX, index).await;
        put.map_err(self.failed("write", &tag))
    }

    /// Lists the tags: some may be of other artifacts.
    pub(crate) async fn tags(&self) -> Result<Vec<String>> {
        let tags = self.client.tags().await;
        tags.map_err(|error| ImageStoreError::Request {
            act: "list",
            object: self.url.clone(),
            reason: error.to_string(),
        })
    }

    fn added(&self) -> std::sync::MutexGuard<'_, Option<Added>> {
        self.added.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn object(&self, tag: &str) -> String {
        format!("{}:{tag}", self.url)
    }

    fn failed(&self, act: &'static str, tag: &str) -> impl FnOnce(RegistryError) -> ImageStoreError + use<> {
        let object = self.object(tag);
        move |error| ImageStoreError::Request { act, object, reason: error.to_string() }
    }
}
