// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reports on standard output: as JSON or as text.

use std::io::{self, BufWriter, StdoutLock, Write as _};

use serde::Serialize;

/// Writes a report. A reader that has seen enough and closed the pipe is no error.
pub(super) fn report(
    json: bool,
    report: &impl Serialize,
    text: impl FnOnce(&mut BufWriter<StdoutLock<'static>>) -> io::Result<()>,
) -> io::Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    let written = if json {
        serde_json::to_writer_pretty(&mut out, report).map_err(io::Error::from).and_then(|()| writeln!(out))
    } else {
        text(&mut out)
    };
    match written.and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}
