// SPDX-License-Identifier: MIT OR Apache-2.0
//! Requests for the node's cache. What waits for a store runs in a thread of its own, and the client gets a message each
//! second meanwhile.

use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::sync::Arc;

use anyhow::Context as _;
use rewake_node_cache::{CachePin, CachedImageState, MemoryLost, NodeCache, SharedSockets};
use rewake_streamer::control::WAITING;
use rewake_streamer::control::descriptors::send_descriptors;
use rewake_streamer::control::frame::FrameError;
use rewake_streamer::control::proto::{self, reply};
use tokio::net::UnixStream;
use tokio::time::{Instant, interval_at};

use super::answer::{answer, failure};

/// Why a request for the cache is refused.
const NO_CACHE: &str = "this `rewake serve` has no cache: start it with --cache DIR";

/// The agent's cache; none: it has none.
#[derive(Debug, Clone)]
pub(super) struct AgentCache(pub(super) Option<Arc<NodeCache>>);

impl AgentCache {
    /// Runs a function of the cache in a thread, and keeps the client waiting.
    async fn run<T: Send + 'static>(
        &self,
        stream: &mut UnixStream,
        work: impl FnOnce(&Arc<NodeCache>) -> anyhow::Result<T> + Send + 'static,
    ) -> Result<anyhow::Result<T>, FrameError> {
        let Some(cache) = self.0.clone() else { return Ok(Err(anyhow::anyhow!(NO_CACHE))) };
        let mut done = tokio::task::spawn_blocking(move || work(&cache));
        let mut waits = interval_at(Instant::now() + WAITING, WAITING);
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
        let proto::Acquire { url, id, whole } = acquire;
        let acquired = self.run(stream, move |cache| {
            let id = Some(&*id).filter(|id| !id.is_empty());
            cache.acquire(&url.parse()?, id, whole)
        });
        let (kind, pin) = match acquired.await? {
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

fn cached_image(image: CachedImageState) -> proto::CachedImage {
    let CachedImageState { id, url, bytes, complete, unused, in_use } = image;
    let url = url.map(|url| url.to_string()).unwrap_or_default();
    proto::CachedImage { image_id: id.to_string(), url, bytes, complete, unused_s: unused.as_secs(), in_use }
}
