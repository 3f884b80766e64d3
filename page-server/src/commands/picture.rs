// SPDX-License-Identifier: MIT OR Apache-2.0
//! How much of a restore is resident, for users and programs.

use serde_json::{Value, json};

use rewake_streamer::control::proto::{State, StreamedMemory, StreamedProcess, Streaming};
use rewake_streamer::record::model::{left, percent};
use rewake_streamer::record::text::{self, Row};
use rewake_streamer::units;

/// Columns of the bar.
const BAR: usize = 16;

/// A line for each process's CPU memory and for its memory on each GPU, and one for all. Each fits 80
/// columns.
pub(super) fn lines(picture: &Streaming) -> Vec<String> {
    match picture.state() {
        State::Listening => return vec!["waiting for criu".to_owned()],
        State::Complete => return vec![format!("all memory is resident; {}", summary(picture))],
        State::Failed => return vec![format!("failed; {}", summary(picture))],
        State::Ended => return vec![format!("the program has ended; {}", summary(picture))],
        _ if !is_loading(picture) => {
            return vec!["criu restores the processes".to_owned()];
        }
        _ => {}
    }
    let rows = picture.processes.iter().flat_map(|process| parts(process).map(|part| row(process, part)));
    let mut lines = text::table(&rows.collect::<Vec<_>>());
    lines.push(summary(picture));
    lines
}

/// Whether any memory can be shown.
pub(super) fn is_loading(picture: &Streaming) -> bool {
    picture.state() == State::Running && picture.processes.iter().any(|of| parts(of).next().is_some())
}

/// A process's memory, and its process.
fn parts(process: &StreamedProcess) -> impl Iterator<Item = (String, &StreamedMemory)> {
    let of_cpus = process.of_cpus.iter().map(|part| ("CPUs".to_owned(), part));
    of_cpus.chain(process.memory.iter().map(|part| (format!("renderD{}", part.minor), part)))
}

fn row(process: &StreamedProcess, (whose, memory): (String, &StreamedMemory)) -> Row {
    Row {
        process: format!("{} {}", process.pid, process.name),
        whose,
        bytes: memory.bytes,
        resident: memory.resident,
        rate: memory.rate,
        resident_us: None,
    }
}

fn summary(picture: &Streaming) -> String {
    let gated = || picture.processes.iter().filter(|of| !of.without_gate);
    let (gates, open) = (gated().count(), gated().filter(|of| of.gate_open_us > 0).count());
    let gates = if gates == 0 { String::new() } else { format!("  {open} of {gates} gates open") };
    let (there, bytes) = sizes(picture);
    let share = percent(there, bytes);
    let full = BAR * usize::try_from(share).unwrap_or(100) / 100;
    let bar = ["=".repeat(full), " ".repeat(BAR - full)].concat();
    let (rate, left) = (text::per_second(picture.rate), left(bytes.saturating_sub(there), picture.rate));
    let left = left.map_or_else(|| "-".to_owned(), units::seconds);
    format!("[{bar}] {share:>3} %  {rate}  {left} left  {} faults{gates}", faults(picture))
}

/// The resident bytes of a restore, and all.
pub(super) fn sizes(picture: &Streaming) -> (u64, u64) {
    let memory = || picture.processes.iter().flat_map(parts).map(|(_, part)| part);
    (memory().map(|of| of.resident).sum(), memory().map(|of| of.bytes).sum())
}

/// The page faults of a restore that were served.
pub(super) fn faults(picture: &Streaming) -> u64 {
    picture.processes.iter().map(|of| of.faults + of.page_faults).sum()
}

/// A state's name.
pub(super) fn state_name(state: State) -> &'static str {
    match state {
        State::Unknown => "unknown",
        State::Listening => "listening",
        State::Restoring => "restoring",
        State::Running => "running",
        State::Complete => "complete",
        State::Failed => "failed",
        State::Ended => "ended",
    }
}

fn rate_of(process: &StreamedProcess) -> u64 {
    parts(process).map(|(_, part)| part.rate).sum()
}

/// The time until all of this memory is resident, at this rate; none where nothing is loaded.
fn left_us<'a>(memory: impl Iterator<Item = &'a StreamedMemory>, rate: u64) -> Option<u64> {
    let left = left(memory.map(|of| of.bytes.saturating_sub(of.resident)).sum(), rate)?;
    Some(left.as_micros().try_into().unwrap_or(u64::MAX))
}

/// The whole picture.
pub(super) fn as_json(picture: &Streaming) -> Value {
    let part = |minor: Option<u32>, of: &StreamedMemory| {
        json!({
            "minor": minor,
            "bytes": of.bytes,
            "resident": of.resident,
            "rate": of.rate,
            "left_us": left_us([of].into_iter(), of.rate),
        })
    };
    let process = |of: &StreamedProcess| {
        let of_cpus = of.of_cpus.iter().map(|of| part(None, of));
        let memory = of_cpus.chain(of.memory.iter().map(|of| part(Some(of.minor), of)));
        json!({
            "pid": of.pid,
            "name": of.name,
            "gate": !of.without_gate,
            "runs_us": of.runs_us,
            "gate_open_us": of.gate_open_us,
            "left_us": left_us(parts(of).map(|(_, part)| part), rate_of(of)),
            "faults": of.faults,
            "longest_fault_us": of.longest_fault_us,
            "page_faults": of.page_faults,
            "longest_page_fault_us": of.longest_page_fault_us,
            "swaps": of.swaps,
            "memory": memory.collect::<Vec<_>>(),
        })
    };
    json!({
        "state": state_name(picture.state()),
        "elapsed_us": picture.elapsed_us,
        "rate": picture.rate,
        "working_set_us": Some(picture.working_set_us).filter(|at| *at > 0),
        "left_us": left_us(picture.processes.iter().flat_map(parts).map(|(_, part)| part), picture.rate),
        "processes": picture.processes.iter().map(process).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(minor: u32, bytes: u64, resident: u64) -> StreamedMemory {
        StreamedMemory { minor, bytes, resident, rate: 1 << 28 }
    }

    fn process(pid: i32, name: &str, gate_open_us: u64, memory: Vec<StreamedMemory>) -> StreamedProcess {
        let name = name.to_owned();
        StreamedProcess { pid, name, gate_open_us, faults: 6, memory, ..StreamedProcess::default() }
    }

    /// Two processes with GPUs, one of which also has CPU memory.
    fn picture() -> Streaming {
        let of_cpus = Some(part(0, 2 << 30, 1 << 29));
        let gpus = [part(128, 2 << 30, 1 << 30), part(129, 1 << 30, 1 << 30)];
        Streaming {
            state: State::Running.into(),
            elapsed_us: 2_000_000,
            rate: 1 << 29,
            processes: vec![
                process(4_194_304, "a-long-name-15c", 0, gpus.to_vec()),
                StreamedProcess {
                    of_cpus,
                    page_faults: 30,
                    ..process(4712, "rank\u{1b}1", 7, vec![part(129, 2 << 30, 2 << 30)])
                },
            ],
            ..Streaming::default()
        }
    }

    #[test]
    fn a_line_for_each_kind_of_memory_of_each_process_and_one_for_all() {
        let wanted = [
            "process              memory of       bytes   %        rate  resident",
            "4194304 a-long-name- renderD128    2.0 GiB  50   0.27 GB/s  in 4.00 s",
            "4194304 a-long-name- renderD129    1.0 GiB 100              all of it",
            "4712 rank?1          CPUs          2.0 GiB  25   0.27 GB/s  in 6.00 s",
            "4712 rank?1          renderD129    2.0 GiB 100              all of it",
            "[==========      ]  64 %  0.54 GB/s  5.00 s left  42 faults  1 of 2 gates open",
        ];
        assert_eq!(lines(&picture()), wanted);
        assert!(wanted.iter().all(|line| line.len() < 80));
    }

    #[test]
    fn a_process_without_a_gate_shows_none() {
        let mut picture = picture();
        picture.processes[0] = StreamedProcess {
            without_gate: true,
            of_cpus: Some(part(0, 8, 4)),
            ..process(7, "sh", 3, vec![])
        };
        assert!(lines(&picture)[1].starts_with("7 sh                 CPUs "), "{:?}", lines(&picture));
        assert!(lines(&picture)[4].ends_with("  1 of 1 gates open"), "{:?}", lines(&picture));
        picture.processes.truncate(1);
        assert!(is_loading(&picture) && lines(&picture)[2].ends_with("  6 faults"), "{:?}", lines(&picture));
    }

    #[test]
    fn one_line_is_shown_before_and_after_the_load() {
        let of = |state: State| lines(&Streaming { state: state.into(), ..picture() });
        assert_eq!(of(State::Listening), ["waiting for criu"]);
        let early = Streaming { state: State::Running.into(), ..Streaming::default() };
        assert_eq!(lines(&early), ["criu restores the processes"]);
        assert!(of(State::Complete)[0].starts_with("all memory is resident; "));
        assert!(of(State::Failed)[0].starts_with("failed; "));
    }

    #[test]
    fn of_many_the_first_are_shown() {
        let mut picture = picture();
        picture.processes = vec![picture.processes[0].clone(); 1000];
        let lines = lines(&picture);
        assert_eq!((lines.len(), lines[17].as_str()), (19, "... and 1984 more"));
    }

    #[test]
    fn the_json_has_all_of_it() {
        let value = as_json(&picture());
        assert_eq!(value["state"], "running");
        let memory = &value["processes"][1]["memory"];
        assert_eq!((&memory[0]["minor"], &memory[1]["minor"]), (&Value::Null, &json!(129)));
        assert_eq!((&memory[0]["resident"], &memory[1]["resident"]), (&json!(1 << 29), &json!(2_u64 << 30)));
        assert_eq!(
            (&value["processes"][1]["gate"], &value["processes"][1]["page_faults"]),
            (&json!(true), &json!(30))
        );
        assert_eq!(value["processes"][1]["gate_open_us"], 7);
    }

    #[test]
    fn the_time_left_is_bytes_by_rate() {
        let mut picture = picture();
        picture.processes[1].memory[0].rate = 0;
        picture.processes[1].of_cpus.as_mut().unwrap().rate = 0;
        let value = as_json(&picture);
        let [first, second] = [0, 1].map(|process| &value["processes"][process]);
        let left = |of: &Value| {
            of["memory"].as_array().unwrap().iter().map(|of| of["left_us"].as_u64()).collect::<Vec<_>>()
        };
        assert_eq!(left(first), [Some(4_000_000), Some(0)]);
        assert_eq!(left(second), [None, Some(0)], "nothing is loaded, and nothing is missing");
        assert_eq!([&first["left_us"], &second["left_us"]], [&json!(2_000_000), &Value::Null]);
        assert_eq!(value["left_us"], 5_000_000);
    }
}
