// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake restore URL`: has the node agent bring an image of a store into its cache, which many restores
//! share.

use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rewake_criu_images::ImageLease;
use rewake_criu_images::amdgpu::image_has_gpu;
use rewake_image_store::ImageUrl;
use rewake_streamer::control::client::Client;
use rewake_streamer::control::proto::Acquire;
use rewake_streamer::supervise::launch::LaunchPlan;
use rewake_streamer::units;

use super::view::View;
use super::{PLUGIN_REMEDY, signers};
use crate::cli::RestoreArgs;
use crate::commands::{bytes_of, control_socket};

/// An image of the cache.
#[derive(Debug)]
pub(super) struct CacheLease {
    /// Its directory.
    pub(super) directory: PathBuf,
    /// It stays in the cache as long as this.
    pub(super) lease: ImageLease,
}

/// Has the agent bring what CRIU reads itself, and all of an image with GPU state whose memory may not arrive
/// later.
///
/// # Errors
/// No agent with a cache runs, or the image cannot be read.
pub(super) async fn acquire(
    options: &RestoreArgs,
    url: &ImageUrl,
    plugins: impl FnOnce(bool) -> anyhow::Result<Option<PathBuf>>,
) -> anyhow::Result<CacheLease> {
    let socket = control_socket(options.socket.as_deref())?;
    let connected = Client::connect(&socket).await.with_context(|| {
        format!(
            "{url}: a restore from a store needs a node agent with a cache: start `rewake serve --cache \
             DIR`, or copy the image with `rewake pull` and restore it with -D"
        )
    });
    let (mut client, view) = (connected?, View::new(options.quiet));
    let id = options.source.id.clone().unwrap_or_default();
    let mut acquire =
        Acquire { url: url.to_string(), id, whole: false, signers: bytes_of(signers(options)?) };
    let acquired = client.acquire(acquire.clone()).await?;
    let directory = PathBuf::from(std::ffi::OsString::from_vec(acquired.images_dir));
    let missing = acquired.missing;
    if missing > 0 {
        view.say(&format!("the program runs while {} arrive\n", units::bytes(missing)));
    }
    if missing > 0
        && has_gpus(&directory)?
        && let Some(reason) = LaunchPlan::eager_reason(plugins(true)?.as_deref(), PLUGIN_REMEDY)?
    {
        view.say(&format!("all of the image is copied before the processes run: {reason}\n"));
        acquire.whole = true;
        client.acquire(acquire).await?;
    }
    // The agent does not remove it while it has this connection. From here on the lease keeps it.
    let lease = ImageLease::shared(&directory).with_context(|| directory.display().to_string())?;
    let being_removed = || format!("{}: the image is being removed: try again", directory.display());
    let lease = lease.with_context(being_removed)?;
    Ok(CacheLease { directory, lease })
}

fn has_gpus(directory: &Path) -> anyhow::Result<bool> {
    image_has_gpu(directory).with_context(|| format!("reading {}", directory.display()))
}
