// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shows a restore on a terminal of 80 columns: the memory of its processes while it runs and at its end, and
//! then its events.

use std::fmt::Write as _;
use std::time::Duration;

use super::model::{LoadedBytes, Process, ProcessMemory, Record, State, left, percent};
use crate::units;

/// Lines of the table, which a terminal is to hold. The JSON of the record and of `rewake status` has all.
const MOST: usize = 16;
/// Columns of a process's number and name, of which the longest lose their ends.
const LABEL: usize = 20;

/// A line of the table: a process's CPU memory, or its memory on one GPU.
#[derive(Debug, Clone)]
pub struct Row {
    /// The process's number and name.
    pub process: String,
    /// `CPUs` or `renderD128`.
    pub whose: String,
    /// Bytes that were missing.
    pub bytes: u64,
    /// How many of them are resident.
    pub resident: u64,
    /// Bytes a second that were loaded lately.
    pub rate: u64,
    /// When all were resident, if the reader knows that time.
    pub resident_us: Option<u64>,
}

/// Returns the table of memory, for a restore that runs and for one that has ended. Each line fits 80
/// columns.
#[must_use]
pub fn table(rows: &[Row]) -> Vec<String> {
    let mut lines = vec![format!(
        "{:<LABEL$} {:<10} {:>10}   % {:>11}  resident",
        "process", "memory of", "bytes", "rate"
    )];
    lines.extend(rows.iter().take(MOST).map(line));
    if rows.len() > MOST {
        lines.push(format!("... and {} more", rows.len() - MOST));
    }
    lines
}

fn line(row: &Row) -> String {
    // A process may choose any name, and a streamer of another version may not have checked it.
    let shown = |char: char| if char.is_control() { '?' } else { char };
    let process: String = row.process.chars().map(shown).take(LABEL).collect();
    let missing = row.bytes.saturating_sub(row.resident);
    let (rate, when) = match row.resident_us {
        Some(at) => (String::new(), format!("after {:.1} ms", millis(at))),
        None if missing == 0 => (String::new(), "all of it".to_owned()),
        None => (per_second(row.rate), left(missing, row.rate).map_or_else(String::new, in_seconds)),
    };
    let line = format!(
        "{process:<LABEL$} {:<10} {:>10} {:>3} {rate:>11}  {when}",
        row.whose,
        units::bytes(row.bytes),
        percent(row.resident, row.bytes),
    );
    line.trim_end().to_owned()
}

fn in_seconds(time: Duration) -> String {
    format!("in {}", units::seconds(time))
}

/// Returns a rate for users.
#[must_use]
pub fn per_second(bytes: u64) -> String {
    units::rate(bytes, 1_000_000_000)
}

/// Returns the record as text: the events, then each process's CPU memory and its memory on each GPU. Times
/// are on the restore's clock, which begins `before` the handoff.
#[must_use]
pub fn text(record: &Record, before: Duration) -> String {
    let before = u64::try_from(before.as_micros()).unwrap_or_default();
    let mut text = String::from("memory loaded while the processes run, since the restore was started:\n");
    for (at, what) in moments(record) {
        // Writing to a String cannot fail, here and below.
        let _ = writeln!(text, "{:8.1} ms  {what}", millis(before + at));
    }
    for (of, (faults, waited, longest)) in [("GPU", record.faults()), ("CPU", record.page_faults())] {
        if let Some(mean) = waited.checked_div(faults).map(latency) {
            let most = latency(longest);
            let _ = writeln!(text, "{faults} faults in {of} memory, {mean} on average, {most} at most");
        }
    }
    let LoadedBytes { fault, working_set, background } = record.loaded;
    if fault + working_set + background > 0 {
        let [fault, working_set, background] = [fault, working_set, background].map(units::bytes);
        let source = record.source.name();
        let _ = writeln!(
            text,
            "CPU memory from the {source}: {fault} for page faults, {working_set} working set, {background} \
             later"
        );
    }
    let swaps: u64 = record.processes.iter().map(|of| of.swaps).sum();
    if swaps > 0 {
        let stopped = record.processes.iter().map(|of| of.stopped_us).sum();
        let _ = writeln!(
            text,
            "{swaps} buffers swapped, for which processes were stopped for {}",
            latency(stopped)
        );
    }
    for line in table(&rows(record, before)) {
        let _ = writeln!(text, "{line}");
    }
    text
}

/// Returns the events in their order.
fn moments(record: &Record) -> Vec<(u64, String)> {
    let all = units::bytes(record.totals().0);
    let mut moments = vec![(0, format!("{all} are to be loaded"))];
    let mut of_all = |what: &str, when: &dyn Fn(&Process) -> Option<u64>| {
        let mut times: Vec<(u64, &Process)> =
            record.processes.iter().filter_map(|of| Some((when(of)?, of))).collect();
        times.sort_by_key(|(at, _)| *at);
        match times.as_slice() {
            [] => {}
            [(at, of)] => moments.push((*at, format!("{}: {what}", of.label()))),
            [(first, of), .., (last, other)] => {
                let count = times.len();
                moments.push((*first, format!("{}: {what}, the first of {count}", of.label())));
                moments.push((*last, format!("{}: {what}, the last of {count}", other.label())));
            }
        }
    };
    of_all("runs", &|of| of.runs_us);
    of_all("gate open, its GPUs run", &|of| of.gate_open_us);
    of_all("ended before its gate was opened", &|of| of.gone_us);
    if let Some(at) = record.working_set_us {
        moments.push((at, "the working set is resident".to_owned()));
    }
    if let Some(at) = record.resident_us() {
        let of_cpus = record.memory.iter().any(|of| of.minor.is_none());
        let took = at.saturating_sub(record.began_us(of_cpus));
        let rate = units::rate(record.totals().0, took.saturating_mul(1000));
        moments.push((at, format!("all memory is resident, {rate}")));
    }
    if let Some(failure) = record.failure() {
        let what = if record.state == State::Failed { "failed: " } else { "" };
        moments.push((record.elapsed_us, format!("{what}{failure}")));
    }
    // Stable: what happened at one moment stays in this order.
    moments.sort_by_key(|(at, _)| *at);
    moments
}

fn rows(record: &Record, before: u64) -> Vec<Row> {
    let row = |memory: &ProcessMemory| Row {
        process: record.process_of(memory).map(Process::label).unwrap_or_default(),
        whose: memory.whose(),
        bytes: memory.bytes,
        resident: memory.resident,
        rate: record.rate_of(memory),
        resident_us: memory.resident_us.map(|at| before + at),
    };
    record.memory.iter().map(row).collect()
}

fn latency(micros: u64) -> String {
    units::latency(Duration::from_micros(micros))
}

/// Returns milliseconds, to be printed.
#[expect(clippy::cast_precision_loss, reason = "far less than 2^53 µs is measured")]
fn millis(micros: u64) -> f64 {
    micros as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::super::example;
    use super::*;

    #[test]
    fn events_and_the_growth_of_memory_are_shown() {
        let wanted = "\
memory loaded while the processes run, since the restore was started:
    50.0 ms  5.2 GiB are to be loaded
    51.2 ms  4711 python3: runs, the first of 3
    53.5 ms  4713 logger: runs, the last of 3
   750.0 ms  the working set is resident
  3000.1 ms  all memory is resident, 1.91 GB/s
  3001.0 ms  4711 python3: gate open, its GPUs run, the first of 2
  3002.0 ms  4712 <b>\"rank\" & 1: gate open, its GPUs run, the last of 2
12 faults in GPU memory, 6.7 ms on average, 43.2 ms at most
500 faults in CPU memory, 40 µs on average, 85 µs at most
CPU memory from the cache: 4.0 MiB for page faults, 128.0 MiB working set, 636.0 MiB later
8 buffers swapped, for which processes were stopped for 1.6 ms
process              memory of       bytes   %        rate  resident
4711 python3         renderD128    2.0 GiB 100              after 3000.1 ms
4712 <b>\"rank\" & 1   CPUs        512.0 MiB 100              after 2550.0 ms
4712 <b>\"rank\" & 1   renderD128    1.0 GiB 100              after 1450.0 ms
4712 <b>\"rank\" & 1   renderD129    1.5 GiB 100              after 2150.0 ms
4713 logger          CPUs        256.0 MiB 100              after 1050.0 ms
";
        let text = text(&example::record(), Duration::from_millis(50));
        assert_eq!(text, wanted, "{text}");
    }

    #[test]
    fn it_fits_eighty_columns_whatever_it_is_of() {
        let mut record = example::record();
        record.processes[0].pid = 4_194_304;
        record.processes[0].name = "a".repeat(15);
        record.memory[0] =
            ProcessMemory { bytes: (1 << 50) - 1, minor: Some(191), ..record.memory[0].clone() };
        record.memory[0].resident_us = Some(36_000_000_000);
        let last = |text: &str| text.lines().skip(11).map(|line| line.chars().count()).max();
        let text = text(&record, Duration::ZERO);
        assert!(last(&text) <= Some(80), "{text}");
    }

    #[test]
    fn a_failure_shows_its_reason_and_the_resident_memory() {
        let mut record = example::record();
        record.memory[0] = ProcessMemory { resident: 1 << 30, resident_us: None, ..record.memory[0].clone() };
        record.processes.iter_mut().for_each(|of| of.gate_open_us = None);
        (record.state, record.reason) = (State::Failed, Some("read amdgpu-pages-7-1.img: EIO".to_owned()));
        let text = text(&record, Duration::ZERO);
        assert!(text.contains("  2960.0 ms  failed: read amdgpu-pages-7-1.img: EIO\n"), "{text}");
        assert!(text.contains("    2.0 GiB  50 ") && !text.contains("gate open"), "{text}");
    }

    #[test]
    fn of_a_thousand_processes_the_first_are_shown() {
        let mut record = example::record();
        record.memory = vec![record.memory[0].clone(); 1000];
        let text = text(&record, Duration::ZERO);
        assert!(text.ends_with("... and 984 more\n") && text.lines().count() < 50, "{text}");
    }
}
