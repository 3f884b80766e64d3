// SPDX-License-Identifier: MIT OR Apache-2.0
//! The image server of the cache: fetchers read images of stores from it. It listens on a unix socket in the cache's
//! directory, which no other user may enter.

use std::fs;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use rewake_image_server::connection::{Served, serve};
use rewake_image_server::exports::{Exports, ImageFolder};
use tracing::{error, info, warn};

/// Connections at once: a fetcher has two.
const MAX_CONNECTIONS: usize = 256;
/// Time after a fetcher could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Time for a fetcher to take bytes that were sent.
const SEND_LIMIT: Duration = Duration::from_secs(60);

/// Serves the images of a folder to the fetchers of this process, as long as it runs.
pub(crate) fn start(socket: &Path, folder: Arc<dyn ImageFolder>) -> anyhow::Result<()> {
    match fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).with_context(|| socket.display().to_string());
        }
        _ => {}
    }
    let listener = UnixListener::bind(socket).with_context(|| socket.display().to_string())?;
    let exports = Arc::new(Exports::new(folder));
    let accept = move || accept(&listener, &exports);
    thread::Builder::new().name("images".to_owned()).spawn(accept).context("starting a thread").map(drop)
}

fn accept(listener: &UnixListener, exports: &Arc<Exports>) {
    let connected = Arc::new(AtomicUsize::new(0));
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) => {
                warn!(%error, "accepting a fetcher");
                thread::sleep(ACCEPT_PAUSE);
                continue;
            }
        };
        if connected.fetch_add(1, Ordering::Relaxed) >= MAX_CONNECTIONS {
            connected.fetch_sub(1, Ordering::Relaxed);
            error!("a fetcher was turned away: MAX_CONNECTIONS = {MAX_CONNECTIONS} are connected");
            continue;
        }
        let (exports, slot) = (Arc::clone(exports), ConnectionSlot(Arc::clone(&connected)));
        let serve = move || {
            let _slot = slot;
            connection(&exports, stream);
        };
        if let Err(error) = thread::Builder::new().name("image".to_owned()).spawn(serve) {
            error!("a fetcher was turned away, it gets no thread: {error}");
        }
    }
}

/// One of the [`MAX_CONNECTIONS`]: free again when this is dropped, also by a panic.
struct ConnectionSlot(Arc<AtomicUsize>);

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn connection(exports: &Exports, mut stream: UnixStream) {
    let mut name = String::new();
    let served = stream.set_write_timeout(Some(SEND_LIMIT)).context("the connection").and_then(|()| {
        serve(exports, &mut stream, |_, image| {
            image.clone_into(&mut name);
            Ok(())
        })
    });
    match served {
        Ok(Served { reads, bytes }) => info!("image {name:.16}: {bytes} bytes in {reads} reads"),
        Err(error) => error!("image {name:.16}: {error:#}"),
    }
}
