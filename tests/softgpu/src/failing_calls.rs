// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls of CRIU that fail one after the other, and what its plugin logs of each. `PLUGIN_EVERY_FAULT=1`
//! tries every call.

use std::collections::BTreeMap;

use rewake_testkit::process::last_lines;

use crate::criu::Criu;
use crate::faults::{Call, Calls};

/// The calls of CRIU and of the tasks that it restores. The driver compares the name of the caller's first
/// thread.
pub const CRIU: Calls<'_> = Calls { comm: Some("criu"), call: None };
/// The errnos that calls fail with, one after the other.
pub const ERRNOS: [i32; 3] = [libc::EIO, libc::ENOMEM, libc::EINTR];
/// Lines at the end of a log that failure reports show.
const LAST: usize = 15;

/// A call that the test makes fail.
#[derive(Debug)]
pub struct FailingCall {
    /// Its kind.
    pub name: String,
    /// Its number among calls of its kind, from 1, because the number of polls for an end differs every time.
    pub nth: u64,
}

/// Which calls are tried: the first of each kind, or all.
#[must_use]
pub fn failing_calls(calls: &[Call]) -> Vec<FailingCall> {
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    let mut all = Vec::new();
    for call in calls {
        let count = counts.entry(&call.name).or_default();
        *count += 1;
        all.push(FailingCall { name: call.name.clone(), nth: *count });
    }
    all.retain(|call| every() || call.nth == 1);
    all
}

/// Whether all calls are tried.
#[must_use]
pub fn every() -> bool {
    std::env::var_os("PLUGIN_EVERY_FAULT").is_some()
}

/// The one line of the plugin that gives the reason: the call's name, or its effect.
///
/// # Panics
/// There is no such line, or more than one.
pub fn says_why(criu: &Criu, act: &str, call: &FailingCall, errno: i32) {
    let log = criu.log(act);
    let errors: Vec<&str> = log.lines().filter(|line| line.contains("Error (amdgpu_plugin)")).collect();
    let name = call.name.split_once('/').map_or("", |(_, name)| name).replace('/', " ");
    let has_reason = |line: &str| line.contains(&name) || line.contains(&format!("(os error {errno})"));
    assert!(errors.len() == 1 && has_reason(errors[0]), "{call:?}: {errors:#?}\n{}", tail(&log));
}

/// The end of a log.
#[must_use]
pub fn tail(log: &str) -> String {
    last_lines(log, LAST)
}
