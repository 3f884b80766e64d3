// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which process the kernel kills first when memory is short.

use std::fs;
use std::io;

/// The `oom_score_adj` of a process that others wait for: half of the machine's memory does not count. Docker
/// gives its daemon the same.
const SPARED: i32 = -500;
/// The kernel's file with it.
const SCORE: &str = "/proc/self/oom_score_adj";

/// Has the kernel kill other processes first when memory is short. Programs that this process starts inherit
/// that, unless they call [`be_killed_as_usual`]. Without CAP_SYS_RESOURCE nothing changes.
pub fn be_killed_late() {
    if let Some(score) = late(score()) {
        let _ = set_score(score);
    }
}

/// Undoes [`be_killed_late`] in a program that such a process has started.
pub fn be_killed_as_usual() {
    if let Some(score) = usual(score()) {
        let _ = set_score(score);
    }
}

fn late(score: Option<i32>) -> Option<i32> {
    score.filter(|score| *score > SPARED).map(|_| SPARED)
}

fn usual(score: Option<i32>) -> Option<i32> {
    score.filter(|score| *score < 0).map(|_| 0)
}

fn score() -> Option<i32> {
    fs::read_to_string(SCORE).ok()?.trim().parse().ok()
}

fn set_score(score: i32) -> io::Result<()> {
    fs::write(SCORE, score.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_score_is_lowered_and_given_back() {
        assert_eq!([Some(0), Some(985), Some(-499)].map(late), [Some(SPARED); 3]);
        assert_eq!([Some(-500), Some(-998), None].map(late), [None; 3], "it is as low");
        assert_eq!([Some(-500), Some(-998)].map(usual), [Some(0); 2]);
        assert_eq!([Some(0), Some(985), None].map(usual), [None; 3]);
        be_killed_as_usual();
        assert!(score().unwrap() >= 0);
    }
}
