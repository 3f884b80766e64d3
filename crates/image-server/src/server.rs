// SPDX-License-Identifier: MIT OR Apache-2.0
//! Accepts clients, and serves each in a thread.

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rewake_peer_stream::{Admission, PATIENT, watch_peer};
use tracing::{error, info, warn};

use crate::connection::{Served, serve};
use crate::exports::Exports;

/// Connections at once; a restore has two. Each has a thread and a buffer of 64 KiB, as much again where it compresses,
/// and 130 KiB more with TLS.
const MAX_CONNECTIONS: usize = 256;
/// Time for a client to open an image, and to take bytes that were sent.
const CLIENT_LIMIT: Duration = Duration::from_secs(60);
/// Time after a client could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves the clients that are admitted, until the process is ended.
pub fn run(exports: Exports, admission: Admission, listener: &TcpListener) -> ! {
    let (server, clients) = (Arc::new((exports, admission)), Arc::new(AtomicUsize::new(0)));
    loop {
        let (stream, peer) = match listener.accept() {
            Ok(client) => client,
            Err(error) => {
                warn!(%error, "accepting a client");
                thread::sleep(ACCEPT_PAUSE);
                continue;
            }
        };
        if clients.fetch_add(1, Ordering::Relaxed) >= MAX_CONNECTIONS {
            clients.fetch_sub(1, Ordering::Relaxed);
            error!("client {peer}: turned away, MAX_CONNECTIONS = {MAX_CONNECTIONS} are connected");
            continue;
        }
        let (server, slot) = (Arc::clone(&server), ClientSlot(Arc::clone(&clients)));
        let serve = move || {
            let _slot = slot;
            let began = Instant::now();
            let (exports, admission) = &*server;
            match client(exports, admission, stream, &peer.to_string()) {
                Ok(Served { reads, bytes }) => {
                    info!("client {peer}: {bytes} bytes in {reads} reads, {:?}", began.elapsed());
                }
                Err(error) => error!("client {peer}: {error:#}"),
            }
        };
        if let Err(error) = thread::Builder::new().name("client".to_owned()).spawn(serve) {
            error!("client {peer}: turned away, it gets no thread: {error}");
        }
    }
}

/// One of the [`MAX_CONNECTIONS`]: free again when this is dropped, also by a panic.
struct ClientSlot(Arc<AtomicUsize>);

impl Drop for ClientSlot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn client(exports: &Exports, admission: &Admission, socket: TcpStream, peer: &str) -> anyhow::Result<Served> {
    // A client may be silent for hours after it has opened an image.
    watch_peer(&socket, PATIENT).context("the connection")?;
    socket.set_write_timeout(Some(CLIENT_LIMIT)).context("SO_SNDTIMEO")?;
    let (mut stream, rights) = admission.admit(socket)?;
    stream.socket().set_read_timeout(Some(CLIENT_LIMIT)).context("SO_RCVTIMEO")?;
    serve(&exports.permitted(rights), &mut stream, |stream, image| {
        info!("client {peer}: reads image {image}");
        stream.socket().set_read_timeout(None)
    })
}
