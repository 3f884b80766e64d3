// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a target ended.

use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;

/// How a target ended, from its exit status and what it wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Every byte was right.
    Ok,
    /// Wrong bytes were read: this must never happen.
    Bad(String),
    /// It, or a process below it, was killed (by SIGKILL, or by SIGBUS on access) without seeing wrong bytes.
    /// Any other signal is [`Verdict::Broken`]: a program whose pointers turned into zeros ends with SIGSEGV.
    Killed(String),
    /// The target could not do its work for another reason.
    Broken(String),
    /// It did not end in time.
    Hung,
}

impl Verdict {
    /// The verdict for a wait status (none: did not end) and the text of the verdict file.
    #[must_use]
    pub fn new(status: Option<WaitStatus>, text: &str) -> Self {
        let lines =
            |start: &str| -> Vec<&str> { text.lines().filter(|line| line.starts_with(start)).collect() };
        if !lines("BAD").is_empty() {
            return Self::Bad(lines("BAD").join("\n"));
        }
        if !lines("ERROR").is_empty() {
            return Self::Broken(lines("ERROR").join("\n"));
        }
        match status {
            None => Self::Hung,
            Some(WaitStatus::Exited(_, 0)) if text.lines().last() == Some("OK") => Self::Ok,
            Some(WaitStatus::Exited(_, 3)) => Self::Killed(lines("LOST").join("\n")),
            Some(WaitStatus::Signaled(_, signal @ (Signal::SIGKILL | Signal::SIGBUS), _)) => {
                Self::Killed(format!("by {signal}"))
            }
            Some(other) => Self::Broken(format!("{other:?}, verdict file: {text:?}")),
        }
    }

    /// True for [`Verdict::Killed`].
    #[must_use]
    pub fn killed(&self) -> bool {
        matches!(self, Self::Killed(_))
    }
}

#[cfg(test)]
mod tests {
    use nix::unistd::Pid;

    use super::*;

    #[test]
    fn wrong_bytes_outweigh_everything_else() {
        let killed = WaitStatus::Signaled(Pid::from_raw(1), Signal::SIGKILL, false);
        assert!(matches!(Verdict::new(Some(killed), "BAD page 3\n"), Verdict::Bad(_)));
        assert!(matches!(Verdict::new(None, "BAD page 3\nOK\n"), Verdict::Bad(_)));
    }

    #[test]
    fn only_sigkill_and_sigbus_are_clean_deaths() {
        let by = |signal| Verdict::new(Some(WaitStatus::Signaled(Pid::from_raw(1), signal, false)), "");
        assert!(by(Signal::SIGKILL).killed() && by(Signal::SIGBUS).killed());
        assert!(matches!(by(Signal::SIGSEGV), Verdict::Broken(_)));
    }

    #[test]
    fn an_exit_without_the_word_ok_is_not_good() {
        let done = WaitStatus::Exited(Pid::from_raw(1), 0);
        assert_eq!(Verdict::new(Some(done), "OK\n"), Verdict::Ok);
        assert!(matches!(Verdict::new(Some(done), ""), Verdict::Broken(_)));
    }
}
