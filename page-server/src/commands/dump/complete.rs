// SPDX-License-Identifier: MIT OR Apache-2.0
//! What makes the files of a dump an image: holes and the manifest.

use std::path::Path;
use std::time::Instant;

use anyhow::Context as _;
use rewake_manifest::seal;
use rewake_streamer::units;

use super::super::print;
use crate::sparse;

/// Completes the image of a dump. It is on the disk when this returns. Gives a line for logs.
///
/// # Errors
/// The image cannot be sealed.
pub(super) fn complete(images: &Path) -> anyhow::Result<String> {
    if let Err(error) = sparse::punch_zero_blocks(images) {
        print::say(format!("zeros in the image are not left out: {error:#}"));
    }
    let start = Instant::now();
    let sealed = seal(images).context("sealing the image")?;
    let (bytes, time) = (units::bytes(sealed.bytes), units::seconds(start.elapsed()));
    Ok(format!("sealed {bytes} in {time}; image {}", sealed.id))
}
