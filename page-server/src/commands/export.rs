// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake export`: serves sealed images to other hosts: of a directory, or of a store.

use std::sync::Arc;

use crate::page_server::endpoint::{Endpoint, Entrance};
use anyhow::bail;
use rewake_image_store::{ImageStore, StoreFolder};
use rewake_image_transfer::server::exports::{Exports, ImageDirectory, ImageFolder};
use rewake_image_transfer::server::peers;

use super::{print, store_runtime};
use crate::cli::{ExportArgs, ExportedPlace};
use crate::logging;

/// Runs the command. It ends by a signal: clients connect again, and no image is written.
///
/// # Errors
/// The directory does not exist, or the port cannot be bound.
pub fn run(options: &ExportArgs) -> anyhow::Result<u8> {
    let ExportArgs { address, port, peers, .. } = options;
    // Its threads read the store.
    let mut runtime = None;
    let folder: Arc<dyn ImageFolder> = match &options.root {
        ExportedPlace::Directory(directory) => Arc::new(ImageDirectory::new(directory)?),
        ExportedPlace::Store(url) => {
            let runtime = runtime.insert(store_runtime()?);
            Arc::new(StoreFolder::new(ImageStore::open(url)?, runtime.handle().clone()))
        }
    };
    let exports = Exports::new(folder);
    logging::start(options.log_file.as_deref(), options.verbosity)?;
    let admission = peers.admission(&options.allow)?;
    let for_other_hosts = peers.for_other_hosts();
    let entrance = Endpoint::Tcp { address: address.clone(), port: Some(*port), for_other_hosts }.open()?;
    // With port 0 the kernel chose it, and clients need it.
    print::say(format!("listening on {entrance}"));
    let Entrance::Tcp(listener) = entrance else { bail!("{entrance}: expected a TCP port") };
    peers::run(exports, admission, &listener)
}
