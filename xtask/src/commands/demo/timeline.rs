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
        moment(contents, &format!("GPU memory is saved: {}", amount(moved)?)),
        moment(end(log)?, "CPU memory is saved, the process has ended"),
    ])
}

/// The moments of a restore.
pub(super) fn restore(log: &str) -> anyhow::Result<Vec<Moment>> {
    let (state, _) = line(log, "amdgpu_plugin: mapping at ")?;
    let (contents, moved) = line(log, "contents loaded: ")?;
    let taken: f64 = moved
        .split(", ")
        .find_map(|part| part.strip_suffix(" s")?.parse().ok())
        .with_context(|| format!("no time in the plugin's line: {moved}"))?;
    Ok(vec![
        moment(state, "processes, GPU buffers and queues exist again, empty and evicted"),
        moment(contents - taken, "CPU memory is loaded"),
        moment(contents, &format!("GPU memory is loaded: {}", amount(moved)?)),
        moment(end(log)?, "the queues run, CRIU returns"),
    ])
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
fn amount(moved: &str) -> anyhow::Result<String> {
    let mut parts = moved.split(", ");
    let mut number = |before: &str, behind: &str| -> Option<f64> {
        parts.next()?.split_once(before)?.1.strip_suffix(behind)?.parse().ok()
    };
    let (bytes, zero, buffers) =
        (number("", " bytes"), number("", " of them zero"), number(" for ", " buffers"));
    let (Some(bytes), Some(zero), Some(buffers)) = (bytes, zero, buffers) else {
        bail!("the plugin's line is not as it used to be: {moved}");
    };
    Ok(format!(
        "{:.0} MB of {buffers} buffers, {:.0} MB of it zeros that take no room",
        bytes / 1e6,
        zero / 1e6
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DUMP: &str = "\
(01.055820) Plugin \"amdgpu_plugin\" (version 512 hooks 13)
(01.340310) amdgpu_plugin: process 202: 1 GPUs, 25 buffers, 4 queues, events and ranges
pie: 202: a line without a time
(01.561649) amdgpu_plugin: contents saved: 11726856 bytes, 3010568 of them zero, 6 submissions for 20 buffers, 0.217 s, 51.4 MiB/s
(02.900000) Dumping finished successfully
";
    const RESTORE: &str = "\
(00.438141) amdgpu_plugin: GPU 0x30e1 of the image is GPU 0x30e1 here
(00.680574)    202: amdgpu_plugin: mapping at 0x7fa027e4f000: buffer 21 of process 202
(00.681498)    202: amdgpu_plugin: mapping at 0x7fa02bc00000: buffer 12 of process 202
(02.282967) amdgpu_plugin: contents loaded: 11726856 bytes, 3010568 of them zero, 6 submissions for 20 buffers, 0.246 s, 45.4 MiB/s
(02.400000) Restore finished successfully.
";

    #[test]
    fn a_dump_goes_from_state_to_gpu_memory_to_cpu_memory() {
        let moments = dump(DUMP).unwrap();
        let times: Vec<f64> = moments.iter().map(|moment| moment.seconds).collect();
        assert_eq!(times, [1.340_31, 1.561_649, 2.9]);
        assert!(moments[0].what.ends_with("(1 GPUs, 25 buffers, 4 queues, events and ranges)"));
        assert!(moments[1].what.ends_with("12 MB of 20 buffers, 3 MB of it zeros that take no room"));
    }

    #[test]
    fn a_restore_goes_from_state_to_cpu_memory_to_gpu_memory() {
        let moments = restore(RESTORE).unwrap();
        let times: Vec<f64> = moments.iter().map(|moment| (moment.seconds * 1e6).round() / 1e6).collect();
        assert_eq!(times, [0.680_574, 2.036_967, 2.282_967, 2.4]);
    }

    #[test]
    fn a_line_missing_in_a_log_is_named() {
        let refused = |log| dump(log).unwrap_err().to_string();
        assert!(refused("").contains("amdgpu_plugin: process "));
        assert!(refused(DUMP.split("contents").next().unwrap()).contains("contents saved: "));
        assert!(refused(&DUMP.replace("11726856 bytes", "many")).contains("not as it used to be"));
        assert!(restore(&RESTORE.replace("0.246 s", "soon")).unwrap_err().to_string().contains("no time"));
    }
}
