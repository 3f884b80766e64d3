// SPDX-License-Identifier: MIT OR Apache-2.0
//! The recorded working set of an image: an object that the image's name names. The next push of the image
//! may bring another one, and the image id stays. It decides in which order a restore reads memory, and no
//! byte of it. So whatever fails here, the image is right without it.

use std::io::Read as _;
use std::sync::Arc;

use rewake_criu_images::{Digest, ImageDir};
use rewake_manifest::{MAX_WORKING_SET, WORKING_SET_NAME};
use tracing::warn;

use crate::error::{ImageStoreError, Result};
use crate::names::{WORKING_SETS, hash_of, hash_part, random};
use crate::report::StoredImage;
use crate::store::ImageStore;

/// Reads the working set of an image's directory.
pub(crate) fn of_directory(images: &ImageDir) -> Option<Vec<u8>> {
    let (path, file, length) = images.file(WORKING_SET_NAME).ok().flatten()?;
    let mut bytes = Vec::new();
    let read = file.take(MAX_WORKING_SET + 1).read_to_end(&mut bytes);
    if read.is_ok() && bytes.len() as u64 <= MAX_WORKING_SET {
        return Some(bytes).filter(|bytes| !bytes.is_empty());
    }
    warn!(
        "{}: it has {length} bytes, or cannot be read; expected at most {MAX_WORKING_SET}: it is not stored",
        path.display()
    );
    None
}

impl ImageStore {
    /// Stores a working set. Returns the name of its object.
    pub(crate) async fn put_working_set(&self, bytes: Vec<u8>) -> Result<String> {
        let random = random().map_err(|error| self.setup(&format!("/dev/urandom: {error}")))?;
        let name = format!("{}-{random}", hash(&bytes));
        self.put(WORKING_SETS, &name, bytes).await?;
        Ok(name)
    }

    /// Gives a stored image another working set and another signature, unless it has them. Returns the bytes
    /// of the working set that were written.
    ///
    /// # Errors
    /// The image was removed or replaced meanwhile, or the store refuses.
    pub(crate) async fn replace_notes(
        &self,
        image: StoredImage,
        bytes: Option<Vec<u8>>,
        signature: Option<Vec<u8>>,
    ) -> Result<u64> {
        let is_stored = |bytes: &Vec<u8>| {
            image.working_set.as_deref().and_then(hash_of).is_some_and(|of| of == hash(bytes))
        };
        let bytes = bytes.filter(|bytes| !is_stored(bytes));
        let is_signed = signature.is_none() || signature == image.signature;
        if bytes.is_none() && is_signed {
            return Ok(0);
        }
        let length = bytes.as_ref().map_or(0, |bytes| bytes.len() as u64);
        let working_set = match bytes {
            Some(bytes) => Some(self.put_working_set(bytes).await?),
            None => image.working_set.clone(),
        };
        let signature = signature.or_else(|| image.signature.clone());
        if self.find(&image.name).await?.is_none_or(|found| found.version != image.version) {
            return Err(ImageStoreError::Replaced { url: self.image_url(&image.name) });
        }
        let chunks = self.packs_of(&image).await?;
        self.publish(StoredImage { working_set, signature, ..image }, &chunks).await?;
        Ok(length)
    }

    /// Reads the working set of an image, or `None` if it has none that can be read.
    pub(crate) async fn working_set(&self, image: &StoredImage) -> Option<Arc<[u8]>> {
        let name = image.working_set.as_deref()?;
        let object = self.object(WORKING_SETS, name);
        let found = self.read(WORKING_SETS, name, MAX_WORKING_SET).await.and_then(|bytes| {
            let damaged = |what: &str| ImageStoreError::Damaged { object, what: what.to_owned() };
            match bytes {
                None => Err(damaged("it is missing")),
                Some(bytes) if hash_of(name).is_some_and(|of| of == hash(&bytes)) => Ok(bytes),
                Some(_) => Err(damaged("it has not the bytes that its name says")),
            }
        });
        found
            .inspect_err(|error| warn!("{error}: memory is loaded without a working set"))
            .ok()
            .map(Arc::from)
    }
}

/// The first part of the name of a working set.
fn hash(bytes: &[u8]) -> String {
    hash_part(Digest(*blake3::hash(bytes).as_bytes()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;
    use crate::testing::{TestImage, TestObjects, random_bytes, run};
    use crate::{GRACE, PinnedImage, StorePushReport, collect_garbage, push, verify};

    const CHUNK: usize = 2 << 20;

    /// Pushes the image with this working set.
    async fn pushed(store: &ImageStore, image: &TestImage, working_set: &str) -> StorePushReport {
        fs::write(image.path().join(WORKING_SET_NAME), working_set).unwrap();
        push(store, &image.path(), "web").await.unwrap()
    }

    async fn stored(store: &ImageStore) -> Option<String> {
        let pinned = PinnedImage::open(store, "web").await.unwrap();
        pinned.working_set.map(|bytes| String::from_utf8(bytes.to_vec()).unwrap())
    }

    #[test]
    fn a_push_stores_the_working_set_and_a_later_one_replaces_it() {
        let image = TestImage::new(&random_bytes("memory", CHUNK));
        run(async {
            let (objects, store) = TestObjects::new();
            let first = push(&store, &image.path(), "web").await.unwrap();
            assert_eq!((first.working_set, stored(&store).await), (0, None));
            let second = pushed(&store, &image, "first").await;
            assert!(second.had && (second.id, second.working_set) == (first.id, 5), "{second:?}");
            assert_eq!(stored(&store).await.as_deref(), Some("first"));
            assert_eq!(pushed(&store, &image, "first").await.working_set, 0);
            assert_eq!(pushed(&store, &image, "second").await.working_set, 6);
            assert_eq!(stored(&store).await.as_deref(), Some("second"));
            // A copy without one keeps it, also where the image is stored again.
            fs::remove_file(image.path().join(WORKING_SET_NAME)).unwrap();
            assert!(push(&store, &image.path(), "web").await.unwrap().had);
            let pack = objects.names(crate::names::PACKS).await.remove(0);
            objects.remove(crate::names::PACKS, &pack).await;
            assert!(!push(&store, &image.path(), "web").await.unwrap().had);
            assert_eq!(stored(&store).await.as_deref(), Some("second"));
            assert_eq!(
                pushed(&store, &TestImage::new(&random_bytes("2", CHUNK)), "third").await.working_set,
                5
            );
            assert_eq!(stored(&store).await.as_deref(), Some("third"));
            assert_eq!(verify(&store, "web", |wrong| panic!("{wrong}")).await.unwrap().wrong, 0);
        });
    }

    #[test]
    fn a_working_set_that_no_name_names_is_removed() {
        let image = TestImage::new(&random_bytes("memory", CHUNK));
        run(async {
            let (objects, store) = TestObjects::new();
            pushed(&store, &image, "first").await;
            pushed(&store, &image, "second").await;
            collect_garbage(&store, GRACE).await.unwrap();
            assert_eq!(objects.names(WORKING_SETS).await.len(), 2, "they are young");
            objects.pass(25);
            collect_garbage(&store, GRACE).await.unwrap();
            assert_eq!(objects.names(WORKING_SETS).await.len(), 1);
            assert_eq!(stored(&store).await.as_deref(), Some("second"));
            // A listing that lacks the name.
            objects.hide(Some(crate::names::NAMES));
            collect_garbage(&store, GRACE).await.unwrap();
            objects.hide(None);
            assert_eq!(stored(&store).await.as_deref(), Some("second"));
            store.remove("web").await.unwrap();
            collect_garbage(&store, Duration::ZERO).await.unwrap();
            assert_eq!(objects.names(WORKING_SETS).await, [""; 0]);
        });
    }

    #[test]
    fn an_image_is_right_without_a_damaged_working_set() {
        let image = TestImage::new(&random_bytes("memory", CHUNK));
        run(async {
            let (objects, store) = TestObjects::new();
            pushed(&store, &image, "recorded").await;
            let name = objects.names(WORKING_SETS).await.remove(0);
            let long = vec![b'x'; usize::try_from(MAX_WORKING_SET).unwrap() + 1];
            for bytes in [b"recordeD".to_vec(), b"record".to_vec(), Vec::new(), long] {
                objects.replace(WORKING_SETS, &name, bytes).await;
                assert_eq!(stored(&store).await, None);
            }
            objects.remove(WORKING_SETS, &name).await;
            assert_eq!(stored(&store).await, None);
            // One that no restore can have recorded is not stored.
            let other = TestImage::new(&random_bytes("other", CHUNK));
            let path = other.path().join(WORKING_SET_NAME);
            fs::File::create(&path).unwrap().set_len(MAX_WORKING_SET + 1).unwrap();
            assert_eq!(push(&store, &other.path(), "web").await.unwrap().working_set, 0);
            assert_eq!(stored(&store).await, None);
        });
    }

    #[test]
    fn a_working_set_of_an_image_that_was_replaced_is_not_named() {
        let [image, other] = ["memory", "other"].map(|name| TestImage::new(&random_bytes(name, CHUNK)));
        run(async {
            let (objects, store) = TestObjects::new();
            push(&store, &image.path(), "web").await.unwrap();
            let beside = store.clone();
            objects.before(WORKING_SETS, async move {
                push(&beside, &other.path(), "web").await.unwrap();
            });
            fs::write(image.path().join(WORKING_SET_NAME), "recorded").unwrap();
            let error = push(&store, &image.path(), "web").await.unwrap_err();
            assert!(matches!(error, ImageStoreError::Replaced { .. }), "{error}");
            assert_eq!(stored(&store).await, None);
        });
    }
}
