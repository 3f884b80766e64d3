// SPDX-License-Identifier: MIT OR Apache-2.0
//! Requests for the node's cache. What waits for a store runs in a thread of its own, so that the client gets
//! a message each second.

use rewake_image_signature::Signers;
use std::ffi::OsString;
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use rewake_node_cache::{CachePin, CachedImageState, MemoryLost, NodeCache, SharedSockets};
use rewake_streamer::control::WAITING_INTERVAL;
use rewake_streamer::control::descriptors::send_descriptors;
use rewake_streamer::control::frame::FrameError;
use rewake_streamer::control::proto::{self, reply};
use tokio::net::UnixStream;
use tokio::sync::Semaphore;
use tokio::time::{Instant, interval, interval_at};

use super::answer::{answer, failure};

/// Why a request for the cache is refused.
const NO_CACHE: &str = "this `rewake serve` has no cache: start it with --cache DIR";

/// Requests for the cache that have a thread at once. Restores without the cache need threads, too.
const MAX_WORKS: usize = 256;
/// Time between two looks whether an image is complete.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// The agent's cache; none: it has none.
#[derive(Debug, Clone)]
pub(super) struct AgentCache {
    pub(super) cache: Option<Arc<NodeCache>>,
    /// A permit for each request that may have a thread.
    works: Arc<Semaphore>,
}

impl AgentCache {
    pub(super) fn new(cache: Option<Arc<NodeCache>>) -> Self {
        Self { cache, works: Arc::new(Semaphore::new(MAX_WORKS)) }
    }

    /// Runs a function of the cache in a thread, and keeps the client waiting.
    async fn run<T: Send + 'static>(
        &self,
        stream: &mut UnixStream,
        work: impl FnOnce(&Arc<NodeCache>) -> anyhow::Result<T> + Send + 'static,
    ) -> Result<anyhow::Result<T>, FrameError> {
        let Some(cache) = self.cache.clone() else { return Ok(Err(anyhow!(NO_CACHE))) };
        // A thread works on also if its client is gone.
        let Ok(permit) = Arc::clone(&self.works).try_acquire_owned() else {
            return Ok(Err(anyhow!("the agent works on {MAX_WORKS} requests for its cache: try again")));
        };
        let mut done = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work(&cache)
        });
        let mut waits = interval_at(Instant::now() + WAITING_INTERVAL, WAITING_INTERVAL);
        loop {
            tokio::select! {
                done = &mut done => return Ok(done.context("a thread of the cache").flatten()),
                _ = waits.tick() => answer(stream, reply::Kind::Waiting(proto::Waiting {})).await?,
            }
        }
    }

    /// Answers [`proto::Acquire`]. Returns what keeps the image in the cache.
    pub(super) async fn acquire(
        &self,
        stream: &mut UnixStream,
        acquire: proto::Acquire,
    ) -> Result<Option<CachePin>, FrameError> {
        let proto::Acquire { url, id, whole, signers } = acquire;
        let signers: Vec<PathBuf> = signers.into_iter().map(|path| OsString::from_vec(path).into()).collect();
        let name = url.clone();
        let acquired = self.run(stream, move |cache| {
            let id = Some(&*id).filter(|id| !id.is_empty());
            cache.acquire(&url.parse()?, id, &Signers::all(&signers)?)
        });
        let mut acquired = acquired.await?;
        if whole && let Ok(pin) = &acquired {
            let complete = is_complete(stream, pin).await?;
            acquired = acquired.and_then(|pin| complete.context(name).map(|()| pin));
        }
        let (kind, pin) = match acquired {
            Err(error) => (failure(format!("{error:#}")), None),
            Ok(pin) => {
                let images_dir = pin.path().as_os_str().as_bytes().to_vec();
                let (image_id, missing) = (pin.id().to_string(), pin.missing());
                let acquired = proto::Acquired { images_dir, image_id, missing };
                (reply::Kind::Acquired(acquired), Some(pin))
            }
        };
        answer(stream, kind).await.map(|()| pin)
    }

    /// Answers [`proto::Fetch`].
    pub(super) async fn fetch(&self, stream: &mut UnixStream, fetch: proto::Fetch) -> Result<(), FrameError> {
        let fetched = |complete, layout| reply::Kind::Fetched(proto::Fetched { complete, layout });
        match self.run(stream, move |cache| cache.fetch(&fetch.image_id)).await? {
            Err(error) => {
                let lasting = error.downcast_ref::<MemoryLost>().is_some();
                let reason = format!("{error:#}");
                answer(stream, reply::Kind::Failure(proto::Failure { reason, lasting })).await
            }
            Ok(None) => answer(stream, fetched(true, 0)).await,
            Ok(Some(SharedSockets { presence, socket, layout })) => {
                answer(stream, fetched(false, layout)).await?;
                send_descriptors(stream, [presence.as_fd(), socket.as_fd()]).await
            }
        }
    }

    /// Answers [`proto::AskCached`].
    pub(super) async fn list(&self, stream: &mut UnixStream) -> Result<(), FrameError> {
        let kind = match self.run(stream, |cache| Ok(cache.list())).await? {
            Err(error) => failure(format!("{error:#}")),
            Ok(images) => {
                let images = images.into_iter().map(cached_image).collect();
                reply::Kind::Cached(proto::CachedImages { images })
            }
        };
        answer(stream, kind).await
    }

    /// Answers [`proto::RemoveCached`].
    pub(super) async fn remove(
        &self,
        stream: &mut UnixStream,
        remove: proto::RemoveCached,
    ) -> Result<(), FrameError> {
        let removed = self.run(stream, move |cache| cache.remove(&remove.id)).await?;
        let kind = removed.map_or_else(
            |error| failure(format!("{error:#}")),
            |bytes| reply::Kind::Removed(proto::Removed { bytes }),
        );
        answer(stream, kind).await
    }
}

/// Waits until all of an image is here, as long as its client.
async fn is_complete(stream: &mut UnixStream, pin: &CachePin) -> Result<anyhow::Result<()>, FrameError> {
    let (mut looks, mut waits) =
        (interval(LOOK_INTERVAL), interval_at(Instant::now() + WAITING_INTERVAL, WAITING_INTERVAL));
    loop {
        tokio::select! {
            _ = looks.tick() => match pin.is_complete() {
                Ok(false) => {}
                complete => return Ok(complete.map(drop)),
            },
            _ = waits.tick() => answer(stream, reply::Kind::Waiting(proto::Waiting {})).await?,
        }
    }
}

fn cached_image(image: CachedImageState) -> proto::CachedImage {
    let CachedImageState { id, url, bytes, complete, unused, in_use } = image;
    let url = url.map(|url| url.to_string()).unwrap_or_default();
    proto::CachedImage { image_id: id.to_string(), url, bytes, complete, unused_s: unused.as_secs(), in_use }
}
