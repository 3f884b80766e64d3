// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake inspect`: what is in an image directory.

use anyhow::Context as _;

use super::print;
use crate::cli::InspectArgs;
use crate::inspect::{collect, text};

/// Runs the command; gives the exit code: 1 for a damaged image.
///
/// # Errors
/// The directory cannot be opened, or the output cannot be written.
pub fn run(options: &InspectArgs) -> anyhow::Result<u8> {
    let report = collect::collect(&options.images_dir)?;
    let written = print::report(options.json, &report, |out| text::write(&report, options.vmas, out));
    written.context("writing the report")?;
    Ok(u8::from(!report.damage.is_empty()))
}
