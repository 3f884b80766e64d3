// SPDX-License-Identifier: MIT OR Apache-2.0
//! The daemon's side of the control socket: accepts clients and answers them until the daemon ends.

use std::cell::Cell;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Notify;
use tokio::task::LocalSet;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tracing::{debug, info, warn};

use super::accept;
use super::frame::{FrameError, receive, send};
use super::proto::{self, Reply, Request, reply, request};
use super::registry::{Facts, Known, Registry};
use super::{CONNECT_LIMIT, MAX_CLIENTS, MESSAGE_LIMIT, REPORT};
use rewake_streamer::gpu::plugin_folder;
use rewake_streamer::session::daemon::Daemon;

/// Time that clients have to take their last answers when the daemon ends.
const GRACE: Duration = Duration::from_secs(2);
/// Between two looks whether a session was opened.
const BREATH: Duration = Duration::from_millis(100);

/// When the daemon ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// Asked to (SIGTERM), and no session is left.
    Asked,
    /// That, or its sessions have ended, or none was opened for [`CONNECT_LIMIT`].
    Idle,
}

struct Server {
    daemon: Arc<Daemon>,
    registry: Rc<Registry>,
    facts: Facts,
    clients: Cell<usize>,
    client_left: Notify,
}

/// Serves clients and sessions until the daemon ends. `ready` is called when clients are answered, and what a
/// dead worker left is taken up.
///
/// # Errors
/// The listener cannot be used.
pub async fn run(
    daemon: &Arc<Daemon>,
    listener: std::os::unix::net::UnixListener,
    facts: Facts,
    until: Until,
    ready: impl FnOnce(),
) -> anyhow::Result<()> {
    let local = LocalSet::new();
    local
        .run_until(async {
            let listener = UnixListener::from_std(listener).context("watching the control socket")?;
            let registry = Registry::new(daemon);
            registry.inherit();
            let (clients, client_left) = (Cell::new(0), Notify::new());
            let server =
                Rc::new(Server { daemon: Arc::clone(daemon), registry, facts, clients, client_left });
            ready();
            tokio::select! {
                () = Rc::clone(&server).accept(listener) => {}
                () = server.finished(until) => {}
            }
            Ok(())
        })
        .await
}

impl Server {
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
                    debug!(%error, "a client was given up");
                }
                server.clients.set(server.clients.get() - 1);
                server.client_left.notify_waiters();
            });
        }
    }

    /// Returns when the daemon is to end.
    async fn finished(&self, until: Until) {
        let mut stopping = self.daemon.stopping.subscribe();
        let idle = async {
            if until == Until::Asked {
                std::future::pending::<()>().await;
            }
            sleep_until_any(&self.registry).await;
        };
        tokio::select! {
            // An error means that the daemon, which has the other half, is gone: so is this.
            _ = stopping.wait_for(|asked| *asked) => info!("no new sessions"),
            () = idle => {}
        }
        self.wait_for(&self.registry.ended, || self.registry.is_empty()).await;
        // Late: whoever still waits for an answer has not taken what was sent.
        let _ = timeout(GRACE, self.wait_for(&self.client_left, || self.clients.get() == 0)).await;
    }

    async fn wait_for(&self, news: &Notify, done: impl Fn() -> bool) {
        loop {
            let notified = news.notified();
            if done() {
                return;
            }
            notified.await;
        }
    }

    async fn client(&self, mut stream: UnixStream) -> Result<(), FrameError> {
        if !accept::greet(&mut stream).await? {
            return Ok(());
        }
        while let Some(request) = receive::<Request>(&mut stream, MESSAGE_LIMIT).await? {
            let answer = match request.kind {
                Some(request::Kind::Follow(follow)) => {
                    self.follow(&mut stream, follow.session).await?;
                    continue;
                }
                Some(request::Kind::Open(open)) => self.open(&open).await,
                Some(request::Kind::End(end)) => match self.registry.end(end.session) {
                    Ok(()) => {
                        self.follow(&mut stream, end.session).await?;
                        continue;
                    }
                    Err(error) => failure(&format!("{error:#}")),
                },
                Some(request::Kind::Status(_)) => reply::Kind::Status(self.registry.status(self.facts)),
                Some(request::Kind::Streaming(_)) | None => {
                    failure("a request that this daemon does not know")
                }
            };
            let opened = match &answer {
                reply::Kind::Opened(opened) => Some(opened.session),
                _ => None,
            };
            let sent = send(&mut stream, &Reply { kind: Some(answer) }).await;
            if let (Err(_), Some(session)) = (&sent, opened) {
                // Nobody knows of it. It may have ended by itself.
                let _ = self.registry.end(session);
            }
            sent?;
        }
        Ok(())
    }

    async fn open(&self, open: &proto::Open) -> reply::Kind {
        let path = |bytes| Path::new(OsStr::from_bytes(bytes));
        let (images, work) = (path(&open.images_dir), path(&open.work_dir));
        let limit = match open.connect_limit_ms {
            0 => CONNECT_LIMIT,
            limit => Duration::from_millis(limit.into()),
        };
        let opened = match plugin_folder::image_has_gpu(images) {
            Ok(true) => {
                self.registry.stream(images, work, limit, open.record).await.map(|(session, lazy_pages)| {
                    proto::Opened { session, streamer: Some(proto::Streamer { lazy_pages }) }
                })
            }
            // What cannot be read is refused with the image.
            _ => self
                .registry
                .open(images, work, limit)
                .map(|session| proto::Opened { session, streamer: None }),
        };
        match opened {
            Ok(opened) => reply::Kind::Opened(opened),
            Err(error) => failure(&format!("{error:#}")),
        }
    }

    async fn follow(&self, stream: &mut UnixStream, number: u64) -> Result<(), FrameError> {
        let mut reports = interval(REPORT);
        reports.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let ended = self.registry.ended.notified();
            let known = self.registry.find(number);
            let (kind, last) = match known {
                Some(Known::Live(session)) => (reply::Kind::Progress(session), false),
                Some(Known::Ended(ended)) => (reply::Kind::Ended(ended), true),
                None => (
                    failure(&format!("session {number} is not known: it ended long ago, or never was")),
                    true,
                ),
            };
            send(stream, &Reply { kind: Some(kind) }).await?;
            if last {
                return Ok(());
            }
            tokio::select! {
                () = ended => {}
                _ = reports.tick() => {}
            }
        }
    }
}

/// Returns once a session was opened, or none was for so long that none will be.
async fn sleep_until_any(registry: &Registry) {
    let any = async {
        while !registry.had_any() {
            sleep(BREATH).await;
        }
    };
    // Either way there is no more to wait for.
    let _ = timeout(CONNECT_LIMIT, any).await;
}

fn failure(reason: &str) -> reply::Kind {
    reply::Kind::Failure(proto::Failure { reason: reason.to_owned() })
}
