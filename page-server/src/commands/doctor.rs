// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake doctor`: whether this machine has what Rewake needs.

use anyhow::Context as _;

use super::print;
use crate::cli::DoctorArgs;
use crate::doctor::{self, CheckVerdict, text};

/// Runs the command; gives the exit code: 1 when a check failed.
///
/// # Errors
/// The output cannot be written.
pub fn run(options: &DoctorArgs) -> anyhow::Result<u8> {
    let report = doctor::examine();
    let written = print::report(options.json, &report, |out| text::write(&report, out));
    written.context("writing the report")?;
    Ok(u8::from(report.verdict == CheckVerdict::Failed))
}
