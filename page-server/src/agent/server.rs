// SPDX-License-Identifier: MIT OR Apache-2.0
//! Accepts clients of the control socket and answers them until the agent is asked to end.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;
use tokio::task::{LocalSet, spawn_blocking};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tracing::{debug, info, warn};

use super::answer::{answer, failure};
use super::cache::AgentCache;
use super::metrics;
use super::recovery;
use super::session::Registry;
use rewake_node_cache::NodeCache;
use rewake_streamer::control::frame::{FrameError, receive};
use rewake_streamer::control::proto::{self, Request, reply, request};
use rewake_streamer::control::{MAX_CLIENTS, MESSAGE_LIMIT, OPEN_LIMIT, accept};
use rewake_streamer::supervise::leftover_stores;

/// Time between two looks at what is to be taken back.
const TAKE_BACK_INTERVAL: Duration = Duration::from_secs(60);

/// Serves clients until SIGTERM or SIGINT. `ready` is called when they are answered. Streamers continue
/// afterwards. `cache` has images of stores. Clients of the listener `metrics` read metrics.
///
/// # Errors
/// The listener or signals cannot be used.
pub async fn run(
    listener: std::os::unix::net::UnixListener,
    socket: &Path,
    cache: Option<Arc<NodeCache>>,
    metrics: Option<std::net::TcpListener>,
    ready: impl FnOnce(),
) -> anyhow::Result<()> {
    LocalSet::new()
        .run_until(async {
            let listener = UnixListener::from_std(listener).context("watching the control socket")?;
            let mut terminate = signal(SignalKind::terminate()).context("watching SIGTERM")?;
            let mut interrupt = signal(SignalKind::interrupt()).context("watching SIGINT")?;
            let server = Server::new(socket, AgentCache::new(cache));
            if let Some(listener) = metrics {
                let listener =
                    TcpListener::from_std(listener).context("watching the socket of the metrics")?;
                let (registry, cache) = (Rc::clone(&server.registry), server.cache.clone());
                tokio::task::spawn_local(metrics::serve(listener, registry, cache));
            }
            tokio::task::spawn_local(take_back());
            ready();
            let asked = async {
                tokio::select! {
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
            };
            server.serve(listener, asked).await;
            Ok(())
        })
        .await
}

/// Takes back what frozen or traced processes keep of restores that are over, when they can be stopped again,
/// and has sessions of other starters served again.
async fn take_back() {
    let mut ticks = interval(TAKE_BACK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        recovery::recover_others().await;
        match spawn_blocking(leftover_stores::take_back).await {
            Ok(Ok(left)) => left.iter().for_each(|line| debug!("{line}")),
            Ok(Err(error)) => debug!("{error:#}"),
            // The agent ends.
            Err(_) => return,
        }
    }
}

struct Server {
    registry: Rc<Registry>,
    cache: AgentCache,
    clients: Cell<usize>,
    /// Requests for a streamer that are not answered yet.
    opening: Cell<usize>,
    opened: Notify,
    /// The agent was asked to end.
    ends: Cell<bool>,
}

impl Server {
    fn new(socket: &Path, cache: AgentCache) -> Rc<Self> {
        let registry = Registry::start(socket, cache.clone());
        let (clients, opening, opened) = (Cell::new(0), Cell::new(0), Notify::new());
        Rc::new(Self { registry, cache, clients, opening, opened, ends: Cell::new(false) })
    }

    /// Serves clients until the agent is `asked` to end. A client that waits for its streamer then gets its
    /// answer, and the streamer what it asks for: memory of an image of the cache.
    async fn serve(self: Rc<Self>, listener: UnixListener, asked: impl Future<Output = ()>) {
        let ended = async {
            asked.await;
            info!("asked to end: streamers continue");
            self.ends.set(true);
            let _ = timeout(OPEN_LIMIT, self.opened_all()).await;
        };
        tokio::select! {
            () = Rc::clone(&self).accept(listener) => {}
            () = ended => {}
        }
    }

    async fn accept(self: Rc<Self>, listener: UnixListener) {
        loop {
            let stream = accept::next(&listener).await;
            if self.clients.get() >= MAX_CLIENTS {
                warn!("more than {MAX_CLIENTS} clients at once: one was turned away");
                continue;
            }
            self.clients.set(self.clients.get() + 1);
            let server = Rc::clone(&self);
            tokio::task::spawn_local(async move {
                if let Err(error) = server.client(stream).await {
                    debug!(%error, "a client was dropped");
                }
                server.clients.set(server.clients.get() - 1);
            });
        }
    }

    async fn opened_all(&self) {
        while self.opening.get() > 0 {
            self.opened.notified().await;
        }
    }

    async fn client(&self, mut stream: UnixStream) -> Result<(), FrameError> {
        if !accept::greet(&mut stream).await? {
            return Ok(());
        }
        // What the client has of the cache, until it closes the connection.
        let mut pins = Vec::new();
        while let Some(request) = receive::<Request>(&mut stream, MESSAGE_LIMIT).await? {
            match request.kind {
                Some(request::Kind::Open(_)) if self.ends.get() => {
                    let reason = "this `rewake serve` was asked to end: start another one, and restore again";
                    answer(&mut stream, failure(reason.to_owned())).await?;
                }
                Some(request::Kind::Open(open)) => {
                    self.opening.set(self.opening.get() + 1);
                    let sent = self.open(&mut stream, &open).await;
                    self.opening.set(self.opening.get() - 1);
                    self.opened.notify_one();
                    sent?;
                }
                Some(request::Kind::Status(_)) => {
                    answer(&mut stream, reply::Kind::Status(self.registry.status())).await?;
                }
                Some(request::Kind::Acquire(acquire)) => {
                    pins.extend(self.cache.acquire(&mut stream, acquire).await?);
                }
                Some(request::Kind::Fetch(fetch)) => self.cache.fetch(&mut stream, fetch).await?,
                Some(request::Kind::Cached(_)) => self.cache.list(&mut stream).await?,
                Some(request::Kind::Remove(remove)) => self.cache.remove(&mut stream, remove).await?,
                _ => {
                    let reason = "this is `rewake serve`: a streamer answers that, in its work directory";
                    answer(&mut stream, failure(reason.to_owned())).await?;
                }
            }
        }
        Ok(())
    }

    /// A streamer whose client has ended ends by itself: no restore connects.
    async fn open(&self, stream: &mut UnixStream, open: &proto::Open) -> Result<(), FrameError> {
        let opened = self.registry.open(open).await;
        if opened.is_err() {
            self.registry.refused();
        }
        answer(stream, opened.map_or_else(|error| failure(format!("{error:#}")), reply::Kind::Opened)).await
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;
    use std::time::Duration;

    use rewake_streamer::control::client::Client;
    use rewake_streamer::working_set::LoadingOptions;

    use super::*;

    #[tokio::test]
    async fn an_agent_that_ends_serves_streamers_that_start() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let local = LocalSet::new();
        let serves = local.run_until(async {
            let server = Server::new(&path, AgentCache::new(None));
            server.opening.set(1);
            let served = tokio::task::spawn_local(Rc::clone(&server).serve(listener, ready(())));
            let mut client = Client::connect(&path).await.unwrap();
            assert_eq!(client.status().await.unwrap().sessions.len(), 0);
            let (images, work) = (Path::new("/images"), Path::new("/work"));
            let refused = client.open(images, work, LoadingOptions::default(), &[]).await.unwrap_err();
            assert!(refused.to_string().contains("was asked to end"), "{refused}");
            server.opening.set(0);
            server.opened.notify_one();
            served.await.unwrap();
        });
        timeout(Duration::from_secs(20), serves).await.unwrap();
    }
}
