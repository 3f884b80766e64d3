// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a test says that it does not run here: one line that `cargo xtask test` reads and compares with
//! `tests/expected-skips`.
//!
//! ```text
//! skipped: engines::a_cold_file_is_read_directly: /tmp is a tmpfs
//! ```
//!
//! The name is the test program's (without cargo's hash) and the test's.

#![forbid(unsafe_code)]

use std::fmt::Display;
use std::io::Write as _;
use std::thread;

/// Reports that the running test does not run, and why. Called on the test's own thread, whose name is the
/// test's.
///
/// The line bypasses the test harness, which hides what tests print while they pass.
pub fn report(reason: impl Display) {
    let line = line(&program(), thread::current().name().unwrap_or("?"), &reason.to_string());
    // Without standard error there is no place for the line; the harness then misses the test.
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Ends the running test, which does not run here; the arguments are as for `format!`, and give the reason.
#[macro_export]
macro_rules! skip {
    ($($reason:tt)*) => {{
        $crate::report(format_args!($($reason)*));
        return;
    }};
}

/// The value of a `Result<_, impl Display>`, or of an `Option` with a reason after it. Without a value the
/// test ends as skipped, for that reason.
#[macro_export]
macro_rules! need {
    ($wanted:expr, $reason:expr) => {
        match $wanted {
            Some(value) => value,
            None => $crate::skip!("{}", $reason),
        }
    };
    ($wanted:expr) => {
        match $wanted {
            Ok(value) => value,
            Err(reason) => $crate::skip!("{reason}"),
        }
    };
}

/// One line, whatever the reason is; in one piece, since other threads write too.
fn line(program: &str, test: &str, reason: &str) -> String {
    let reason: Vec<&str> = reason.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    format!("\nskipped: {program}::{test}: {}\n", reason.join("; "))
}

/// This program's name without the hash that cargo appends to a test program's.
fn program() -> String {
    let path = std::env::current_exe().unwrap_or_default();
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    match name.rsplit_once('-') {
        Some((name, hash)) if hash.len() == 16 && hash.chars().all(|digit| digit.is_ascii_hexdigit()) => {
            name.to_owned()
        }
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_program_test_and_reason_whatever_the_reason_is() {
        assert_eq!(line("engines", "a::b", "no disk"), "\nskipped: engines::a::b: no disk\n");
        assert_eq!(line("p", "t", "failed:\n  two lines\n"), "\nskipped: p::t: failed:; two lines\n");
    }

    #[test]
    fn a_test_program_is_named_without_its_hash() {
        assert_eq!(program(), "rewake_skip");
    }

    #[test]
    fn a_value_is_given() {
        let given = || {
            assert_eq!(need!(Ok::<_, &str>(7)), 7);
        };
        given();
    }
}
