// SPDX-License-Identifier: MIT OR Apache-2.0
//! The figures of a run as Markdown: one table for each figure, one row for each program and state of its
//! image.

use std::fmt::Write as _;

use super::floor::Group;
use super::round::{ImageState, Sample, Way};
use super::{ProgramImage, Results, Taken, floor};
use crate::harness::{of, pairs};
use crate::report::{Better, Figure, Table};

/// The figures, in the order of the tables.
const FIGURES: [Figure<Sample>; 7] = [
    lower("first right answer after", "s", |sample| Some(sample.answered_s)),
    lower("criu restore returns after", "s", |sample| Some(sample.returned_s)),
    lower("all memory resident after", "s", |sample| Some(sample.resident_s)),
    lower("then an answer that reads all takes", "s", |sample| Some(sample.whole_answer_s)),
    lower("server CPU", "s/GB", |sample| sample.server_cpu_s_per_gb),
    lower("page faults until the first answer", "", |sample| Some(sample.faults as f64)),
    Figure {
        name: "requests answered in the first second",
        unit: "",
        better: Some(Better::Higher),
        value: |sample| sample.first_second_requests.map(|requests| requests as f64),
    },
];

const fn lower(name: &'static str, unit: &'static str, value: fn(&Sample) -> Option<f64>) -> Figure<Sample> {
    Figure { name, unit, better: Some(Better::Lower), value }
}

/// Markdown, for a terminal too.
pub(super) fn text(results: &Results) -> String {
    let Results { setting, rounds, .. } = results;
    let mut text = format!("{} MiB filled by each program, {rounds} rounds; {setting}\n", setting.size_mib);
    for ProgramImage { program, version, page_bytes } in &results.images {
        let _ = writeln!(text, "{program}: {version}, {} MiB of pages in the image", page_bytes >> 20);
    }
    text +=
        "Each cell: median (min .. max). The last two columns: how many times better rewake was, by round.\n";
    let groups = groups(results);
    for figure in &FIGURES {
        text += &table(figure, &groups);
    }
    text + &floor::table(&groups)
}

fn groups(results: &Results) -> Vec<Group> {
    let mut groups = Vec::new();
    for ProgramImage { program, .. } in &results.images {
        for state in ImageState::ALL {
            let here =
                |taken: &&Taken<Way, Sample>| taken.sample.program == *program && taken.sample.state == state;
            let samples = results.samples.iter().filter(here).copied().collect();
            groups.push((format!("{program}, {state}"), samples));
        }
    }
    groups
}

/// Rows without a value are left out, and so is a table without a row.
fn table(figure: &Figure<Sample>, groups: &[Group]) -> String {
    let heads = ["program, image", "eager", "stock", "rewake", "times better than stock", "than eager"];
    let (mut table, mut is_empty) = (Table::new(&heads), true);
    for (name, samples) in groups {
        if samples.iter().any(|taken| (figure.value)(&taken.sample).is_some()) {
            let [eager, stock, rewake] = Way::ALL.map(|way| figure.cell(of(samples, way)));
            let [than_stock, than_eager] =
                [Way::Stock, Way::Eager].map(|way| figure.gain(pairs(samples, [way, Way::Rewake])));
            table.row(&[name.clone(), eager, stock, rewake, than_stock, than_eager]);
            is_empty = false;
        }
    }
    let unit = if figure.unit.is_empty() { String::new() } else { format!(", {}", figure.unit) };
    if is_empty { String::new() } else { format!("\n### {}{unit}\n\n{table}", figure.name) }
}

#[cfg(test)]
mod tests {
    use super::super::round::ImageState::{Again, Cold, Warm};
    use super::*;
    use crate::harness::Setting;
    use crate::programs::Program;

    /// The floor is 0.25 s, when `criu restore` returns, and 0.5 s for the answer.
    pub(crate) fn sample(way: Way, state: ImageState, round: u64, answered_s: f64) -> Taken<Way, Sample> {
        let sample = Sample {
            program: Program::Node,
            state,
            answered_s,
            returned_s: 0.25,
            resident_s: 4.0,
            whole_answer_s: 1.0,
            first_repeated_s: 0.5,
            server_cpu_s_per_gb: (way != Way::Eager).then_some(0.5),
            faults: if way == Way::Eager { 0 } else { 100 },
            first_second_requests: None,
        };
        Taken { way, round, sample }
    }

    fn results(samples: Vec<Taken<Way, Sample>>) -> Results {
        let setting = Setting::new(&[], 64).unwrap();
        let version = "Node v20".to_owned();
        let images = vec![ProgramImage { program: Program::Node, version, page_bytes: 70 << 20 }];
        Results { setting, rounds: 2, images, samples }
    }

    #[test]
    fn rewake_is_compared_with_the_others_round_by_round() {
        let samples = vec![
            sample(Way::Eager, Warm, 1, 3.0),
            sample(Way::Stock, Warm, 1, 8.0),
            sample(Way::Rewake, Warm, 1, 4.0),
            sample(Way::Stock, Warm, 2, 6.0),
            sample(Way::Rewake, Warm, 2, 6.0),
            sample(Way::Stock, Cold, 1, 100.0),
            sample(Way::Rewake, Cold, 1, 10.0),
            sample(Way::Stock, Again, 1, 9.0),
            sample(Way::Rewake, Again, 1, 3.0),
        ];
        let text = text(&results(samples));
        let answers = text.split("### first right answer after, s\n").nth(1).expect("its table");
        let warm = "| node, warm | 3.00 (3.00 .. 3.00) | 7.00 (6.00 .. 8.00) | 5.00 (4.00 .. 6.00) | \
                    1.50 (1.00 .. 2.00) | 0.750 (0.750 .. 0.750) |";
        let cold = "| node, cold | - | 100 (100 .. 100) | 10.0 (10.0 .. 10.0) | 10.0 (10.0 .. 10.0) | - |";
        let again =
            "| node, again | - | 9.00 (9.00 .. 9.00) | 3.00 (3.00 .. 3.00) | 3.00 (3.00 .. 3.00) | - |";
        assert_eq!(answers.lines().skip(3).take(3).collect::<Vec<_>>(), [warm, cold, again]);
        assert!(text.contains("node: Node v20, 70 MiB of pages in the image\n"), "{text}");
    }

    #[test]
    fn a_missing_figure_is_a_dash() {
        let text = text(&results(vec![sample(Way::Eager, Warm, 1, 3.0), sample(Way::Rewake, Warm, 1, 4.0)]));
        let cpu = text.split("### server CPU, s/GB\n").nth(1).expect("its table");
        assert_eq!(cpu.lines().nth(3), Some("| node, warm | - | - | 0.500 (0.500 .. 0.500) | - | - |"));
    }

    #[test]
    fn a_state_that_was_not_measured_has_no_row_and_a_figure_of_redis_alone_no_other_one() {
        let mut results = results(vec![sample(Way::Stock, Cold, 1, 8.0), sample(Way::Rewake, Cold, 1, 4.0)]);
        let without = text(&results);
        assert!(!without.contains("node, warm") && without.contains("| node, cold |"), "{without}");
        assert!(!without.contains("first second") && !without.contains("floor"), "{without}");
        for (taken, requests) in results.samples.iter_mut().zip([5000, 8000]) {
            taken.sample.first_second_requests = Some(requests);
        }
        let with = text(&results);
        let requests = with.split("### requests answered in the first second\n").nth(1).expect("its table");
        let row = "| node, cold | - | 5000 (5000 .. 5000) | 8000 (8000 .. 8000) | 1.60 (1.60 .. 1.60) | - |";
        assert_eq!(requests.lines().nth(3), Some(row));
    }

    #[test]
    fn the_floor_is_the_last_table() {
        let samples = [Way::Eager, Way::Stock, Way::Rewake].map(|way| sample(way, Warm, 1, 2.0));
        let text = text(&results(samples.to_vec()));
        let floor = text.split("| gap closed |\n").nth(1).expect("its table");
        let rows: Vec<_> = floor.lines().skip(1).collect();
        assert_eq!(rows.len(), 1);
        assert!(rows[0].starts_with("| node, warm | 0.750 (0.750 .. 0.750) | 2.00 "), "{rows:?}");
    }

    #[test]
    fn the_gap_is_that_of_each_round_between_stock_and_the_floor() {
        let samples = [
            sample(Way::Eager, Warm, 1, 3.0),
            sample(Way::Stock, Warm, 1, 4.75),
            sample(Way::Rewake, Warm, 1, 1.75),
            sample(Way::Rewake, Warm, 2, 2.75),
            sample(Way::Stock, Warm, 2, 2.75),
            sample(Way::Eager, Warm, 2, 3.0),
        ];
        let expected = "0.750 (0.750 .. 0.750) | 3.75 (2.75 .. 4.75) | 2.25 (1.75 .. 2.75) | \
                        0.375 (0 .. 0.750)";
        let text = floor::table(&[("node".to_owned(), samples.to_vec())]);
        assert!(text.ends_with(&format!("\n| node | {expected} |\n")), "{text}");
    }

    #[test]
    fn a_round_that_lacks_a_way_has_no_floor_and_stock_at_the_floor_has_no_gap() {
        let mut group =
            ("node".to_owned(), vec![sample(Way::Stock, Warm, 1, 0.5), sample(Way::Rewake, Warm, 1, 0.5)]);
        assert_eq!(floor::table(std::slice::from_ref(&group)), "");
        group.1.push(sample(Way::Eager, Warm, 1, 3.0));
        assert!(floor::table(&[group]).ends_with(" | - |\n"));
    }
}
