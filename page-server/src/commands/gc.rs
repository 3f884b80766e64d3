// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake gc`: frees the space of what no image of a store uses.

use std::time::Duration;

use rewake_image_store::{GRACE, GarbageReport, ImageStore, collect_garbage};
use rewake_streamer::units;

use super::{print, store_runtime};
use crate::cli::GcArgs;
use crate::logging;

/// Runs the command; gives the exit code.
///
/// # Errors
/// See [`collect_garbage`].
pub fn run(options: &GcArgs) -> anyhow::Result<u8> {
    logging::start(None, 2)?;
    let runtime = store_runtime()?;
    let store = ImageStore::open(&options.store)?;
    let grace = if options.now { Duration::ZERO } else { GRACE };
    let report = runtime.block_on(collect_garbage(&store, grace))?;
    let GarbageReport { removed_images, removed_packs, removed_bytes, packs, bytes, unused, waiting } =
        report;
    let [removed_bytes, bytes, unused, waiting] = [removed_bytes, bytes, unused, waiting].map(units::bytes);
    print::done(format!(
        "{}: removed {removed_images} images and {removed_packs} packs of {removed_bytes}; {packs} packs of \
         {bytes} are left, of which no image uses {unused}; {waiting} are removed when they are a day old",
        options.store
    ));
    Ok(0)
}
