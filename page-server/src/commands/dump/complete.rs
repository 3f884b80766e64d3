// SPDX-License-Identifier: MIT OR Apache-2.0
//! What makes the files of a dump an image: holes, the list of duplicate buffers, and the manifest.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rewake_manifest::seal;
use rewake_streamer::gpu::duplicates_file::{self, DuplicateSearch};
use rewake_streamer::units;

use crate::sparse;

/// Buffers that look the same are compared for that long, if the dump took less time.
const LEAST: Duration = Duration::from_secs(10);
/// Bytes whose comparison takes long enough to need a message.
const WORTH_A_LINE: u64 = 256 << 20;

/// Completes the image of a dump that took `took`. It is on the disk when this returns.
///
/// # Errors
/// The image cannot be sealed.
pub(super) fn complete(images: &Path, took: Duration) -> anyhow::Result<()> {
    if let Err(error) = sparse::punch_zero_blocks(images) {
        eprintln!("rewake: zeros in the image are not left out: {error:#}");
    }
    find_duplicates(images, took);
    let start = Instant::now();
    let sealed = seal(images).context("sealing the image")?;
    let (bytes, time) = (units::bytes(sealed.bytes), units::seconds(start.elapsed()));
    eprintln!("rewake: sealed {bytes} in {time}; image {:.16}", sealed.id);
    Ok(())
}

/// The image is right whatever the result here.
fn find_duplicates(images: &Path, took: Duration) {
    let limit = time_to_compare(took);
    let within = || units::seconds(limit);
    let begins = |bytes: u64| {
        if bytes >= WORTH_A_LINE {
            let bytes = units::bytes(bytes);
            eprintln!(
                "rewake: comparing {bytes} of GPU buffers that look the same, for {} at most",
                within()
            );
        }
        limit
    };
    let found = duplicates_file::find(images, begins);
    if let Ok(DuplicateSearch { spared: spared @ 1.., .. }) = found {
        eprintln!("rewake: {spared} GPU buffers have the bytes of others and need not be read");
    }
    match found {
        Ok(DuplicateSearch { cut_off: false, .. }) => {}
        Ok(DuplicateSearch { cut_off: true, .. }) => eprintln!(
            "rewake: not all GPU buffers that look the same could be compared in {}: the others will be read one by one",
            within()
        ),
        Err(error) => {
            eprintln!("rewake: GPU buffers with the same bytes will be read more than once: {error:#}");
        }
    }
}

/// A dump's bytes can be read in the time that it took to write them, so no user waits for more than twice
/// the dump.
fn time_to_compare(took: Duration) -> Duration {
    took.max(LEAST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_compared_for_as_long_as_the_dump_took_or_some_seconds() {
        let compared = |seconds| time_to_compare(Duration::from_secs(seconds)).as_secs();
        assert_eq!([0, 9, 11, 3600].map(compared), [10, 10, 11, 3600]);
    }
}
