// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake seal`: writes the manifest of an image.

use std::io::Write as _;
use std::time::Instant;

use anyhow::{Context as _, bail};
use rewake_manifest::{MANIFEST_NAME, SealReport, seal};
use rewake_process::file_lock::DirectoryLock;
use rewake_streamer::units;

use crate::cli::SealArgs;

/// Runs the command; gives the exit code.
///
/// # Errors
/// The image cannot be sealed: it has no manifest then.
pub fn run(options: &SealArgs) -> anyhow::Result<u8> {
    let start = Instant::now();
    let lock = match DirectoryLock::take(&options.images_dir) {
        Ok(None) => bail!(
            "{}: a dump, a copy or a restore writes into it: seal it when that has ended",
            options.images_dir.display()
        ),
        // Remote file systems may have no locks of directories.
        lock => lock.ok().flatten(),
    };
    let sealed = seal(&options.images_dir)?;
    drop(lock);
    let SealReport { id, files, bytes, zero_bytes, duplicate_bytes, manifest_bytes, .. } = sealed;
    let [all, zeros, duplicates, manifest] =
        [bytes, zero_bytes, duplicate_bytes, manifest_bytes].map(units::bytes);
    let time = units::seconds(start.elapsed());
    writeln!(
        std::io::stdout(),
        "sealed {files} files, {all} in {time}: {zeros} of zeros, {duplicates} of duplicates; \
         {MANIFEST_NAME} has {manifest}; image {id:.16}"
    )
    .context("writing the report")?;
    if sealed.has_unsealed_parent {
        let parent = options.images_dir.join("parent");
        eprintln!("rewake: {} is not sealed: run `rewake seal` on it too", parent.display());
    }
    Ok(0)
}
