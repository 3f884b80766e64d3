// SPDX-License-Identifier: MIT OR Apache-2.0
//! What `rewake restore` shows while memory comes back: a line or some, redrawn on a terminal, else each second.

use std::io::{IsTerminal as _, Write as _, stderr};
use std::time::{Duration, Instant};

use crate::control::proto::{Session, State};
use rewake_streamer::units;

/// Time between two lines where nothing can be redrawn.
const PLAIN: Duration = Duration::from_secs(1);
const WIDTH: usize = 24;

/// The lines.
#[derive(Debug)]
pub(super) struct Bar {
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

impl Bar {
    /// A bar for stderr.
    pub(super) fn new(quiet: bool) -> Self {
        let how = match quiet {
            true => How::Quiet,
            false if stderr().is_terminal() => How::Redrawn,
            false => How::Plain,
        };
        Self { how, last: Instant::now(), drawn: 0 }
    }

    /// Shows the present state, if it is time to.
    pub(super) fn show(&mut self, session: &Session) {
        self.show_lines(&[line(session)]);
    }

    /// Shows these lines in place of the last, if it is time to.
    pub(super) fn show_lines(&mut self, lines: &[String]) {
        match self.how {
            How::Quiet => return,
            How::Plain if self.last.elapsed() < PLAIN => return,
            How::Plain => write(&format!("{}\n", lines.join("\n"))),
            How::Redrawn => write(&redrawn(self.drawn, lines)),
        }
        self.last = Instant::now();
        self.drawn = lines.len();
    }

    /// Shows some lines, unless quiet.
    pub(super) fn say(&self, text: &str) {
        if self.how != How::Quiet {
            write(text);
        }
    }

    /// Makes room for other lines.
    pub(super) fn clear(&mut self) {
        if self.how == How::Redrawn && self.drawn > 0 {
            write(&redrawn(std::mem::take(&mut self.drawn), &[]));
        }
    }
}

/// For a terminal, which stands at the end of the last of `drawn` lines. While they are written it does not break long ones:
/// they would not be as many as they are.
fn redrawn(drawn: usize, lines: &[String]) -> String {
    let up = if drawn > 1 { format!("\x1b[{}A", drawn - 1) } else { String::new() };
    format!("\r{up}\x1b[J\x1b[?7l{}\x1b[?7h", lines.join("\r\n"))
}

/// To stderr: when nobody reads it, the restore goes on all the same.
pub(super) fn write(text: &str) {
    let _ = stderr().write_all(text.as_bytes());
}

/// Bytes that have come back.
pub(super) fn resident(session: &Session) -> u64 {
    (session.pages_copied + session.pages_zero) * rewake_uffd::PAGE_SIZE
}

/// Bytes that are to come back.
pub(super) fn total(session: &Session) -> u64 {
    session.pages_total.saturating_sub(session.pages_dropped) * rewake_uffd::PAGE_SIZE
}

fn line(session: &Session) -> String {
    if session.state() == State::Unknown || session.state() == State::Listening {
        return "waiting for criu".to_owned();
    }
    let (back, all) = (resident(session), total(session).max(1));
    let full = usize::try_from(WIDTH as u64 * back.min(all) / all).unwrap_or(WIDTH);
    let streaming =
        if session.running_ns == 0 { 0 } else { session.elapsed_ns.saturating_sub(session.running_ns) };
    let left = if back == 0 {
        "-".to_owned()
    } else {
        let nanos = u128::from(all.saturating_sub(back)) * u128::from(streaming) / u128::from(back);
        units::seconds(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    };
    let p99 = if session.faults == 0 {
        "-".to_owned()
    } else {
        units::latency(Duration::from_nanos(session.fault_p99_ns))
    };
    format!(
        "[{}{}] {} / {}  {}  {} faults, p99 {p99}  {}",
        "=".repeat(full),
        " ".repeat(WIDTH - full),
        units::bytes(back),
        units::bytes(total(session)),
        units::rate(back, streaming),
        session.faults,
        if session.running_ns == 0 { "restoring".to_owned() } else { format!("{left} left") },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_how_much_how_fast_and_how_long() {
        let session = Session {
            state: State::Running as i32,
            pages_total: 4 << 18,
            pages_copied: 1 << 18,
            faults: 12,
            fault_p99_ns: 85_000,
            running_ns: 1_000_000_000,
            elapsed_ns: 2_000_000_000,
            ..Default::default()
        };
        let wanted =
            "[======                  ] 1.0 GiB / 4.0 GiB  1.07 GB/s  12 faults, p99 85 µs  3.00 s left";
        assert_eq!(line(&session), wanted);
    }

    #[test]
    fn lines_are_redrawn_where_they_were() {
        let lines = ["a".to_owned(), "b".to_owned()];
        assert_eq!(redrawn(0, &lines), "\r\x1b[J\x1b[?7la\r\nb\x1b[?7h");
        assert_eq!(redrawn(2, &lines[..1]), "\r\x1b[1A\x1b[J\x1b[?7la\x1b[?7h");
        assert_eq!(redrawn(1, &[]), "\r\x1b[J\x1b[?7l\x1b[?7h");
    }

    #[test]
    fn a_session_without_memory_or_with_more_than_expected_is_shown_too() {
        let running = |pages_total, pages_copied| Session {
            state: State::Running as i32,
            running_ns: 1,
            pages_total,
            pages_copied,
            ..Default::default()
        };
        assert!(line(&running(0, 0)).contains("0 B / 0 B"));
        assert!(line(&running(1, 2)).starts_with("[========================]"));
        assert_eq!(line(&Session::default()), "waiting for criu");
    }
}
