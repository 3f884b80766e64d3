// SPDX-License-Identifier: MIT OR Apache-2.0
//! The trace that a restore leaves in its work directory.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use anyhow::Context as _;
use serde::Deserialize;
use serde_json::Value;

/// An event in Chrome's trace event format.
#[derive(Debug, Deserialize)]
pub struct TraceEvent {
    /// Its phase: `C` is a counter, `X` a slice with a duration, `i` an instant.
    pub ph: String,
    /// The process.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// When it began, in microseconds.
    pub ts: u64,
    /// How long it lasted, if it is a slice.
    pub dur: Option<u64>,
    /// Its values.
    pub args: BTreeMap<String, Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Trace {
    trace_events: Vec<TraceEvent>,
}

/// The events of the restore with this work directory.
///
/// # Errors
/// It has no trace, or not one of that format.
pub fn events(work: &Path) -> anyhow::Result<Vec<TraceEvent>> {
    let path = work.join("rewake-trace.json");
    let file = File::open(&path).with_context(|| format!("open {}", path.display()))?;
    let trace: Trace = serde_json::from_reader(file).with_context(|| format!("read {}", path.display()))?;
    Ok(trace.trace_events)
}

/// The last value of each process's counter of this name, by pid.
#[must_use]
pub fn last_bytes(events: &[TraceEvent], name: &str) -> BTreeMap<u32, u64> {
    let counters = events.iter().filter(|event| event.ph == "C" && event.name == name);
    counters.filter_map(|event| Some((event.pid, event.args.get("bytes")?.as_u64()?))).collect()
}
