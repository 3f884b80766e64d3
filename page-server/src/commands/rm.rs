// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake rm`: removes an image from a store.

use rewake_image_store::ImageStore;

use super::{print, store_runtime};
use crate::cli::RmArgs;
use crate::logging;

/// Runs the command; gives the exit code.
///
/// # Errors
/// There is no such image, or the store refuses.
pub fn run(options: &RmArgs) -> anyhow::Result<u8> {
    logging::start(None, 2)?;
    let runtime = store_runtime()?;
    let store = ImageStore::open(&options.image.store)?;
    let removed = runtime.block_on(store.remove(&options.image.name))?;
    let id = removed.map(|id| format!(" image {id}")).unwrap_or_default();
    print::done(format!("{}: removed{id}; `rewake gc` frees its space after a day", options.image));
    Ok(0)
}
