// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lines about connections that were refused. Any host can make any number of such connections, so the lines
//! are limited, and the log does not fill the disk.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines of one [`WINDOW`].
const MAX_LINES: u32 = 20;
/// The time in which these lines are counted.
const WINDOW: Duration = Duration::from_secs(60);

/// Decides which refusals get a line, and counts the others for the next line.
#[derive(Debug, Default)]
pub struct RefusalLog(Mutex<RefusalCounts>);

#[derive(Debug, Default)]
struct RefusalCounts {
    /// When the window began; none before the first refusal.
    began: Option<Instant>,
    lines: u32,
    unwritten: u64,
}

impl RefusalLog {
    /// Returns the line to write about a refusal, with the number of refusals before it that got none.
    /// `None`: the last minute has had 20 lines, so the refusal is counted only.
    pub fn line(&self, text: impl FnOnce() -> String) -> Option<String> {
        self.line_at(Instant::now(), text)
    }

    fn line_at(&self, now: Instant, text: impl FnOnce() -> String) -> Option<String> {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.began.is_none_or(|began| now.saturating_duration_since(began) >= WINDOW) {
            (counts.began, counts.lines) = (Some(now), 0);
        }
        if counts.lines == MAX_LINES {
            counts.unwritten += 1;
            return None;
        }
        counts.lines += 1;
        match std::mem::take(&mut counts.unwritten) {
            0 => Some(text()),
            more => Some(format!("{} ({more} more refusals before it have no line)", text())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_without_a_line_are_counted_in_the_next_line() {
        let (log, began) = (RefusalLog::default(), Instant::now());
        let lines = |after: u64, times: usize| -> Vec<String> {
            let now = began + Duration::from_secs(after);
            (0..times).filter_map(|_| log.line_at(now, || "refused".to_owned())).collect()
        };
        assert_eq!(lines(0, 1000), vec!["refused"; 20]);
        assert!(lines(59, 10).is_empty());
        assert_eq!(lines(60, 2), ["refused (990 more refusals before it have no line)", "refused"]);
    }
}
