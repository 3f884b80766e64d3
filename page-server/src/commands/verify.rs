// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake verify`: compares an image and its parents with their manifests.

use std::io::Write as _;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, bail};
use rewake_criu_images::ImageDir;
use rewake_manifest::{VerifyReport, verify};
use rewake_streamer::units;

use crate::cli::VerifyArgs;

/// Differences of one directory that are shown.
const SHOWN: u64 = 50;

/// Runs the command; gives the exit code.
///
/// # Errors
/// The image or a parent is not sealed, cannot be read, or is not as it was sealed: the differences were shown.
pub fn run(options: &VerifyArgs) -> anyhow::Result<u8> {
    let parents = ImageDir::open(&options.images_dir)?.ancestors();
    let mut wrong = directory(&options.images_dir)?;
    for parent in &parents {
        wrong += directory(parent.path())?;
    }
    if wrong > 0 {
        bail!("{}: not as sealed: use another copy of it, or dump again", options.images_dir.display());
    }
    Ok(0)
}

/// Verifies one directory, and returns the number of differences.
fn directory(images: &Path) -> anyhow::Result<u64> {
    let start = Instant::now();
    let mut out = std::io::stdout();
    let (mut shown, mut written) = (0, Ok(()));
    let report = verify(images, |difference| {
        shown += 1;
        if shown <= SHOWN && written.is_ok() {
            written = writeln!(out, "{}/{difference}", images.display());
        }
    })?;
    written.context("writing the report")?;
    let VerifyReport { id, files, bytes, differences } = report;
    if differences > SHOWN {
        writeln!(out, "{}: {} differences more", images.display(), differences - SHOWN)?;
    } else if differences == 0 {
        let (bytes, time) = (units::bytes(bytes), units::seconds(start.elapsed()));
        writeln!(out, "{}: as sealed: {files} files, {bytes} in {time}; image {id:.16}", images.display())?;
    }
    Ok(differences)
}
