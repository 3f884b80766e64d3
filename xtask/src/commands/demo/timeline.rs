// SPDX-License-Identifier: MIT OR Apache-2.0
//! Times of events from CRIU's log: its clock starts with CRIU, and the plugin's lines are among CRIU's.

use anyhow::{Context as _, bail};

/// Something that had happened by then.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Moment {
    /// Since CRIU's start.
    pub(super) seconds: f64,
    pub(super) what: String,
}

/// The moments of a dump.
pub(super) fn dump(log: &str) -> anyhow::Result<Vec<Moment>> {
    let (state, about) = line(log, "amdgpu_plugin: process ")?;
    let (contents, moved) = line(log, "contents saved: ")?;
    let about = about.split_once(": ").map_or(about, |(_, about)| about);
    Ok(vec![
        moment(
            state,
            &format!("the process is stopped, its GPU queues are evicted, their state is saved ({about})"),
        ),
        moment(contents, &format!("GPU memory is saved: {}", Amount::of(moved)?)),
        moment(end(log)?, "CPU memory is saved, the process has ended"),
    ])
}

/// Bytes that an eager restore moved to GPUs, from its log.
pub(super) fn moved(log: &str) -> anyhow::Result<u64> {
    let words = " contents loaded: ";
    let line = log.lines().find_map(|line| Some(line.split_once(words)?.1));
    let line = line.with_context(|| format!("the log of the restore has no line with {words:?}"))?;
    Ok(Amount::of(line)?.bytes)
}

/// Bytes that were moved to GPUs while the program ran, from a restore's `rewake-timeline.json`.
pub(super) fn resident(json: &str) -> anyhow::Result<u64> {
    let number = |text: &str, name: &str| {
        text.split_once(name)?.1.trim_start().split([',', '}']).next()?.trim().parse::<u64>().ok()
    };
    // Each memory has the number of its GPU's node, or null for CPU memory, before its bytes.
    let of_gpus = json.split("\"minor\":").skip(1).filter(|memory| !memory.trim_start().starts_with("null"));
    let bytes: Option<Vec<u64>> = of_gpus.map(|memory| number(memory, "\"resident\":")).collect();
    bytes
        .filter(|bytes| !bytes.is_empty())
        .map(|bytes| bytes.iter().sum())
        .context("the timeline has no memory of a GPU")
}

fn moment(seconds: f64, what: &str) -> Moment {
    Moment { seconds, what: what.to_owned() }
}

/// The first line with `words`: its time, and the text after them.
fn line<'a>(log: &'a str, words: &str) -> anyhow::Result<(f64, &'a str)> {
    let found = log.lines().find_map(|line| Some((time(line)?, line.split_once(words)?.1)));
    found.with_context(|| format!("CRIU's log has no line with {words:?}"))
}

fn end(log: &str) -> anyhow::Result<f64> {
    log.lines().rev().find_map(time).context("CRIU's log is empty")
}

/// `(00.012345)` at the start of a line, in seconds.
fn time(line: &str) -> Option<f64> {
    line.strip_prefix('(')?.split_once(')')?.0.parse().ok()
}

/// The sizes in `N bytes, Z of them zero, S submissions for B buffers, ...`.
struct Amount {
    bytes: u64,
    zero: u64,
    buffers: u64,
}

impl Amount {
    fn of(line: &str) -> anyhow::Result<Self> {
        let mut parts = line.split(", ");
        let mut number = |before: &str, behind: &str| -> Option<u64> {
            parts.next()?.split_once(before)?.1.strip_suffix(behind)?.parse().ok()
        };
        let (bytes, zero, buffers) =
            (number("", " bytes"), number("", " of them zero"), number(" for ", " buffers"));
        match (bytes, zero, buffers) {
            (Some(bytes), Some(zero), Some(buffers)) if zero <= bytes => Ok(Self { bytes, zero, buffers }),
            _ => bail!("the line is not as it used to be: {line}"),
        }
    }
}

impl std::fmt::Display for Amount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mb = |bytes: &u64| (bytes + 500_000) / 1_000_000;
        let Self { bytes, zero, buffers } = self;
        write!(f, "{} MB of {buffers} buffers, {} MB of it zeros that take no room", mb(bytes), mb(zero))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DUMP: &str = "\
(01.055820) Plugin \"amdgpu_plugin\" (version 512 hooks 13)
(01.340310) amdgpu_plugin: process 202: 1 GPUs, 25 buffers, 4 queues, events and ranges
pie: 202: a line without a time
(01.561649) amdgpu_plugin: contents saved: 11726856 bytes, 3010568 of them zero, \
6 submissions for 20 buffers, 0.217 s, 51.4 MiB/s
(02.900000) Dumping finished successfully
";
    const RESTORED: &str = "amdgpu_plugin: contents loaded: 11726856 bytes, 3010568 of them zero, 6 \
                            submissions for 20 buffers, 0.246 s, 45.4 MiB/s\n";

    #[test]
    fn a_dump_goes_from_state_to_gpu_memory_to_cpu_memory() {
        let moments = dump(DUMP).unwrap();
        let times: Vec<f64> = moments.iter().map(|moment| moment.seconds).collect();
        assert_eq!(times, [1.340_31, 1.561_649, 2.9]);
        assert!(moments[0].what.ends_with("(1 GPUs, 25 buffers, 4 queues, events and ranges)"));
        assert!(moments[1].what.ends_with("12 MB of 20 buffers, 3 MB of it zeros that take no room"));
    }

    #[test]
    fn an_eager_restore_logs_what_it_moved() {
        assert_eq!(moved(&format!("another line\n{RESTORED}")).unwrap(), 11_726_856);
        assert!(moved("").unwrap_err().to_string().contains("contents loaded: "));
        assert!(
            moved(&RESTORED.replace("11726856", "7")).unwrap_err().to_string().contains("as it used to be")
        );
    }

    #[test]
    fn a_timeline_has_what_is_resident_on_gpus() {
        let memory = |minor, bytes| {
            format!("{{\"process\": 0, \"minor\": {minor}, \"bytes\": 9, \"resident\": {bytes}}}")
        };
        let json = |memory: &[String]| format!("{{\"memory\": [{}]}}", memory.join(","));
        let all = [memory("null", 5), memory("128", 7), memory("129", 8)];
        assert_eq!(resident(&json(&all)).unwrap(), 15);
        assert!(resident(&json(&all[..1])).is_err());
    }

    #[test]
    fn a_line_missing_in_a_log_is_named() {
        let refused = |log| dump(log).unwrap_err().to_string();
        assert!(refused("").contains("amdgpu_plugin: process "));
        assert!(refused(DUMP.split("contents").next().unwrap()).contains("contents saved: "));
        assert!(refused(&DUMP.replace("11726856 bytes", "many")).contains("not as it used to be"));
    }
}
