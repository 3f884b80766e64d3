// SPDX-License-Identifier: MIT OR Apache-2.0
//! Accepts clients: one, as `criu page-server` does, or many.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::{LocalSet, spawn_local};
use tokio::time::sleep;
use tracing::{error, info, warn};

use crate::connection::PageConnection;
use crate::endpoint::{ConnectedClient, Door, Entrance};
use crate::receive::{self, Receiver};
use crate::serve::{self, ServedImage};

/// Clients at once. Each has a buffer of 320 KiB, and two files at most.
const MAX_CLIENTS: usize = 128;
/// Threads for calls that wait for the disk.
const DISK_THREADS: usize = 16;
/// Time after a client could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What a server does for its clients.
#[derive(Debug)]
pub enum Role {
    /// It receives dumps.
    Receive(Receiver),
    /// It serves an image.
    Serve(ServedImage),
}

/// Serves clients. `ready` is called when they can connect.
///
/// With `keep_listening` it serves until SIGTERM or SIGINT; a client that fails is logged. Otherwise it serves one
/// client.
///
/// # Errors
/// The only client failed, or a signal came before it was done. What clients failed at is logged, too.
pub fn run(role: Role, entrance: Entrance, keep_listening: bool, ready: impl FnOnce()) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(DISK_THREADS)
        .build()
        .context("starting the runtime")?;
    LocalSet::new().block_on(&runtime, async {
        let mut stop = StopSignals::watch()?;
        let place = entrance.to_string();
        let door = Door::of(entrance).with_context(|| format!("listening on {place}"))?;
        let role = Rc::new(role);
        ready();
        info!("listening on {place}");
        if keep_listening { many(&role, door, &mut stop).await } else { one(&role, door, &mut stop).await }
    })
}

/// Serves the first client. The socket is closed when it has connected: no other client waits in vain.
async fn one(role: &Role, mut door: Door, stop: &mut StopSignals) -> anyhow::Result<()> {
    let arrival = tokio::select! {
        arrival = door.next() => arrival?,
        name = stop.next() => bail!("{name} before a client connected"),
    };
    drop(door);
    tokio::select! {
        served = client(role, arrival) => served,
        name = stop.next() => bail!("{name} before the client was done"),
    }
}

/// Serves all clients until a signal.
async fn many(role: &Rc<Role>, mut door: Door, stop: &mut StopSignals) -> anyhow::Result<()> {
    let clients = Rc::new(Cell::new(0));
    loop {
        let arrival = tokio::select! {
            arrival = door.next() => arrival,
            name = stop.next() => {
                info!("{name}: ending, {} clients are cut", clients.get());
                return Ok(());
            }
        };
        let arrival = match arrival {
            Ok(arrival) => arrival,
            Err(error) => {
                warn!("{error:#}");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        if clients.get() >= MAX_CLIENTS {
            error!("client {}: turned away, MAX_CLIENTS = {MAX_CLIENTS} are connected", arrival.peer);
            continue;
        }
        clients.set(clients.get() + 1);
        let (role, clients) = (Rc::clone(role), Rc::clone(&clients));
        spawn_local(async move {
            // It is logged.
            let _ = client(&role, arrival).await;
            clients.set(clients.get() - 1);
        });
    }
}

/// Serves one client to its end.
async fn client(role: &Role, arrival: ConnectedClient) -> anyhow::Result<()> {
    let mut connection = PageConnection::new(arrival);
    info!("client {}: connected", connection.peer());
    let served = match role {
        Role::Receive(receiver) => receive::receive(receiver, &mut connection).await,
        Role::Serve(image) => serve::serve(image, &mut connection).await,
    };
    let served = served.with_context(|| format!("client {}", connection.peer()));
    if let Err(error) = &served {
        error!("{error:#}");
    }
    served
}

/// The signals that end a server.
struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    fn watch() -> anyhow::Result<Self> {
        let terminate = signal(SignalKind::terminate()).context("watching SIGTERM")?;
        let interrupt = signal(SignalKind::interrupt()).context("watching SIGINT")?;
        Ok(Self { terminate, interrupt })
    }

    /// Waits for one, and returns its name.
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
