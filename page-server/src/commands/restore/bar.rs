// SPDX-License-Identifier: MIT OR Apache-2.0
//! What `rewake restore` shows while memory comes back: one line, redrawn on a terminal, else one each second.

use std::io::{IsTerminal as _, Write as _, stderr};
use std::time::{Duration, Instant};

use crate::control::proto::{Session, State};
use crate::units;

/// Time between two lines where nothing can be redrawn.
const PLAIN: Duration = Duration::from_secs(1);
const WIDTH: usize = 24;

/// The line.
#[derive(Debug)]
pub(super) struct Bar {
    how: How,
    last: Instant,
    drawn: bool,
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
        Self { how, last: Instant::now(), drawn: false }
    }

    /// Shows the present state, if it is time to.
    pub(super) fn show(&mut self, session: &Session) {
        let text = match self.how {
            How::Quiet => return,
            How::Plain if self.last.elapsed() < PLAIN => return,
            How::Plain => format!("{}\n", line(session)),
            How::Redrawn => format!("\r\x1b[K{}", line(session)),
        };
        self.last = Instant::now();
        self.drawn = true;
        write(&text);
    }

    /// Shows some lines, unless quiet.
    pub(super) fn say(&self, text: &str) {
        if self.how != How::Quiet {
            write(text);
        }
    }

    /// Makes room for other lines.
    pub(super) fn clear(&mut self) {
        if self.how == How::Redrawn && std::mem::take(&mut self.drawn) {
            write("\r\x1b[K");
        }
    }
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
