// SPDX-License-Identifier: MIT OR Apache-2.0
//! The figures of a run as Markdown: one table for each figure, one row for each program and state of its image.

use std::fmt::Write as _;

use super::round::{ImageState, Sample, Way};
use super::{ProgramImage, Results, floor};
use crate::report::{Better, Figure, spread};

/// The figures, in the order of the tables.
const FIGURES: [Figure<Sample>; 7] = [
    lower("first right answer after", "s", |sample| Some(sample.figures.answered_s)),
    lower("criu restore returns after", "s", |sample| Some(sample.figures.returned_s)),
    lower("all memory resident after", "s", |sample| Some(sample.figures.resident_s)),
    lower("then an answer that reads all takes", "s", |sample| Some(sample.figures.whole_answer_s)),
    lower("server CPU", "s/GB", |sample| sample.figures.server_cpu_s_per_gb),
    lower("page faults until the first answer", "", |sample| Some(sample.figures.faults as f64)),
    Figure {
        name: "requests answered in the first second",
        unit: "",
        better: Some(Better::Higher),
        value: |sample| sample.figures.first_second_requests.map(|requests| requests as f64),
    },
];

const fn lower(name: &'static str, unit: &'static str, value: fn(&Sample) -> Option<f64>) -> Figure<Sample> {
    Figure { name, unit, better: Some(Better::Lower), value }
}

/// Markdown, for a terminal too.
pub(super) fn text(results: &Results) -> String {
    let setting = &results.setting;
    let mut text = format!(
        "{} MiB filled by each program, {} rounds; {} x {}, Linux {}; {}\n",
        setting.size_mib,
        results.rounds,
        setting.cpus,
        setting.cpu,
        setting.kernel,
        setting.versions.join(" and ")
    );
    for ProgramImage { program, version, page_bytes } in &results.images {
        let _ = writeln!(text, "{program}: {version}, {} MiB of pages in the image", page_bytes >> 20);
    }
    text +=
        "Each cell: median (min .. max). The last two columns: how many times better rewake was, by round.\n";
    let groups = groups(results);
    for figure in &FIGURES {
        text += &table(figure, &groups);
    }
    let rows = groups.iter().filter_map(|(name, samples)| Some((name, floor::row(samples)?)));
    let rows: String = rows.map(|(name, row)| format!("| {name} | {row} |\n")).collect();
    if !rows.is_empty() {
        let _ = write!(text, "\n{}{rows}", floor::HEADING);
    }
    text
}

/// The name and the samples of each row: one program in one state of its image.
fn groups(results: &Results) -> Vec<(String, Vec<Sample>)> {
    let mut groups = Vec::new();
    for ProgramImage { program, .. } in &results.images {
        for state in ImageState::ALL {
            let here = |sample: &Sample| sample.program == *program && sample.state == state;
            let samples = results.samples.iter().copied().filter(here).collect();
            groups.push((format!("{program}, {state}"), samples));
        }
    }
    groups
}

/// Rows without a value are left out, and so is a table without a row.
fn table(figure: &Figure<Sample>, groups: &[(String, Vec<Sample>)]) -> String {
    let mut rows = String::new();
    for (name, samples) in groups {
        if samples.iter().any(|sample| (figure.value)(sample).is_some()) {
            let _ = writeln!(rows, "| {name} | {} |", row(figure, samples));
        }
    }
    if rows.is_empty() {
        return rows;
    }
    let unit = if figure.unit.is_empty() { String::new() } else { format!(", {}", figure.unit) };
    format!(
        "\n### {}{unit}\n\n\
         | program, image | eager | stock | rewake | times better than stock | than eager |\n\
         |---|---|---|---|---|---|\n{rows}",
        figure.name
    )
}

/// The cells of one program in one state of its image.
fn row(figure: &Figure<Sample>, samples: &[Sample]) -> String {
    let of = |way| spread(figure.spread(of_way(samples, way)));
    let than = |way| spread(figure.gain(pairs(samples, way)));
    [of(Way::Eager), of(Way::Stock), of(Way::Rewake), than(Way::Stock), than(Way::Eager)].join(" | ")
}

fn of_way(samples: &[Sample], way: Way) -> impl Iterator<Item = &Sample> {
    samples.iter().filter(move |sample| sample.way == way)
}

/// The sample of `way` and that of rewake, of every round.
fn pairs(samples: &[Sample], way: Way) -> impl Iterator<Item = (&Sample, &Sample)> {
    of_way(samples, way).filter_map(move |first| {
        let mut rewake = of_way(samples, Way::Rewake).filter(|other| other.round == first.round);
        Some((first, rewake.next()?))
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::program::Program;
    use super::super::round::Figures;
    use super::super::round::ImageState::{Again, Cold, Warm};
    use super::*;
    use crate::report::Setting;

    pub(crate) fn sample(way: Way, state: ImageState, round: u64, answered_s: f64) -> Sample {
        let figures = Figures {
            answered_s,
            returned_s: 0.25,
            resident_s: 4.0,
            whole_answer_s: 1.0,
            first_repeated_s: 0.5,
            server_cpu_s_per_gb: (way != Way::Eager).then_some(0.5),
            faults: if way == Way::Eager { 0 } else { 100 },
            first_second_requests: None,
        };
        Sample { program: Program::Node, way, state, round, figures }
    }

    fn results(samples: Vec<Sample>) -> Results {
        let setting =
            Setting::of_this_machine(vec!["Version: 4.2.1".to_owned(), "rewake 0.1".to_owned()], 64);
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
        for (sample, requests) in results.samples.iter_mut().zip([5000, 8000]) {
            sample.figures.first_second_requests = Some(requests);
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
}
