// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls of CRIU that fail one after the other, and what its plugin says of each. `PLUGIN_EVERY_FAULT=1` tries every call.

use std::collections::BTreeMap;

use rewake_testkit::process::last_lines;

use crate::criu::Criu;
use crate::faults::{Call, Calls};

/// CRIU's calls and those of the tasks that it restores. The driver compares the name of the caller's first thread.
pub const CRIU: Calls<'_> = Calls { comm: Some("criu"), call: None };
/// What a call fails with, in turn.
pub const ERRNOS: [i32; 3] = [libc::EIO, libc::ENOMEM, libc::EINTR];
/// Lines at the end of a log that tell where it was.
const LAST: usize = 15;

/// A call that is tried.
#[derive(Debug)]
pub struct Tried {
    /// Its kind.
    pub name: String,
    /// Among those of its kind, from 1: how often the plugin looks whether something is done is different every time.
    pub nth: u64,
}

/// Which calls are tried: the first of each kind; or all.
#[must_use]
pub fn tried(calls: &[Call]) -> Vec<Tried> {
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    let mut all = Vec::new();
    for call in calls {
        let count = counts.entry(&call.name).or_default();
        *count += 1;
        all.push(Tried { name: call.name.clone(), nth: *count });
    }
    all.retain(|call| every() || call.nth == 1);
    all
}

/// Whether all are.
#[must_use]
pub fn every() -> bool {
    std::env::var_os("PLUGIN_EVERY_FAULT").is_some()
}

/// The one line of the plugin that says why, with the name of the call, or what came of it.
///
/// # Panics
/// There is no such line, or more than one.
pub fn says_why(criu: &Criu, act: &str, call: &Tried, errno: i32) {
    let log = criu.log(act);
    let errors: Vec<&str> = log.lines().filter(|line| line.contains("Error (amdgpu_plugin)")).collect();
    let name = call.name.split_once('/').map_or("", |(_, name)| name).replace('/', " ");
    let told = |line: &str| line.contains(&name) || line.contains(&format!("(os error {errno})"));
    assert!(errors.len() == 1 && told(errors[0]), "{call:?}: {errors:#?}\n{}", tail(&log));
}

/// The end of a log.
#[must_use]
pub fn tail(log: &str) -> String {
    last_lines(log, LAST)
}
