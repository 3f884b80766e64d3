// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shows the progress of a restore on stderr: some lines, redrawn on a terminal, else written each second.

use std::io::{IsTerminal as _, stderr};
use std::time::{Duration, Instant};

use super::super::{picture, print};
use rewake_streamer::control::proto::Streaming;

/// Time between two lines where nothing can be redrawn.
const PLAIN_INTERVAL: Duration = Duration::from_secs(1);

/// The progress.
#[derive(Debug)]
pub(super) struct View {
    how: How,
    last: Instant,
    /// Lines on the terminal that are to be redrawn.
    drawn: usize,
}

#[derive(Debug, PartialEq, Eq)]
enum How {
    Quiet,
    Redrawn,
    Plain,
}

impl View {
    /// Makes a view on stderr; a quiet one shows nothing.
    pub(super) fn new(quiet: bool) -> Self {
        let how = match quiet {
            true => How::Quiet,
            false if stderr().is_terminal() => How::Redrawn,
            false => How::Plain,
        };
        Self { how, last: Instant::now(), drawn: 0 }
    }

    /// Shows how far the restore is, in place of the last lines, if it is time to.
    pub(super) fn show(&mut self, now: &Streaming) {
        if !picture::is_loading(now) {
            return;
        }
        let lines = &picture::lines(now);
        match self.how {
            How::Quiet => return,
            How::Plain if self.last.elapsed() < PLAIN_INTERVAL => return,
            How::Plain => print::show(&format!("{}\n", lines.join("\n"))),
            How::Redrawn => print::show(&redrawn(self.drawn, lines)),
        }
        self.last = Instant::now();
        self.drawn = lines.len();
    }

    /// Shows some text, unless quiet.
    pub(super) fn say(&self, text: &str) {
        if self.how != How::Quiet {
            print::show(text);
        }
    }

    /// Removes the lines from a terminal.
    pub(super) fn clear(&mut self) {
        if self.how == How::Redrawn && self.drawn > 0 {
            print::show(&redrawn(std::mem::take(&mut self.drawn), &[]));
        }
    }
}

/// Replaces `drawn` lines on a terminal whose cursor is at the end of the last. It must not break long lines:
/// they would not be as many as they are.
fn redrawn(drawn: usize, lines: &[String]) -> String {
    let up = if drawn > 1 { format!("\x1b[{}A", drawn - 1) } else { String::new() };
    format!("\r{up}\x1b[J\x1b[?7l{}\x1b[?7h", lines.join("\r\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_redrawn_in_their_place() {
        let lines = ["a".to_owned(), "b".to_owned()];
        assert_eq!(redrawn(0, &lines), "\r\x1b[J\x1b[?7la\r\nb\x1b[?7h");
        assert_eq!(redrawn(2, &lines[..1]), "\r\x1b[1A\x1b[J\x1b[?7la\x1b[?7h");
        assert_eq!(redrawn(1, &[]), "\r\x1b[J\x1b[?7l\x1b[?7h");
    }
}
