// SPDX-License-Identifier: MIT OR Apache-2.0
//! Draws the page's plot: memory over time and what loaded it, when processes ran, gates were opened and GPUs were
//! resumed, when the working set was resident, and how long page faults waited.

use std::fmt::Write as _;
use std::time::Duration;

use super::html::escaped;
use super::model::{LoadedBytes, Process, ProcessMemory, Record};
use super::text::millis;
use crate::units;

/// Lines of memory that have a colour; all others are grey.
pub(super) const COLOURS: usize = 7;

/// In units of the drawing.
const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 512.0;
const LEFT: f64 = 84.0;
const RIGHT: f64 = 786.0;
const TOP: f64 = 36.0;
const BOTTOM: f64 = 290.0;
/// The strip of faults.
const FLOOR: f64 = 386.0;
const CEILING: f64 = 316.0;
/// The lines of text below: the first, and their distance.
const LEGEND: f64 = 436.0;
const LEGEND_LINE: f64 = 22.0;
/// Waits from the first number on are drawn, and those from the second on have the full height: microseconds.
const SHORT: f64 = 10.0;
const LONG: f64 = 10_000_000.0;

/// The class of a memory's line: its colour's number, and its kind.
pub(super) fn class(place: usize, memory: &ProcessMemory) -> String {
    format!("c{}{}", place.min(COLOURS), if memory.minor.is_none() { " cpus" } else { "" })
}

/// The drawing: one `svg` element.
pub(super) fn plot(record: &Record) -> String {
    let mut svg = format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"Resident memory over time\">\n"
    );
    axes(&mut svg, record);
    for (class, what, when) in [
        ("runs", "runs", (|of| of.runs_us) as fn(&Process) -> Option<u64>),
        ("gate", "gate open", |of| of.gate_open_us),
    ] {
        moments(&mut svg, record, (class, what), when);
    }
    for (place, memory) in record.memory.iter().enumerate() {
        line(&mut svg, record, place, memory);
    }
    loads(&mut svg, record);
    faults(&mut svg, record);
    legend(&mut svg, record);
    svg.push_str("</svg>\n");
    svg
}

#[expect(clippy::cast_precision_loss, reason = "a place in a drawing")]
fn share(part: u64, all: u64) -> f64 {
    part as f64 / all.max(1) as f64
}

fn x(record: &Record, at: u64) -> f64 {
    LEFT + (RIGHT - LEFT) * share(at.min(record.elapsed_us), record.elapsed_us)
}

fn y(part: u64, all: u64) -> f64 {
    if all == 0 { TOP } else { BOTTOM - (BOTTOM - TOP) * share(part.min(all), all) }
}

fn axes(svg: &mut String, record: &Record) {
    // Writing to a String cannot fail, here and below.
    for percent in [0, 50, 100] {
        let at = y(percent, 100);
        let _ = writeln!(
            svg,
            "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{RIGHT}\" y2=\"{at:.1}\"/>"
        );
        let _ = writeln!(
            svg,
            "<text class=\"end\" x=\"{:.0}\" y=\"{:.1}\">{percent}%</text>",
            LEFT - 8.0,
            at + 5.0
        );
    }
    let step = step(record.elapsed_us);
    for tick in (0..=record.elapsed_us).step_by(usize::try_from(step).unwrap_or(usize::MAX)) {
        let at = x(record, tick);
        let _ =
            writeln!(svg, "<line class=\"grid\" x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{FLOOR}\"/>");
        let anchor = if at > RIGHT - 40.0 { "end" } else { "middle" };
        let _ = writeln!(svg, "<text class=\"{anchor}\" x=\"{at:.1}\" y=\"412\">{}</text>", time(tick, step));
    }
}

/// Distance of marks at the axis: 1, 2 or 5 times a power of ten, so that there are at most six.
fn step(elapsed: u64) -> u64 {
    let steps = (0..18).flat_map(|power| [1, 2, 5].map(|digit| digit * 10_u64.pow(power)));
    steps.into_iter().find(|step| elapsed / step <= 5).unwrap_or(u64::MAX)
}

fn time(at: u64, step: u64) -> String {
    match step {
        1_000_000.. => format!("{} s", at / 1_000_000),
        1000.. => format!("{} ms", at / 1000),
        _ => format!("{at} µs"),
    }
}

/// Draws a vertical line for each process.
fn moments(
    svg: &mut String,
    record: &Record,
    (class, what): (&str, &str),
    when: fn(&Process) -> Option<u64>,
) {
    let all: Vec<(u64, &Process)> = record.processes.iter().filter_map(|of| Some((when(of)?, of))).collect();
    for (at, of) in &all {
        let place = x(record, *at);
        let _ = writeln!(
            svg,
            "<line class=\"{class}\" x1=\"{place:.1}\" y1=\"{TOP}\" x2=\"{place:.1}\" y2=\"{FLOOR}\"><title>{}: {what} \
             after {:.1} ms</title></line>",
            escaped(&of.label()),
            millis(*at),
        );
    }
    let Some(last) = all.iter().map(|(at, _)| x(record, *at)).reduce(f64::max) else { return };
    let anchor = if last > f64::midpoint(LEFT, RIGHT) { "end" } else { "start" };
    let name = if all.len() == 1 { what.to_owned() } else { format!("{what} ({})", all.len()) };
    let _ = writeln!(svg, "<text class=\"{anchor} {class}\" x=\"{last:.1}\" y=\"24\">{name}</text>");
}

fn line(svg: &mut String, record: &Record, place: usize, memory: &ProcessMemory) {
    let mut points = format!("{:.1},{:.1}", x(record, 0), y(0, 1));
    for (at, there) in record.sampled_us.iter().zip(&memory.samples) {
        let _ = write!(points, " {:.1},{:.1}", x(record, *at), y(*there, memory.bytes));
    }
    let end = memory.resident_us.unwrap_or(record.elapsed_us);
    let _ =
        write!(points, " {:.1},{:.1}", x(record, end.max(last(record))), y(memory.resident, memory.bytes));
    let label = record.process_of(memory).map(Process::label).unwrap_or_default();
    let _ = writeln!(
        svg,
        "<polyline class=\"memory {}\" points=\"{points}\"><title>{}, {}: {} of {}</title></polyline>",
        class(place, memory),
        escaped(&label),
        memory.whose(),
        units::bytes(memory.resident),
        units::bytes(memory.bytes),
    );
}

/// Draws how much of CPU memory was loaded for page faults and as the working set.
fn loads(svg: &mut String, record: &Record) {
    let all: u64 = record.memory.iter().filter(|of| of.minor.is_none()).map(|of| of.bytes).sum();
    if all == 0 {
        return;
    }
    for (class, what, bytes) in [
        ("by-fault", "for page faults", (|of| of.fault) as fn(&LoadedBytes) -> u64),
        ("by-set", "working set", |of| of.working_set),
    ] {
        if bytes(&record.loaded) == 0 {
            continue;
        }
        let samples = record.sampled_us.iter().zip(&record.sampled_loads);
        let points = samples.map(|(at, of)| format!("{:.1},{:.1} ", x(record, *at), y(bytes(of), all)));
        let _ = writeln!(
            svg,
            "<polyline class=\"load {class}\" points=\"{}\"><title>{what}: {} of {}</title></polyline>",
            points.collect::<String>().trim_end(),
            units::bytes(bytes(&record.loaded)),
            units::bytes(all),
        );
    }
    if let Some(at) = record.working_set_us {
        let place = x(record, at);
        let _ = writeln!(
            svg,
            "<line class=\"by-set\" x1=\"{place:.1}\" y1=\"{TOP}\" x2=\"{place:.1}\" y2=\"{BOTTOM}\"><title>the working \
             set is resident after {:.1} ms</title></line>",
            millis(at),
        );
    }
}

/// Writes how many faults there were, and what CPU memory was loaded for. A line is short enough for the large letters
/// of narrow screens.
fn legend(svg: &mut String, record: &Record) {
    let faults = |(count, _, longest): (u64, u64, u64), whose: &str| match count {
        0 => format!("no faults in {whose} memory"),
        _ => {
            let longest = units::latency(Duration::from_micros(longest));
            format!("{count} faults in {whose} memory, {longest} at most")
        }
    };
    let mut lines = vec![faults(record.faults(), "GPU"), faults(record.page_faults(), "CPU")];
    if record.memory.iter().any(|of| of.minor.is_none() && of.bytes > 0) {
        let LoadedBytes { fault, working_set, background } = record.loaded;
        lines.push(format!(
            "CPU memory from the {}: <tspan class=\"by-fault\">{} for page faults</tspan>,",
            record.source.name(),
            units::bytes(fault)
        ));
        lines.push(format!(
            "<tspan class=\"by-set\">{} working set</tspan>, {} in the background",
            units::bytes(working_set),
            units::bytes(background)
        ));
    }
    let mut y = LEGEND;
    for line in lines {
        let _ = writeln!(svg, "<text class=\"legend\" x=\"{LEFT}\" y=\"{y}\">{line}</text>");
        y += LEGEND_LINE;
    }
}

fn last(record: &Record) -> u64 {
    record.sampled_us.last().copied().unwrap_or_default()
}

/// Draws a bar for each fault that is kept; its height is the logarithm of the wait. Behind the bars it
/// draws how many faults of both kinds there were.
fn faults(svg: &mut String, record: &Record) {
    let count = record.faults().0 + record.page_faults().0;
    let _ =
        writeln!(svg, "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{FLOOR}\" x2=\"{RIGHT}\" y2=\"{FLOOR}\"/>");
    if count == 0 {
        return;
    }
    let mut points = String::new();
    for (at, until) in record.sampled_us.iter().zip(&record.sampled_faults) {
        let height = (FLOOR - CEILING) * share(*until, count).min(1.0);
        let _ = write!(points, "{:.1},{:.1} ", x(record, *at), FLOOR - height);
    }
    let _ = writeln!(svg, "<polyline class=\"count\" points=\"{}\"/>", points.trim_end());
    for fault in &record.longest_faults {
        let wait = millis(fault.waited_us) * 1e3;
        let height = ((wait.max(SHORT) / SHORT).log10() / (LONG / SHORT).log10()).clamp(0.03, 1.0);
        let (at, high) = (x(record, fault.at_us), (FLOOR - CEILING) * height);
        let label = record.processes.get(fault.process).map(Process::label).unwrap_or_default();
        let _ = writeln!(
            svg,
            "<line class=\"fault\" x1=\"{at:.1}\" y1=\"{FLOOR}\" x2=\"{at:.1}\" y2=\"{:.1}\"><title>{}, buffer {}: {} \
             after {:.1} ms</title></line>",
            FLOOR - high,
            escaped(&label),
            fault.buffer,
            units::latency(Duration::from_micros(fault.waited_us)),
            millis(fault.at_us),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::example;
    use super::super::html::html;
    use super::*;

    /// Sizes of the page's texts in units of the drawing: everywhere, and on narrow screens those of the drawing and
    /// those of its legend.
    const TEXT: u32 = 15;
    const NARROW_TEXT: u32 = 24;
    const NARROW_LEGEND: u32 = 18;

    /// The points of the memory at an index.
    fn points(svg: &str, place: usize) -> Vec<(f64, f64)> {
        let line =
            svg.lines().filter(|line| line.starts_with("<polyline class=\"memory")).nth(place).unwrap();
        let list = line.split('"').nth(3).unwrap();
        let point = |point: &str| {
            let (x, y) = point.split_once(',').unwrap();
            (x.parse().unwrap(), y.parse().unwrap())
        };
        list.split(' ').map(point).collect()
    }

    #[test]
    fn memory_rises_from_nothing_to_all_of_it() {
        let record = example::record();
        let svg = plot(&record);
        for (place, memory) in record.memory.iter().enumerate() {
            let points = points(&svg, place);
            assert_eq!((points[0], points.last().unwrap().1), ((LEFT, BOTTOM), TOP));
            assert!(points.windows(2).all(|two| two[0].0 <= two[1].0 && two[0].1 >= two[1].1), "{points:?}");
            let full = points.iter().find(|(_, y)| *y <= TOP).unwrap().0;
            let resident = x(&record, memory.resident_us.unwrap());
            assert!((full - resident).abs() < 30.0, "{full} {resident}");
        }
    }

    #[test]
    fn memory_of_cpus_looks_different() {
        let svg = plot(&example::record());
        let lines: Vec<&str> =
            svg.lines().filter(|line| line.starts_with("<polyline class=\"memory")).collect();
        let dashed = |line: &&&str| line.starts_with("<polyline class=\"memory c1 cpus\"");
        assert_eq!((lines.len(), lines.iter().filter(dashed).count()), (5, 1));
        assert_eq!(lines.iter().filter(|line| line.contains(", CPUs: ")).count(), 2);
    }

    #[test]
    fn what_loaded_memory_is_drawn_and_the_working_set_is_marked() {
        let record = example::record();
        let svg = plot(&record);
        let load = |class: &str| {
            let found =
                svg.lines().find(|line| line.starts_with(&format!("<polyline class=\"load {class}\"")));
            let points = found.unwrap_or_else(|| panic!("{class} in {svg}")).split('"').nth(3).unwrap();
            points
                .split(' ')
                .map(|point| point.split_once(',').unwrap().1.parse().unwrap())
                .collect::<Vec<f64>>()
        };
        let (faults, set) = (load("by-fault"), load("by-set"));
        assert_eq!((faults.len(), faults[0], set[0]), (31, BOTTOM, BOTTOM));
        assert!(set.is_sorted_by(|one, two| one >= two) && set[30] < faults[30], "{set:?}");
        let (_, marked) = svg.split_once("<line class=\"by-set\" x1=\"").unwrap();
        assert_eq!(marked.split('"').next().unwrap(), format!("{:.1}", x(&record, 700_000)));
        let text = "CPU memory from the cache: <tspan class=\"by-fault\">4.0 MiB for page faults</tspan>";
        assert!(svg.contains(text) && svg.contains("128.0 MiB working set"), "{svg}");
    }

    #[test]
    fn each_gate_and_fault_is_drawn_and_longer_waits_are_higher() {
        let record = example::record();
        let svg = plot(&record);
        assert_eq!(svg.matches("class=\"gate\"").count(), 2);
        assert_eq!(svg.matches("class=\"runs\"").count(), 3);
        let tops: Vec<f64> = svg
            .lines()
            .filter(|line| line.starts_with("<line class=\"fault\""))
            .map(|line| line.split('"').nth(9).unwrap().parse().unwrap())
            .collect();
        assert_eq!(tops.len(), 12);
        assert!(tops.is_sorted_by(|one, two| one >= two), "{tops:?}");
    }

    /// The width of a character of `DejaVu Sans`, the widest of the common fonts, in parts of the font's size.
    fn width(character: char) -> f64 {
        match character {
            ' ' | '.' | ',' | ':' | ';' | 'i' | 'j' | 'l' | '|' | '(' | ')' => 0.4,
            'm' | 'w' | 'M' | 'W' | '%' => 1.0,
            'A'..='Z' => 0.79,
            _ => 0.64,
        }
    }

    /// The texts that leave a drawing, by their ends and their height, at the sizes that the page gives them.
    fn outside(svg: &str) -> Vec<String> {
        let mut outside = Vec::new();
        let (mut texts, mut rest) = (0, svg);
        while let Some((_, text)) = rest.split_once("<text ") {
            let (attributes, after) = text.split_once('>').unwrap();
            let (content, after) = after.split_once("</text>").unwrap();
            (texts, rest) = (texts + 1, after);
            let mut is_tag = false;
            let shown = content.chars().filter(|character| {
                let is_shown = !is_tag && *character != '<';
                is_tag = *character == '<' || is_tag && *character != '>';
                is_shown
            });
            let parts: f64 = shown.map(width).sum();
            let of = |name: &str| {
                let (_, value) = attributes.split_once(&format!("{name}=\""))?;
                Some(value.split('"').next().unwrap())
            };
            let (class, x, y): (_, f64, f64) = (
                of("class").unwrap_or_default(),
                of("x").unwrap().parse().unwrap(),
                of(" y").unwrap().parse().unwrap(),
            );
            let sizes = if class.contains("legend") { [TEXT, NARROW_LEGEND] } else { [TEXT, NARROW_TEXT] };
            for size in sizes.map(f64::from) {
                let length = parts * size;
                let begin = match class.split(' ').next().unwrap() {
                    "end" => x - length,
                    "middle" => x - length / 2.0,
                    _ => x,
                };
                if begin < 0.0 || begin + length > WIDTH || y < size || y + size / 4.0 > HEIGHT {
                    outside
                        .push(format!("{size}px from {begin:.0} to {:.0} at {y}: {content}", begin + length));
                }
            }
        }
        assert!(texts > 5, "{svg}");
        outside
    }

    #[test]
    fn no_text_leaves_the_drawing() {
        let mut record = example::record();
        let page = html(&record);
        for size in [
            format!("text{{font-size:{TEXT}px"),
            format!("40rem){{text{{font-size:{NARROW_TEXT}px}}text.legend{{font-size:{NARROW_LEGEND}px}}"),
        ] {
            assert!(page.contains(&size), "{size}");
        }
        assert_eq!(outside(&plot(&record)), [""; 0]);
        let most = 1023 * (1 << 20) + (1 << 20) * 9 / 10;
        record.loaded = LoadedBytes { fault: most, working_set: most, background: most };
        for process in &mut record.processes {
            (process.faults, process.page_faults) = (1 << 31, 1 << 31);
            (process.longest_fault_us, process.longest_page_fault_us) = (999_900, 999_900);
        }
        let one = record.processes[0].clone();
        for (moment, elapsed) in [(0, 5), (1, 4999), (3_000, 60_000), (4_000_000_000, 5_999_000_000)] {
            record.elapsed_us = elapsed;
            record.processes =
                vec![Process { runs_us: Some(moment), gate_open_us: Some(moment), ..one.clone() }; 4096];
            assert_eq!(outside(&plot(&record)), [""; 0], "{elapsed}");
        }
        let long = "<text x=\"84\" y=\"438\">CPU memory from the cache: <tspan class=\"by-fault\">4.0 MiB for page \
                    faults</tspan>, 128.0 MiB working set, 636.0 MiB in the background</text>";
        assert_eq!(
            outside(&plot(&record).replace("</svg>", long)).len(),
            2,
            "the check finds what was cut once"
        );
    }

    #[test]
    fn a_record_without_time_or_memory_is_drawn_too() {
        let svg = plot(&Record::default());
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        let mut record = example::record();
        record.memory[0].bytes = 0;
        (record.elapsed_us, record.sampled_us) = (1, Vec::new());
        let svg = plot(&record);
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn times_at_the_axis_are_round_and_few() {
        assert_eq!([0, 5, 6, 2_960_000, 3_600_000_000].map(step), [1, 1, 2, 500_000, 1_000_000_000]);
        assert_eq!([time(3, 1), time(4000, 2000), time(20_000_000, 5_000_000)], ["3 µs", "4 ms", "20 s"]);
    }
}
