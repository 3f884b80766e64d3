// SPDX-License-Identifier: MIT OR Apache-2.0
//! What commands write to standard output and to standard error. Neither has to have a reader: a terminal may
//! be closed, and a script may have seen enough. What a command has done stays done, and its exit code says
//! it.

use std::fmt::Display;
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

/// Says something to the user on standard error.
pub(super) fn say(line: impl Display) {
    // One call, so that lines of other processes do not cut a line.
    show(&format!("rewake: {line}\n"));
}

/// Writes text to standard error. If that fails, no message can report that.
pub(super) fn show(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

/// Writes a line about what was done to standard output. A full disk is named on standard error.
pub(super) fn done(line: impl Display) {
    text(&format!("{line}\n"));
}

/// Writes text as [`done`] does.
pub(super) fn text(text: &str) {
    let mut out = io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => say(format!("standard output: {error}")),
        _ => {}
    }
}
