// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake push`: stores a sealed image.

use std::time::Instant;

use anyhow::Context as _;
use rewake_criu_images::ImageDir;
use rewake_image_store::{ImageStore, StorePushReport, push};
use rewake_manifest::ManifestReader;
use rewake_streamer::units;

use super::seal::sign;
use super::{print, store_runtime};
use crate::cli::PushArgs;
use crate::logging;

/// Runs the command; gives the exit code.
///
/// # Errors
/// See [`push()`].
pub fn run(options: &PushArgs) -> anyhow::Result<u8> {
    logging::start(None, 2)?;
    let (start, image) = (Instant::now(), &options.image);
    if let Some(key) = &options.sign {
        let id = ManifestReader::open(&ImageDir::open(&options.images_dir)?)?.id();
        sign(&options.images_dir, id, Some(key))?;
    }
    let runtime = store_runtime()?;
    let store = ImageStore::create(&image.store)?;
    let report = runtime.block_on(push(&store, &options.images_dir, &image.name));
    let report = report.with_context(|| image.to_string())?;
    let StorePushReport { id, files, bytes, shared, written, kept, working_set, had } = report;
    if had {
        let and = if working_set > 0 { "; its working set was stored" } else { "" };
        print::done(format!("{image}: the store has image {id} under this name already{and}"));
        return Ok(0);
    }
    let ([bytes, shared, written, kept], time) =
        ([bytes, shared, written, kept].map(units::bytes), units::seconds(start.elapsed()));
    print::done(format!(
        "{image}: {files} files, {bytes} in {time}: {written} were written; duplicates, and what the store \
         had: {shared}; from a push that was cut: {kept}; image {id}"
    ));
    Ok(0)
}
