// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake export`: serves sealed images to other hosts.

use std::io::Write as _;

use rewake_criu_page_server::endpoint::{Endpoint, Entrance};
use rewake_image_server::exports::Exports;
use rewake_image_server::server;

use crate::cli::ExportArgs;
use crate::logging;

/// Runs the command. It ends by a signal: clients connect again, and no image is written.
///
/// # Errors
/// The directory does not exist, or the port cannot be bound.
pub fn run(options: &ExportArgs) -> anyhow::Result<u8> {
    let ExportArgs { address, port, peers, .. } = options;
    let exports = Exports::new(&options.root)?;
    logging::start(options.log_file.as_deref(), options.verbosity)?;
    let admission = peers.admission(&options.allow)?;
    let for_other_hosts = peers.for_other_hosts();
    let entrance = Endpoint::Tcp { address: address.clone(), port: Some(*port), for_other_hosts }.open()?;
    // With port 0 the kernel chose it, and clients need it.
    let _ = writeln!(std::io::stderr(), "rewake: listening on {entrance}");
    let Entrance::Tcp(listener) = entrance else { unreachable!("a TCP port was opened") };
    server::run(exports, admission, &listener)
}
