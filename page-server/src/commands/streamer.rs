// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake streamer`: the streamer of one restore. `rewake restore` and `rewake serve` start it.
//!
//! It serves CPU memory to `criu restore --lazy-pages` (with `-D`), and loads GPU memory that CRIU's plugin
//! hands over (where the image has some).

use std::time::Duration;

use super::{directory, ready};
use crate::cli::StreamerArgs;
use crate::logging;
use rewake_fetcher::plan::{PagePeer, PeerTls};
use rewake_streamer::control::streamer::{DAMAGED_IMAGE, NOT_LAZY};
use rewake_streamer::control::work_folder;
use rewake_streamer::failure::FailureCause;
use rewake_streamer::fetch_peer::{FetchPeer, FetchedImage};
use rewake_streamer::restore::{RestoreOptions, StreamedRestore};
use rewake_streamer::session::image::NotLazy;
use rewake_streamer::supervise::supervisor;
use rewake_streamer::working_set::LoadingOptions;

/// The exit code when memory could not be loaded, or the restore has failed.
const FAILED: u8 = 1;

/// Runs the command; gives the exit code: 0 when all memory is resident, [`supervisor::STOPPED`] when it was
/// asked to stop and nothing depended on it, [`NOT_LAZY`] when the image cannot be restored lazily,
/// [`DAMAGED_IMAGE`] when it is damaged.
///
/// # Errors
/// Options or directories are wrong, or another streamer serves there already.
pub fn run(options: &StreamerArgs) -> anyhow::Result<u8> {
    logging::start(options.log_file.as_deref(), options.verbosity)?;
    let work = directory(&options.work_dir, "-W")?;
    let restore = StreamedRestore::new(RestoreOptions {
        images: options.images_dir.as_deref().map(|images| directory(images, "-D")).transpose()?,
        no_gpus: options.no_gpus,
        work: work.clone(),
        loading: LoadingOptions {
            record: options.record,
            on_demand_only: options.on_demand_only.map(Duration::from_secs),
        },
        keeps_record: true,
        server: server(options),
        connect_timeout: options.connect_timeout.map(Duration::from_secs),
        or_eagerly: true,
        signers: options.signers.clone(),
    })?;
    let code = supervisor::supervise(ready(options.status_fd)?, |start| {
        restore.serve(start).unwrap_or_else(|error| match FailureCause::of(&error) {
            _ if error.is::<NotLazy>() => NOT_LAZY,
            FailureCause::DamagedImage => DAMAGED_IMAGE,
            _ => FAILED,
        })
    })?;
    if options.remove_work_dir && ![FAILED, NOT_LAZY, DAMAGED_IMAGE].contains(&code) {
        // A command that no streamer answers any more removes the directory itself.
        drop(restore);
        work_folder::remove_unused(&work);
    }
    Ok(code)
}

/// Returns what has missing memory of the image, or `None` if all of it is here.
fn server(options: &StreamerArgs) -> Option<FetchPeer> {
    let id = options.from_id.clone()?;
    let (peer, name) = match (&options.from_agent, &options.from_image) {
        (Some(agent), _) => (PagePeer::Agent(agent.clone()), id.clone().into()),
        (None, name) => (PagePeer::Tcp(options.from_address.clone()), name.clone()?),
    };
    let tls = options.tls.options().map(|tls| PeerTls { options: tls, host: options.from_host.clone() });
    Some(FetchPeer { peer, tls, connected: None, image: Some(FetchedImage { name, id }) })
}
