// SPDX-License-Identifier: MIT OR Apache-2.0
//! The image server of the cache: fetchers read images of stores from it. It listens on a unix socket in the
//! cache's directory, which no other user may enter.

use std::fs;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rewake_image_transfer::server::clients::{ConnectedClient, serve_each};
use rewake_image_transfer::server::connection::{Served, serve};
use rewake_image_transfer::server::exports::{Exports, ImageFolder, OpenImage, PeerRights};
use tracing::{error, info};

use crate::cache::NodeCache;

/// Time for a fetcher to take bytes that were sent.
const SEND_LIMIT: Duration = Duration::from_secs(60);

/// The images that fetchers read.
#[derive(Debug)]
pub(crate) struct CacheImages(pub(crate) Weak<NodeCache>);

impl ImageFolder for CacheImages {
    fn open(&self, name: &Path, ancestor: u32, _: &PeerRights) -> anyhow::Result<Box<dyn OpenImage>> {
        ensure!(ancestor == 0, "images of the cache have no parents");
        let cache = self.0.upgrade().context("the cache has ended")?;
        let entry = cache.with_id(name.to_str().context("expected an image id")?)?;
        let pinned = entry.pinned().context("the image is not fetched any more")?;
        pinned.open_files(cache.runtime())
    }
}

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
        let accept = || {
            let (client, _) = listener.accept()?;
            Ok(ConnectedClient { client, name: "a fetcher".to_owned(), host: None })
        };
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
        Ok(Served { reads, bytes }) => info!("image {name}: {bytes} bytes in {reads} reads"),
        Err(error) => error!("image {name}: {error:#}"),
    }
}
