// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a visitor sees who waits: each step says what it does and how long that usually takes. On a terminal,
//! a step of more than ten seconds has a bar.

use std::io::{IsTerminal as _, Write as _};
use std::sync::Mutex;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// Steps that usually take longer have a bar.
const LONG: Duration = Duration::from_secs(10);
/// How often a bar is drawn.
const REDRAWN: Duration = Duration::from_millis(500);
const WIDTH: u32 = 30;

/// Whether a bar is on the terminal's last line; held while something is written.
static BAR: Mutex<bool> = Mutex::new(false);

/// Writes a line to standard error, because standard output is the programs' own; above the bar, if there is
/// one.
pub(crate) fn say(line: &str) {
    write(&format!("{line}\n"), false);
}

/// Does a step of a demo, which usually takes that long; says what it is, and afterwards how long it took.
pub(crate) fn step<T>(
    what: &str,
    usual: Duration,
    act: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    say(&format!("==> {what} (usually {})", about(usual)));
    let start = Instant::now();
    let (done, ended) = mpsc::channel::<()>();
    let has_bar = usual > LONG && std::io::stderr().is_terminal();
    let result = thread::scope(|scope| {
        scope.spawn(move || {
            while has_bar && ended.recv_timeout(REDRAWN) == Err(RecvTimeoutError::Timeout) {
                write(&bar(start.elapsed(), usual), true);
            }
        });
        let result = act();
        drop(done);
        result
    });
    if result.is_ok() {
        say(&format!("    done after {:.1} s", start.elapsed().as_secs_f64()));
    }
    result
}

/// Replaces the bar, if there is one.
fn write(text: &str, is_bar: bool) {
    let mut bar = BAR.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let erase = if *bar { "\r\x1b[K" } else { "" };
    // A terminal that is gone does not end a step.
    let _ = write!(std::io::stderr(), "{erase}{text}");
    *bar = is_bar;
}

/// Full when the usual time is over.
fn bar(elapsed: Duration, usual: Duration) -> String {
    let full = (elapsed.as_millis() * u128::from(WIDTH) / usual.as_millis().max(1)).min(u128::from(WIDTH));
    let full = usize::try_from(full).unwrap_or_default();
    let empty = WIDTH as usize - full;
    format!("    [{}{}] {} s", "#".repeat(full), "-".repeat(empty), elapsed.as_secs())
}

fn about(time: Duration) -> String {
    match time.as_secs() {
        seconds if seconds < 90 => format!("{seconds} s"),
        seconds => format!("{:.1} minutes", Duration::from_secs(seconds).as_secs_f64() / 60.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_full_at_the_usual_time_and_stays_full() {
        let at = |seconds| bar(Duration::from_secs(seconds), Duration::from_secs(60));
        assert_eq!(at(0), format!("    [{}] 0 s", "-".repeat(30)));
        assert_eq!(at(30), format!("    [{}{}] 30 s", "#".repeat(15), "-".repeat(15)));
        assert_eq!(at(90), format!("    [{}] 90 s", "#".repeat(30)));
    }

    #[test]
    fn a_step_gives_what_it_did_or_its_failure() {
        assert_eq!(step("works", Duration::from_secs(1), || Ok(7)).unwrap(), 7);
        let failed = step("fails", Duration::from_secs(60), || anyhow::bail!("no"));
        assert_eq!(failed.map(|()| 0).unwrap_err().to_string(), "no");
    }

    #[test]
    fn usual_times_are_in_seconds_or_minutes() {
        assert_eq!(about(Duration::from_secs(20)), "20 s");
        assert_eq!(about(Duration::from_secs(150)), "2.5 minutes");
    }
}
