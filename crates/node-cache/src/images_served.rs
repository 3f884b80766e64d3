// SPDX-License-Identifier: MIT OR Apache-2.0
//! The image server of the cache: fetchers read images of stores from it. It listens on a unix socket in the cache's
//! directory, which no other user may enter.

use std::fs;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use rewake_image_server::clients::serve_each;
use rewake_image_server::connection::{Served, serve};
use rewake_image_server::exports::{Exports, ImageFolder};
use tracing::{error, info};

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
    let exports = Exports::new(folder);
    let serve_all = move || {
        let accept = || listener.accept().map(|(stream, _)| (stream, "a fetcher".to_owned()));
        serve_each(accept, move |stream, _| connection(&exports, stream))
    };
    let started = thread::Builder::new().name("images".to_owned()).spawn(serve_all);
    started.context("starting a thread").map(drop)
}

fn connection(exports: &Exports, mut stream: UnixStream) {
    let mut name = String::new();
    let served = stream.set_write_timeout(Some(SEND_LIMIT)).context("the connection").and_then(|()| {
        serve(exports, &mut stream, |_, image| {
            name = image.display().to_string();
            Ok(())
        })
    });
    match served {
        Ok(Served { reads, bytes }) => info!("image {name:.16}: {bytes} bytes in {reads} reads"),
        Err(error) => error!("image {name:.16}: {error:#}"),
    }
}
