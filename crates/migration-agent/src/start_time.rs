// SPDX-License-Identifier: MIT OR Apache-2.0
//! When a process was started: no other process of its number has the same time.

use anyhow::Context as _;
use rewake_process::proc;

/// The start time of a process, which no other one of its number has.
pub(crate) fn start_of(pid: i32) -> anyhow::Result<String> {
    let start = proc::stat(pid).ok().and_then(|fields| fields.get(19).cloned());
    start.with_context(|| format!("-t {pid}: no such process"))
}
