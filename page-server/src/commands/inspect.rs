// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake inspect`: what is in an image directory.

use std::io::{self, BufWriter, Write as _};

use anyhow::Context as _;

use crate::cli::Inspect;
use crate::inspect::{collect, text};

/// Runs the command; gives the exit code: 1 for a damaged image.
///
/// # Errors
/// The directory cannot be opened, or the output cannot be written.
pub fn run(options: &Inspect) -> anyhow::Result<u8> {
    let report = collect::collect(&options.images_dir)?;
    let mut out = BufWriter::new(io::stdout().lock());
    let written = if options.json {
        serde_json::to_writer_pretty(&mut out, &report).map_err(io::Error::from).and_then(|()| writeln!(out))
    } else {
        text::write(&report, options.vmas, &mut out)
    };
    match written.and_then(|()| out.flush()) {
        // The reader has seen enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        other => other.context("writing the report")?,
    }
    Ok(u8::from(!report.damage.is_empty()))
}
