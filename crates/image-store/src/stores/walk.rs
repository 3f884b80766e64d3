// SPDX-License-Identifier: MIT OR Apache-2.0
//! A random walk through what may happen during a push: before each of its requests hours pass, and `gc`,
//! `rm` or another push may run. An image whose push reported success, and that was not removed, must be
//! complete.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use tokio::sync::Mutex;

use crate::store::ImageStore;
use crate::testing::{TestImage, TestObjects, random_bytes, run};
use crate::{GRACE, ImageStoreError, collect_garbage, push, verify};

/// Hours that pass at a step.
const HOURS: [u64; 10] = [0, 1, 3, 4, 7, 11, 12, 13, 23, 25];
/// The store of each number has a walk of its own.
const WALKS: u64 = 24;
const PUSHES: u64 = 8;

/// The push whose requests are the steps of the walk stores under this name; others may, too.
const NAME: &str = "walked";

struct Walk {
    objects: Arc<TestObjects>,
    /// What others use: no step of the walk is before their requests.
    store: ImageStore,
    /// Images and the names under which they are pushed.
    images: Vec<(&'static str, TestImage)>,
    state: Mutex<WalkState>,
}

struct WalkState {
    random: u64,
    /// The names of the images that must be complete.
    stored: HashSet<&'static str>,
    removed_packs: u64,
}

impl WalkState {
    /// A number below `end`.
    fn below(&mut self, end: u64) -> usize {
        // Knuth's constants.
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from((self.random >> 33) % end).unwrap()
    }
}

impl Walk {
    fn new(seed: u64) -> Arc<Self> {
        let (objects, store) = TestObjects::new();
        let shared: Vec<u8> = b"what all images have ".iter().copied().cycle().take(2 << 20).collect();
        let image = |name| TestImage::new(&[&*shared, &random_bytes(name, 9000)].concat());
        let images = vec![
            (NAME, image("one")),
            (NAME, image("two")),
            ("three", image("three")),
            ("four", image("one")),
        ];
        let state = WalkState { random: seed, stored: HashSet::new(), removed_packs: 0 };
        Arc::new(Self { objects, store, images, state: Mutex::new(state) })
    }

    async fn step(&self) {
        let mut state = self.state.lock().await;
        if state.below(16) == 0 {
            self.objects.pass(HOURS[state.below(HOURS.len() as u64)]);
        }
        match state.below(12) {
            0 | 1 => state.removed_packs += collect_garbage(&self.store, GRACE).await.unwrap().removed_packs,
            2 => {
                let name = ["three", "four"][state.below(2)];
                if state.stored.remove(name) {
                    self.store.remove(name).await.unwrap();
                }
            }
            3 => {
                let (name, image) = &self.images[state.below(self.images.len() as u64)];
                push(&self.store, &image.path(), name).await.unwrap();
                state.stored.insert(name);
            }
            _ => {}
        }
    }

    /// Pushes with steps before each request. Returns whether it succeeded.
    async fn push(self: &Arc<Self>, number: usize) -> bool {
        let store = ImageStore::of(Arc::new(WalkObjects(Arc::clone(self))));
        match push(&store, &self.images[number % 2].1.path(), NAME).await {
            Ok(_) => {
                self.state.lock().await.stored.insert(NAME);
                true
            }
            Err(ImageStoreError::TooLong { .. } | ImageStoreError::LostPack { .. }) => false,
            Err(error) => panic!("{error}"),
        }
    }

    async fn check(&self, walk: u64) {
        for name in &self.state.lock().await.stored {
            let report = verify(&self.store, name, |wrong| panic!("walk {walk}: {name}: {wrong}")).await;
            assert_eq!(report.unwrap().wrong, 0);
        }
    }
}

#[test]
fn whatever_happens_beside_a_push_a_stored_image_is_complete() {
    run(async {
        let (mut stored, mut removed_packs) = (0, 0);
        for seed in 0..WALKS {
            let walk = Walk::new(seed);
            walk.store.mark().await.unwrap();
            for number in 0..PUSHES {
                stored += u64::from(walk.push(usize::try_from(number).unwrap()).await);
                walk.check(seed).await;
            }
            for _ in 0..3 {
                walk.objects.pass(25);
                collect_garbage(&walk.store, GRACE).await.unwrap();
                walk.check(seed).await;
            }
            removed_packs += walk.state.lock().await.removed_packs;
        }
        assert!(
            stored > WALKS && stored < WALKS * PUSHES && removed_packs > WALKS,
            "{stored} {removed_packs}"
        );
    });
}

/// The objects as the push sees them.
struct WalkObjects(Arc<Walk>);

impl fmt::Debug for WalkObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WalkObjects")
    }
}

impl fmt::Display for WalkObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WalkObjects")
    }
}

impl WalkObjects {
    async fn step(&self) -> &TestObjects {
        self.0.step().await;
        &self.0.objects
    }

    /// A step, and then a stream.
    fn stream<T: Send + 'static>(
        &self,
        then: impl FnOnce(&TestObjects) -> BoxStream<'static, Result<T>> + Send + 'static,
    ) -> BoxStream<'static, Result<T>> {
        let walk = Arc::clone(&self.0);
        stream::once(async move {
            walk.step().await;
            then(&walk.objects)
        })
        .flatten()
        .boxed()
    }
}

#[async_trait]
impl ObjectStore for WalkObjects {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.step().await.put_opts(location, payload, opts).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.step().await.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.step().await.get_opts(location, options).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.step().await.get_ranges(location, ranges).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.stream(|objects| objects.delete_stream(locations))
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let prefix = prefix.cloned();
        self.stream(move |objects| objects.list(prefix.as_ref()))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.step().await.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.step().await.copy_opts(from, to, options).await
    }
}
