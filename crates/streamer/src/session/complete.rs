// SPDX-License-Identifier: MIT OR Apache-2.0
//! Completes the copy of another host's image, when no process depends on the session any more.
//!
//! Dumps of the processes do not wait for that, and SIGTERM ends it: the copy stays partial then.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rewake_criu_images::Digest;
use rewake_manifest::PARTIAL_NAME;
use tokio::sync::oneshot;
use tracing::{info, warn};

use crate::session::open::OpenSession;
use crate::sys;

/// Fetches what the image of a closed session lacks, and completes it.
pub(super) async fn fetch_rest(open: OpenSession) {
    let (slot, images) = (open.slot, open.session.images.clone());
    let fetched = match &open.fetch {
        Some(fetch) => fetch.finish().await,
        None => Ok(()),
    };
    // It has the lock of the directory.
    drop(open);
    match fetched {
        Ok(()) => complete(&images).await,
        Err(error) => {
            warn!(
                "all memory is resident, but not all of the image has arrived: `rewake pull` completes it: \
                 {error:#}"
            );
        }
    }
    slot.free();
}

/// Puts the manifest of a copy in place if all of its bytes are here. A worker that has died may have had no
/// time for that.
pub(crate) async fn complete(images: &Path) {
    if !images.join(PARTIAL_NAME).exists() {
        return;
    }
    match compare(images.to_owned()).await {
        Ok(id) => info!("{}: image {id} is complete", images.display()),
        Err(error) => warn!("{}: the image is not complete: {error:#}", images.display()),
    }
}

/// Compares all chunks in a thread of its own: a request to stop does not wait for it.
async fn compare(images: PathBuf) -> anyhow::Result<Digest> {
    let (sender, done) = oneshot::channel();
    // A receiver that has ended was asked to stop.
    let work = move || drop(sender.send(rewake_image_transfer::pull::complete(&images)));
    sys::thread_without_signals("complete", work).context("starting a thread")?;
    done.await.context("the thread that compares the image has ended")?
}
