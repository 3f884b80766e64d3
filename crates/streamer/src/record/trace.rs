// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes a record in Chrome's trace event format, which Perfetto, Chrome and Speedscope show: memory over
//! time as counters, closed gates, page faults and swaps as slices, and moments of the whole restore as
//! instants.

use serde_json::{Value, json};

use super::model::{LoadedBytes, Process, ProcessMemory, Record};

/// The trace. Its clock is the record's, in microseconds.
pub(super) fn trace(record: &Record) -> Value {
    let mut events = Vec::new();
    processes(&mut events, record);
    for memory in &record.memory {
        resident(&mut events, record, memory);
    }
    streamer(&mut events, record);
    longest(&mut events, record);
    json!({"displayTimeUnit": "ms", "traceEvents": events})
}

/// An event of a process, on the track of its main thread.
fn event(phase: &str, pid: i32, name: &str, at_us: u64, args: &Value) -> Value {
    json!({"ph": phase, "pid": pid, "tid": pid, "name": name, "ts": at_us, "args": args})
}

/// Names the processes, and shows how long each ran with a closed gate.
fn processes(events: &mut Vec<Value>, record: &Record) {
    let name = |pid, name: &str| event("M", pid, "process_name", 0, &json!({"name": name}));
    events.push(name(record.worker.cast_signed(), "rewake"));
    for of in &record.processes {
        events.push(name(of.pid, &of.name));
        let Some(runs) = of.runs_us else { continue };
        events.push(instant("p", of.pid, "runs", runs));
        if of.gate {
            let end = of.gate_open_us.or(of.gone_us).unwrap_or(record.elapsed_us);
            let mut closed = event("X", of.pid, "gate closed", runs, &json!({}));
            closed["dur"] = end.saturating_sub(runs).into();
            events.push(closed);
        }
    }
}

/// A moment of a process (`p`) or of the restore (`g`).
fn instant(scope: &str, pid: i32, name: &str, at_us: u64) -> Value {
    let mut instant = event("i", pid, name, at_us, &json!({}));
    instant["s"] = scope.into();
    instant
}

/// How much of a memory was resident when.
fn resident(events: &mut Vec<Value>, record: &Record, memory: &ProcessMemory) {
    let pid = record.process_of(memory).map_or(0, |process| process.pid);
    let name = format!("resident {}", memory.whose());
    let mut add = |at, bytes: u64| events.push(event("C", pid, &name, at, &json!({"bytes": bytes})));
    record.sampled_us.iter().zip(&memory.samples).for_each(|(at, bytes)| add(*at, *bytes));
    add(record.elapsed_us, memory.resident);
}

/// What the streamer did for all processes together: what it filled CPU memory for, how many page faults it
/// had served at each moment, and when which memory was resident.
fn streamer(events: &mut Vec<Value>, record: &Record) {
    let pid = record.worker.cast_signed();
    for (at, LoadedBytes { fault, working_set, background }) in
        record.sampled_us.iter().zip(&record.sampled_loads)
    {
        let args = json!({"page faults": fault, "working set": working_set, "background": background});
        events.push(event("C", pid, "CPU memory filled", *at, &args));
    }
    for (at, faults) in record.sampled_us.iter().zip(&record.sampled_faults) {
        events.push(event("C", pid, "page faults", *at, &json!({"served": faults})));
    }
    let moments =
        [("working set resident", record.working_set_us), ("all memory resident", record.resident_us())];
    for (name, at) in moments {
        events.extend(at.map(|at| instant("g", pid, name, at)));
    }
    events.extend(record.failure().map(|failure| instant("g", pid, &failure.reason, record.elapsed_us)));
}

/// The page faults in GPU memory that waited longest, and the swaps that stopped a process longest. They may
/// overlap, so each is a pair of asynchronous events.
fn longest(events: &mut Vec<Value>, record: &Record) {
    let mut id = 0;
    let mut pair = |category: &str, process: usize, end: u64, took: u64, args: Value| {
        id += 1;
        let pid = record.processes.get(process).map_or(0, |of: &Process| of.pid);
        for (phase, at) in [("b", end.saturating_sub(took)), ("e", end)] {
            let mut event = event(phase, pid, category, at, &args);
            (event["cat"], event["id"]) = (category.into(), Value::from(id));
            events.push(event);
        }
    };
    for of in &record.longest_faults {
        let args = json!({"buffer": of.buffer, "address": format!("{:#x}", of.address)});
        pair("page fault in GPU memory", of.process, of.at_us, of.waited_us, args);
    }
    for of in &record.longest_swaps {
        pair("swap", of.process, of.at_us, of.stopped_us, json!({"buffer": of.buffer}));
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::super::example;
    use super::super::model::State;
    use super::*;

    /// An event, with the fields that its phase needs.
    #[derive(Debug, Deserialize)]
    struct Event {
        ph: String,
        pid: i32,
        name: String,
        ts: u64,
        args: Value,
        dur: Option<u64>,
        id: Option<u64>,
        s: Option<String>,
    }

    /// The events of a phase, after a way through text.
    fn events(record: &Record, phase: &str) -> Vec<Event> {
        let text = trace(record).to_string();
        let mut value: Value = serde_json::from_str(&text).unwrap();
        let all: Vec<Event> = serde_json::from_value(value["traceEvents"].take()).unwrap();
        all.into_iter().filter(|event| event.ph == phase).collect()
    }

    #[test]
    fn memory_rises_from_nothing_to_all_of_it() {
        let record = example::record();
        let counters = events(&record, "C");
        for memory in &record.memory {
            let (pid, name) =
                (record.process_of(memory).unwrap().pid, format!("resident {}", memory.whose()));
            let points: Vec<(u64, u64)> = counters
                .iter()
                .filter(|event| (event.pid, &event.name) == (pid, &name))
                .map(|event| (event.ts, event.args["bytes"].as_u64().unwrap()))
                .collect();
            assert_eq!((points[0], points.len()), ((0, 0), record.sampled_us.len() + 1), "{name}");
            assert_eq!(points.last(), Some(&(record.elapsed_us, memory.bytes)), "{name}");
            assert!(points.is_sorted_by(|one, two| one.0 <= two.0 && one.1 <= two.1), "{points:?}");
        }
        let filled: Vec<&Event> = counters.iter().filter(|event| event.name == "CPU memory filled").collect();
        let last = &filled.last().unwrap().args;
        assert_eq!(
            (filled.len(), &last["page faults"], &last["working set"]),
            (31, &json!(4 << 20), &json!(128 << 20))
        );
    }

    #[test]
    fn each_gate_fault_and_swap_has_its_time() {
        let record = example::record();
        let gates = events(&record, "X");
        let of = |event: &Event| (event.pid, event.ts, event.dur);
        assert_eq!(
            gates.iter().map(of).collect::<Vec<_>>(),
            [(4711, 1200, Some(2_949_800)), (4712, 3400, Some(2_948_600))]
        );
        let (begins, ends) = (events(&record, "b"), events(&record, "e"));
        let took: Vec<(Option<u64>, u64)> = begins
            .iter()
            .zip(&ends)
            .map(|(begin, end)| (begin.id.filter(|_| begin.id == end.id), end.ts - begin.ts))
            .collect();
        let waits = record.longest_faults.iter().map(|fault| fault.waited_us);
        let stops = record.longest_swaps.iter().map(|swap| swap.stopped_us);
        assert_eq!(took, (1..).map(Some).zip(waits.chain(stops)).collect::<Vec<_>>());
        assert_eq!(begins[0].args["address"], "0x7f0000000000");
    }

    #[test]
    fn moments_of_the_restore_are_its_own_and_those_of_processes_theirs() {
        let mut record = example::record();
        (record.state, record.reason) = (State::Failed, Some("EIO \"at\" 5".to_owned()));
        let instants = events(&record, "i");
        let of = |scope: &str| {
            let of = instants.iter().filter(|event| event.s.as_deref() == Some(scope));
            of.map(|event| (event.pid, event.name.as_str(), event.ts)).collect::<Vec<_>>()
        };
        assert_eq!(of("p"), [(4711, "runs", 1200), (4712, "runs", 3400), (4713, "runs", 3500)]);
        let wanted = [
            (77, "working set resident", 700_000),
            (77, "all memory resident", 2_950_100),
            (77, "EIO \"at\" 5", 2_960_000),
        ];
        assert_eq!(of("g"), wanted);
        let names = events(&record, "M").into_iter().map(|event| (event.pid, event.args["name"].clone()));
        let wanted = [(77, "rewake"), (4711, "python3"), (4712, "<b>\"rank\" & 1"), (4713, "logger")];
        assert_eq!(names.collect::<Vec<_>>(), wanted.map(|(pid, name)| (pid, json!(name))));
    }

    #[test]
    fn a_record_of_nothing_is_a_trace_too() {
        assert_eq!(trace(&Record::default())["traceEvents"].as_array().unwrap().len(), 1, "a name");
    }
}
