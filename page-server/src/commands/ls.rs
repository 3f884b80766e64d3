// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake ls`: lists the images of a store.

use anyhow::bail;
use rewake_image_store::{ImageStore, StoredImage};
use rewake_streamer::units;

use super::{print, store_runtime};
use crate::cli::LsArgs;
use crate::logging;

/// Runs the command; gives the exit code.
///
/// # Errors
/// The store cannot be read, or an image's object is damaged: the others were shown.
pub fn run(options: &LsArgs) -> anyhow::Result<u8> {
    logging::start(None, 2)?;
    let runtime = store_runtime()?;
    let store = ImageStore::open(&options.store)?;
    let images = runtime.block_on(store.images())?;
    let mut damaged = 0_u32;
    for (name, image) in images {
        match image {
            Ok(StoredImage { id, files, bytes, .. }) => {
                print::done(format!("{name:<24} {id} {files:>5} files {:>10}", units::bytes(bytes)));
            }
            Err(error) => {
                damaged += 1;
                print::say(error);
            }
        }
    }
    if damaged > 0 {
        bail!("{}: {damaged} images cannot be read", options.store);
    }
    Ok(0)
}
