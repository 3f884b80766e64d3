// SPDX-License-Identifier: MIT OR Apache-2.0
//! Removes what no image uses. A push that runs at the same time needs no lock: what it may use is younger
//! than [`GRACE`], or was marked as removed less than [`GRACE`] ago.
//!
//! * An index without a name gets a mark in `removed/`, when it is older than [`GRACE`]. `rewake rm` sets the
//!   mark at once. A push uses no chunk of a marked index.
//! * An index whose mark is older than [`GRACE`] is removed: each push that has used its chunks has ended.
//! * A pack that no index uses is removed, when it is older than [`GRACE`].
//!
//! [`GRACE`]: crate::GRACE

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, SystemTime};

use futures::{StreamExt as _, TryStreamExt as _};
use tracing::warn;

use crate::error::{ImageStoreError, Result};
use crate::format::ImageIndex;
use crate::names::{CLOCK, DAMAGED, INDEXES, MANIFESTS, NAMES, PACKS, REMOVED, WORKING_SETS};
use crate::report::{GarbageReport, StoredImage};
use crate::store::{ImageStore, MAX_INDEXES, MAX_REQUESTS};
use crate::url::is_image_name;

/// Removes what no image uses, if it is older than `grace`: [`GRACE`](crate::GRACE), or less where no push
/// runs. All is planned before the first removal.
///
/// # Errors
/// The place is no store, or a name or an index cannot be read: nothing is removed. Or the store refuses.
pub async fn collect_garbage(store: &ImageStore, grace: Duration) -> Result<GarbageReport> {
    store.require_removable()?;
    store.require().await?;
    let now = store.now().await?;
    let is_old = |written: SystemTime| now.duration_since(written).unwrap_or_default() >= grace;
    let plan = IndexPlan::new(store, now, is_old).await?;
    // A mark removes nothing. Of a damaged index, it begins the day after which the index is not read.
    for version in &plan.marked {
        store.put(REMOVED, version, Vec::new()).await?;
    }
    let used = used_ranges(store, &plan.kept).await?;
    // After the indexes: the packs of each are in the store before it is.
    let packs = store.list(PACKS).await?;
    let mut report = GarbageReport { removed_images: plan.removed.len() as u64, ..GarbageReport::default() };
    let mut unused = HashSet::new();
    for (name, pack) in &packs {
        match used.get(name) {
            Some(used) => {
                report.packs += 1;
                report.bytes += pack.length;
                report.unused += pack.length.saturating_sub(*used);
            }
            None if is_old(pack.written) => {
                report.removed_packs += 1;
                report.removed_bytes += pack.length;
                unused.insert(name.clone());
            }
            None => report.waiting += pack.length,
        }
    }
    for name in used.keys().filter(|name| !packs.contains_key(*name)) {
        warn!(
            "{}: an image uses this pack, and the store lacks it: `rewake verify` says which",
            store.object(PACKS, name)
        );
    }
    let manifests = store.list(MANIFESTS).await?.into_iter();
    let manifests = manifests.filter(|(name, found)| is_old(found.written) && !plan.kept.contains_key(name));
    let manifests = manifests.map(|(name, _)| name).collect();
    let clocks = store.list(CLOCK).await?.into_iter().filter(|(_, found)| is_old(found.written));
    let clocks = clocks.map(|(name, _)| name).collect();
    let working_sets = store.list(WORKING_SETS).await?.into_iter();
    let working_sets =
        working_sets.filter(|(name, found)| is_old(found.written) && !plan.working_sets.contains(name));
    let working_sets = working_sets.map(|(name, _)| name).collect();
    let damaged = store.list(DAMAGED).await?.into_keys();
    let damaged = damaged.filter(|name| !packs.contains_key(name) || unused.contains(name)).collect();
    // Indexes first: a pack never goes before what says that it is used. Each mark goes after its index.
    delete_all(store, INDEXES, plan.removed).await?;
    delete_all(store, REMOVED, plan.unmarked).await?;
    delete_all(store, PACKS, unused.into_iter().collect()).await?;
    delete_all(store, DAMAGED, damaged).await?;
    delete_all(store, MANIFESTS, manifests).await?;
    delete_all(store, WORKING_SETS, working_sets).await?;
    delete_all(store, CLOCK, clocks).await?;
    Ok(report)
}

/// What is done with each index.
#[derive(Debug, Default)]
struct IndexPlan {
    /// Those that stay, and the names of the images of those that have one.
    kept: HashMap<String, Option<String>>,
    removed: Vec<String>,
    /// Those that get a mark.
    marked: Vec<String>,
    /// Those that lose their marks.
    unmarked: Vec<String>,
    /// The working sets of images.
    working_sets: HashSet<String>,
}

impl IndexPlan {
    async fn new(store: &ImageStore, now: SystemTime, is_old: impl Fn(SystemTime) -> bool) -> Result<Self> {
        let marks = store.list(REMOVED).await?;
        let mut indexes = store.list(INDEXES).await?;
        // After the indexes: one that has lost its name since then is marked the next time.
        let named = named_indexes(store).await?;
        let unlisted = named.keys().chain(marks.keys()).filter(|version| !indexes.contains_key(*version));
        for version in unlisted.cloned().collect::<Vec<_>>() {
            match (store.head(INDEXES, &version).await?, named.get(&version)) {
                (Some(found), _) => drop(indexes.insert(version, found)),
                (None, Some(image)) => refuse_missing(store, &version, &image.name).await?,
                (None, None) => {}
            }
        }
        let mut plan = Self::default();
        plan.unmarked.extend(marks.keys().filter(|version| !indexes.contains_key(*version)).cloned());
        for (version, index) in indexes {
            let image = match named.get(&version) {
                Some(image) => Some(image.clone()),
                None if is_old(index.written) => unlisted_image(store, &version).await?,
                None => None,
            };
            let mark = marks.get(&version).map(|mark| mark.written);
            if let Some(image) = image {
                plan.working_sets.extend(image.working_set);
                // Its name was written after the mark, or `rewake rm` was killed before it removed the name.
                plan.unmarked.extend(mark.is_some().then(|| version.clone()));
                plan.kept.insert(version, Some(image.name));
                continue;
            }
            let mark = mark.or_else(|| {
                is_old(index.written).then(|| {
                    plan.marked.push(version.clone());
                    now
                })
            });
            if mark.is_some_and(&is_old) {
                plan.unmarked.push(version.clone());
                plan.removed.push(version);
            } else {
                plan.kept.insert(version, None);
            }
        }
        Ok(plan)
    }
}

/// Returns the images of all names, by their indexes.
async fn named_indexes(store: &ImageStore) -> Result<HashMap<String, StoredImage>> {
    let names = store.list(NAMES).await?.into_keys();
    let images = futures::stream::iter(names).map(async |name| store.find(&name).await);
    let images = images.buffer_unordered(MAX_REQUESTS);
    images
        .try_filter_map(async |image| Ok(image.map(|image| (image.version.clone(), image))))
        .try_collect()
        .await
}

/// Returns the image of an index that a listing of names lacks. A listing of a directory leaves out what it
/// cannot read.
async fn unlisted_image(store: &ImageStore, version: &str) -> Result<Option<StoredImage>> {
    let name = match store.index(version).await {
        Ok(Some(index)) => index.image.name,
        // It says no name.
        Ok(None) | Err(ImageStoreError::Damaged { .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    let image = if is_image_name(&name) { store.find(&name).await? } else { None };
    Ok(image.filter(|image| image.version == version))
}

/// Refuses to continue without the index of an image, unless the image has been removed or replaced since.
async fn refuse_missing(store: &ImageStore, version: &str, name: &str) -> Result<()> {
    match store.find(name).await? {
        Some(image) if image.version == version => Err(ImageStoreError::Damaged {
            object: store.object(INDEXES, version),
            what: format!("it is missing, and the image {name} has no other index"),
        }),
        _ => Ok(()),
    }
}

/// Returns how many bytes of each pack are used.
async fn used_ranges(
    store: &ImageStore,
    indexes: &HashMap<String, Option<String>>,
) -> Result<HashMap<String, u64>> {
    let indexes = futures::stream::iter(indexes.clone()).map(async |(version, name)| {
        let index = store.index(&version).await?;
        if let (None, Some(name)) = (&index, name) {
            refuse_missing(store, &version, &name).await?;
        }
        Ok::<_, ImageStoreError>(index)
    });
    let mut indexes = std::pin::pin!(indexes.buffer_unordered(MAX_INDEXES));
    let mut packs: BTreeMap<String, HashMap<u32, u32>> = BTreeMap::new();
    while let Some(index) = indexes.next().await {
        // None: another `collect_garbage` has removed it, and it has no name.
        for (_, chunk) in index?.into_iter().flat_map(|ImageIndex { chunks, .. }| chunks) {
            let stored = chunk.stored_length();
            packs.entry(chunk.pack.to_string()).or_default().insert(chunk.offset, stored);
        }
    }
    let sum = |ranges: HashMap<u32, u32>| ranges.into_values().map(u64::from).sum();
    Ok(packs.into_iter().map(|(name, ranges)| (name, sum(ranges))).collect())
}

async fn delete_all(store: &ImageStore, folder: &str, names: Vec<String>) -> Result<()> {
    let deletes = futures::stream::iter(names).map(async |name| store.delete(folder, &name).await);
    deletes.buffer_unordered(MAX_REQUESTS).try_collect().await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GRACE;
    use crate::testing::{TestImage, TestObjects, random_bytes, run};
    use crate::{push, verify};

    const CHUNK: usize = 2 << 20;

    async fn check(store: &ImageStore, name: &str) {
        verify(store, name, |wrong| panic!("{wrong}")).await.unwrap();
    }

    #[test]
    fn a_removed_image_keeps_its_bytes_for_a_day() {
        let (one, two) =
            (TestImage::new(&random_bytes("one", CHUNK)), TestImage::new(&random_bytes("two", CHUNK)));
        run(async {
            let (objects, store) = TestObjects::new();
            push(&store, &one.path(), "one").await.unwrap();
            push(&store, &two.path(), "two").await.unwrap();
            objects.pass(100);
            store.remove("one").await.unwrap();
            assert!(matches!(store.remove("one").await, Err(ImageStoreError::NoImage { .. })));
            objects.pass(23);
            let report = collect_garbage(&store, GRACE).await.unwrap();
            assert_eq!((report.removed_images, report.removed_packs, report.packs), (0, 0, 2));
            objects.pass(2);
            let report = collect_garbage(&store, GRACE).await.unwrap();
            assert_eq!((report.removed_images, report.removed_packs, report.packs), (1, 1, 1));
            check(&store, "two").await;
            for folder in [NAMES, INDEXES, MANIFESTS, PACKS] {
                assert_eq!(objects.names(folder).await.len(), 1, "{folder}");
            }
            assert!(objects.names(REMOVED).await.is_empty() && objects.names(CLOCK).await.is_empty());
        });
    }

    #[test]
    fn without_a_push_everything_unused_goes_at_once() {
        let image = TestImage::new(&random_bytes("one", CHUNK));
        run(async {
            let (objects, store) = TestObjects::new();
            push(&store, &image.path(), "one").await.unwrap();
            store.remove("one").await.unwrap();
            let report = collect_garbage(&store, Duration::ZERO).await.unwrap();
            assert_eq!((report.removed_images, report.removed_packs), (1, 1));
            for folder in [NAMES, INDEXES, MANIFESTS, PACKS, REMOVED, CLOCK] {
                assert!(objects.names(folder).await.is_empty(), "{folder}");
            }
        });
    }

    #[test]
    fn what_a_running_push_has_written_stays() {
        let image = TestImage::new(&random_bytes("one", CHUNK));
        run(async {
            let (objects, store) = TestObjects::new();
            let (during, beside) = (objects.clone(), store.clone());
            // The push has written its packs, and takes nearly as long as it may.
            objects.before(INDEXES, async move {
                during.pass(7);
                let report = collect_garbage(&beside, GRACE).await.unwrap();
                assert_eq!((report.removed_packs, report.packs), (0, 0));
                assert!(report.waiting >= CHUNK as u64);
            });
            push(&store, &image.path(), "one").await.unwrap();
            check(&store, "one").await;
        });
    }

    #[test]
    fn what_a_running_push_shares_with_a_removed_image_stays() {
        let shared = random_bytes("shared", CHUNK);
        let (one, two) =
            (TestImage::new(&shared), TestImage::new(&[&*shared, &random_bytes("two", CHUNK)].concat()));
        run(async {
            let (objects, store) = TestObjects::new();
            push(&store, &one.path(), "one").await.unwrap();
            objects.pass(1000);
            let (during, beside) = (objects.clone(), store.clone());
            objects.before(PACKS, async move {
                beside.remove("one").await.unwrap();
                collect_garbage(&beside, GRACE).await.unwrap();
                during.pass(7);
                collect_garbage(&beside, GRACE).await.unwrap();
            });
            let report = push(&store, &two.path(), "two").await.unwrap();
            assert!(report.shared >= CHUNK as u64);
            objects.pass(24);
            assert_eq!(collect_garbage(&store, GRACE).await.unwrap().removed_images, 1);
            check(&store, "two").await;
        });
    }

    #[test]
    fn a_push_uses_no_chunk_of_an_image_that_is_being_removed() {
        let image = TestImage::new(&random_bytes("one", CHUNK));
        run(async {
            let (objects, store) = TestObjects::new();
            push(&store, &image.path(), "one").await.unwrap();
            objects.pass(23);
            store.remove("one").await.unwrap();
            objects.pass(23);
            // The mark is 23 hours old, and its packs go while this push may run.
            let report = push(&store, &image.path(), "two").await.unwrap();
            assert_eq!((report.shared, report.kept), (0, 0));
            objects.pass(2);
            assert_eq!(collect_garbage(&store, GRACE).await.unwrap().removed_packs, 1);
            check(&store, "two").await;
        });
    }

    #[test]
    fn an_index_that_lost_its_name_goes_after_two_days() {
        let (one, two) =
            (TestImage::new(&random_bytes("one", CHUNK)), TestImage::new(&random_bytes("two", CHUNK)));
        run(async {
            let (objects, store) = TestObjects::new();
            push(&store, &one.path(), "web").await.unwrap();
            push(&store, &two.path(), "web").await.unwrap();
            let mut removed = Vec::new();
            for _ in 0..4 {
                removed.push(collect_garbage(&store, GRACE).await.unwrap().removed_images);
                objects.pass(24);
            }
            assert_eq!(removed, [0, 0, 1, 0]);
            check(&store, "web").await;
        });
    }

    #[test]
    fn a_place_without_the_marker_of_a_store_is_refused() {
        run(async {
            let (objects, store) = TestObjects::new();
            let pack = "0123456789abcdef0123456789abcdef-0123456789abcdef";
            objects.replace(PACKS, pack, b"x".to_vec()).await;
            let no_store = |error| assert!(matches!(error, ImageStoreError::NoStore { .. }), "{error}");
            no_store(collect_garbage(&store, Duration::ZERO).await.unwrap_err());
            no_store(store.remove("web").await.unwrap_err());
            no_store(store.images().await.unwrap_err());
            assert_eq!(objects.names(PACKS).await, [pack]);
            store.mark().await.unwrap();
            assert_eq!(collect_garbage(&store, Duration::ZERO).await.unwrap().removed_packs, 1);
        });
    }

    #[test]
    fn an_image_that_a_push_replaces_meanwhile_is_not_removed() {
        let (one, two) =
            (TestImage::new(&random_bytes("one", CHUNK)), TestImage::new(&random_bytes("two", CHUNK)));
        run(async {
            let (objects, store) = TestObjects::new();
            push(&store, &one.path(), "web").await.unwrap();
            let (beside, path) = (store.clone(), two.path());
            objects.before(REMOVED, async move {
                push(&beside, &path, "web").await.unwrap();
            });
            let error = store.remove("web").await.unwrap_err();
            assert!(matches!(error, ImageStoreError::Replaced { .. }), "{error}");
            check(&store, "web").await;
        });
    }

    #[test]
    fn an_image_whose_name_is_refused_is_not_removed() {
        let image = TestImage::new(&random_bytes("one", CHUNK));
        run(async {
            let (objects, store) = TestObjects::new();
            push(&store, &image.path(), "one").await.unwrap();
            objects.refuse(Some(NAMES));
            let error = store.remove("one").await.unwrap_err();
            assert!(matches!(error, ImageStoreError::Request { act: "read", .. }), "{error}");
            objects.refuse(None);
            check(&store, "one").await;
        });
    }

    #[test]
    fn a_missing_index_of_an_image_removes_nothing() {
        let (one, two) =
            (TestImage::new(&random_bytes("one", CHUNK)), TestImage::new(&random_bytes("two", CHUNK)));
        run(async {
            let (objects, store) = TestObjects::new();
            push(&store, &one.path(), "one").await.unwrap();
            push(&store, &two.path(), "two").await.unwrap();
            let version = store.image("two").await.unwrap().version;
            store.remove("one").await.unwrap();
            objects.pass(100);
            let index = objects.read(INDEXES, &version).await;
            objects.remove(INDEXES, &version).await;
            let error = collect_garbage(&store, GRACE).await.unwrap_err();
            let lost = format!("test:/indexes/{version}");
            assert!(matches!(&error, ImageStoreError::Damaged { object, .. } if *object == lost), "{error}");
            // Nor what belongs to no image: all of it is planned first.
            assert_eq!((objects.names(PACKS).await.len(), objects.names(INDEXES).await.len()), (2, 1));
            objects.replace(INDEXES, &version, index).await;
            assert_eq!(collect_garbage(&store, GRACE).await.unwrap().removed_packs, 1);
            check(&store, "two").await;
        });
    }

    #[test]
    fn what_a_listing_lacks_is_read_directly() {
        let image = TestImage::new(&random_bytes("one", CHUNK));
        run(async {
            for folder in [NAMES, INDEXES] {
                let (objects, store) = TestObjects::new();
                push(&store, &image.path(), "one").await.unwrap();
                objects.hide(Some(folder));
                for _ in 0..3 {
                    objects.pass(25);
                    let report = collect_garbage(&store, GRACE).await.unwrap();
                    assert_eq!((report.removed_images, report.removed_packs), (0, 0), "{folder}");
                }
                objects.hide(None);
                check(&store, "one").await;
            }
        });
    }

    #[test]
    fn files_of_others_are_left_alone() {
        run(async {
            let (objects, store) = TestObjects::new();
            store.mark().await.unwrap();
            let names = ["notes.txt", "0123456789abcdef", "0123456789abcdef0123456789abcdef-0123"];
            let folders = [INDEXES, MANIFESTS, PACKS, REMOVED];
            for (folder, name) in folders.iter().flat_map(|folder| names.map(|name| (folder, name))) {
                objects.replace(folder, name, b"x".to_vec()).await;
            }
            objects.replace(CLOCK, "watch", b"x".to_vec()).await;
            collect_garbage(&store, Duration::ZERO).await.unwrap();
            for folder in folders {
                assert_eq!(objects.names(folder).await.len(), names.len(), "{folder}");
            }
            assert_eq!(objects.names(CLOCK).await, ["watch"]);
        });
    }

    #[test]
    fn a_damaged_name_or_index_removes_no_pack() {
        let image = TestImage::new(&random_bytes("one", CHUNK));
        run(async {
            for folder in [NAMES, INDEXES] {
                let (objects, store) = TestObjects::new();
                push(&store, &image.path(), "one").await.unwrap();
                let name = objects.names(folder).await.remove(0);
                objects.replace(folder, &name, b"x".to_vec()).await;
                objects.pass(100);
                let error = collect_garbage(&store, GRACE).await.unwrap_err();
                let damaged = format!("test:/{folder}/{name}");
                assert!(
                    matches!(&error, ImageStoreError::Damaged { object, .. } if *object == damaged),
                    "{error}"
                );
                assert_eq!(objects.names(PACKS).await.len(), 1);
                // `rewake rm` is the way out.
                store.remove("one").await.unwrap();
                assert_eq!(collect_garbage(&store, Duration::ZERO).await.unwrap().removed_packs, 1);
            }
        });
    }

    #[test]
    fn a_pack_that_is_used_in_part_is_kept_and_counted() {
        let (first, second) = (random_bytes("1", CHUNK), random_bytes("2", CHUNK));
        let (both, one) = (TestImage::new(&[&*first, &second].concat()), TestImage::new(&first));
        run(async {
            let (_, store) = TestObjects::new();
            push(&store, &both.path(), "both").await.unwrap();
            push(&store, &one.path(), "one").await.unwrap();
            assert_eq!(collect_garbage(&store, GRACE).await.unwrap().unused, 0);
            store.remove("both").await.unwrap();
            let report = collect_garbage(&store, Duration::ZERO).await.unwrap();
            assert_eq!((report.removed_packs, report.packs), (0, 2));
            // And the inventory.
            assert!((CHUNK as u64 + 1..CHUNK as u64 + 200).contains(&report.unused), "{report:?}");
            check(&store, "one").await;
        });
    }
}
