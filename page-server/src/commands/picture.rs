// SPDX-License-Identifier: MIT OR Apache-2.0
//! How far a restore of GPU memory is, for people and programs.

use std::time::Duration;

use serde_json::{Value, json};

use crate::control::proto::{State, StreamedMemory, StreamedProcess, Streaming};
use crate::timeline::record::{left, percent};
use crate::units;

/// Lines of memory that a terminal is asked to hold. `rewake status --json` has all.
const MOST: usize = 8;
/// Columns of a process's number and name.
const LABEL: usize = 23;
const BAR: usize = 16;

/// A line for each process's memory of each GPU, and one for all. Each fits 80 columns.
pub(super) fn lines(picture: &Streaming) -> Vec<String> {
    match picture.state() {
        State::Listening => return vec!["waiting for criu".to_owned()],
        State::Complete => return vec![format!("GPUs run; {}", summary(picture))],
        State::Failed => return vec![format!("failed; {}", summary(picture))],
        _ if picture.processes.iter().all(|of| of.memory.is_empty()) => {
            return vec!["criu restores the processes".to_owned()];
        }
        _ => {}
    }
    let parts = || picture.processes.iter().flat_map(|of| of.memory.iter().map(move |memory| (of, memory)));
    let mut lines: Vec<String> = parts().take(MOST).map(|(of, memory)| line(of, memory)).collect();
    let more = parts().count().saturating_sub(MOST);
    if more > 0 {
        lines.push(format!("... and {more} more"));
    }
    lines.push(summary(picture));
    lines
}

/// A name is what its process likes; ours may be of another version that does not look.
fn label(process: &StreamedProcess) -> String {
    let text = format!("{} {}", process.pid, process.name);
    text.chars().map(|char| if char.is_control() { '?' } else { char }).take(LABEL).collect()
}

fn line(process: &StreamedProcess, memory: &StreamedMemory) -> String {
    format!(
        "{:<LABEL$} {:<10} {:>10} / {:>10} {:>3} % {:>11}",
        label(process),
        format!("renderD{}", memory.minor),
        units::bytes(memory.resident),
        units::bytes(memory.bytes),
        percent(memory.resident, memory.bytes),
        rate(memory.rate),
    )
}

fn summary(picture: &Streaming) -> String {
    let memory = || picture.processes.iter().flat_map(|of| &of.memory);
    let all: u64 = memory().map(|of| of.bytes).sum();
    let there: u64 = memory().map(|of| of.resident).sum();
    let faults: u64 = picture.processes.iter().map(|of| of.faults).sum();
    let gates = picture.processes.len();
    let open = picture.processes.iter().filter(|of| of.gate_open_us > 0).count();
    let percent = percent(there, all);
    let full = BAR * usize::try_from(percent).unwrap_or(100) / 100;
    let left = left(all.saturating_sub(there), picture.rate);
    let left = left.map_or_else(|| "-".to_owned(), units::seconds);
    format!(
        "[{}{}] {percent:>3} %  {}  {left} left  {faults} faults  {open} of {gates} gates open",
        "=".repeat(full),
        " ".repeat(BAR - full),
        rate(picture.rate),
    )
}

fn rate(bytes: u64) -> String {
    units::rate(bytes, Duration::from_secs(1).as_nanos().try_into().unwrap_or(u64::MAX))
}

/// Everything.
pub(super) fn as_json(picture: &Streaming) -> Value {
    let memory = |of: &StreamedMemory| json!({ "minor": of.minor, "bytes": of.bytes, "resident": of.resident, "rate": of.rate });
    let process = |of: &StreamedProcess| {
        json!({
            "pid": of.pid,
            "name": of.name,
            "runs_us": of.runs_us,
            "gate_open_us": of.gate_open_us,
            "faults": of.faults,
            "longest_fault_us": of.longest_fault_us,
            "swaps": of.swaps,
            "memory": of.memory.iter().map(memory).collect::<Vec<_>>(),
        })
    };
    json!({
        "state": super::status::state_name(picture.state()),
        "elapsed_us": picture.elapsed_us,
        "rate": picture.rate,
        "processes": picture.processes.iter().map(process).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture() -> Streaming {
        let memory = |minor, bytes, resident, rate| StreamedMemory { minor, bytes, resident, rate };
        let process = |pid, name: &str, gate_open_us, memory| StreamedProcess {
            pid,
            name: name.to_owned(),
            gate_open_us,
            faults: 6,
            memory,
            ..StreamedProcess::default()
        };
        Streaming {
            state: State::Running.into(),
            elapsed_us: 2_000_000,
            rate: 1 << 29,
            processes: vec![
                process(4_194_304, "a-long-name-15c", 0, vec![memory(128, 2 << 30, 1 << 30, 1 << 28)]),
                process(4712, "rank\u{1b}1", 7, vec![memory(129, 2 << 30, 2 << 30, 1 << 28)]),
            ],
        }
    }

    #[test]
    fn a_line_for_each_gpu_of_each_process_and_one_for_all() {
        let wanted = [
            "4194304 a-long-name-15c renderD128    1.0 GiB /    2.0 GiB  50 %   0.27 GB/s",
            "4712 rank?1             renderD129    2.0 GiB /    2.0 GiB 100 %   0.27 GB/s",
            "[============    ]  75 %  0.54 GB/s  2.00 s left  12 faults  1 of 2 gates open",
        ];
        assert_eq!(lines(&picture()), wanted);
        assert!(wanted.iter().all(|line| line.len() < 80));
    }

    #[test]
    fn before_and_after_there_is_one_line() {
        let of = |state: State| lines(&Streaming { state: state.into(), ..picture() });
        assert_eq!(of(State::Listening), ["waiting for criu"]);
        let early = Streaming { state: State::Running.into(), ..Streaming::default() };
        assert_eq!(lines(&early), ["criu restores the processes"]);
        assert!(of(State::Complete)[0].starts_with("GPUs run; "));
        assert!(of(State::Failed)[0].starts_with("failed; "));
    }

    #[test]
    fn of_many_the_first_are_shown() {
        let mut picture = picture();
        picture.processes = vec![picture.processes[0].clone(); 1000];
        let lines = lines(&picture);
        assert_eq!((lines.len(), lines[8].as_str()), (10, "... and 992 more"));
    }

    #[test]
    fn the_json_has_all_of_it() {
        let value = as_json(&picture());
        assert_eq!(value["state"], "running");
        assert_eq!(value["processes"][1]["memory"][0]["resident"], 2_u64 << 30);
        assert_eq!(value["processes"][1]["gate_open_us"], 7);
    }
}
