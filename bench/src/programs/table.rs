// SPDX-License-Identifier: MIT OR Apache-2.0
//! The figures of a run as Markdown: one table for each figure, one row for each program and state of the page cache.

use std::fmt::Write as _;

use super::round::{Sample, Way};
use super::{ProgramImage, Results};
use crate::report::{Better, Figure, spread};

/// The figures, in the order of the tables.
const FIGURES: [Figure<Sample>; 6] = [
    lower("first right answer after", "s", |sample| Some(sample.figures.answered_s)),
    lower("criu restore returns after", "s", |sample| Some(sample.figures.returned_s)),
    lower("all memory resident after", "s", |sample| Some(sample.figures.resident_s)),
    lower("then an answer that reads all takes", "s", |sample| Some(sample.figures.whole_answer_s)),
    lower("server CPU", "s/GB", |sample| sample.figures.server_cpu_s_per_gb),
    lower("page faults until the first answer", "", |sample| Some(sample.figures.faults as f64)),
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
    for figure in &FIGURES {
        let unit = if figure.unit.is_empty() { String::new() } else { format!(", {}", figure.unit) };
        let _ = writeln!(text, "\n### {}{unit}\n", figure.name);
        text += "| program, image | eager | stock | rewake | times better than stock | than eager |\n";
        text += "|---|---|---|---|---|---|\n";
        for ProgramImage { program, .. } in &results.images {
            for cold in [false, true] {
                let here = |sample: &Sample| sample.program == *program && sample.cold == cold;
                let samples: Vec<Sample> = results.samples.iter().copied().filter(here).collect();
                let row = row(figure, &samples);
                let _ = writeln!(text, "| {program}, {} | {row} |", cache_state(cold));
            }
        }
    }
    text
}

/// The name of a cache state in tables and folders.
pub(super) fn cache_state(cold: bool) -> &'static str {
    if cold { "cold" } else { "warm" }
}

/// The cells of one program in one state of the cache.
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
mod tests {
    use super::super::program::Program;
    use super::super::round::Figures;
    use super::*;
    use crate::report::Setting;

    fn sample(way: Way, cold: bool, round: u64, answered_s: f64) -> Sample {
        let figures = Figures {
            answered_s,
            returned_s: 0.25,
            resident_s: 4.0,
            whole_answer_s: 0.5,
            server_cpu_s_per_gb: (way != Way::Eager).then_some(0.5),
            faults: if way == Way::Eager { 0 } else { 100 },
        };
        Sample { program: Program::Node, way, cold, round, figures }
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
            sample(Way::Eager, false, 1, 3.0),
            sample(Way::Stock, false, 1, 8.0),
            sample(Way::Rewake, false, 1, 4.0),
            sample(Way::Stock, false, 2, 6.0),
            sample(Way::Rewake, false, 2, 6.0),
            sample(Way::Stock, true, 1, 100.0),
            sample(Way::Rewake, true, 1, 10.0),
        ];
        let text = text(&results(samples));
        let answers = text.split("### first right answer after, s\n").nth(1).expect("its table");
        let warm = "| node, warm | 3.00 (3.00 .. 3.00) | 7.00 (6.00 .. 8.00) | 5.00 (4.00 .. 6.00) | \
                    1.50 (1.00 .. 2.00) | 0.750 (0.750 .. 0.750) |";
        let cold = "| node, cold | - | 100 (100 .. 100) | 10.0 (10.0 .. 10.0) | 10.0 (10.0 .. 10.0) | - |";
        assert_eq!(answers.lines().skip(3).take(2).collect::<Vec<_>>(), [warm, cold]);
        assert!(text.contains("node: Node v20, 70 MiB of pages in the image\n"), "{text}");
    }

    #[test]
    fn a_missing_figure_is_a_dash() {
        let text =
            text(&results(vec![sample(Way::Eager, false, 1, 3.0), sample(Way::Rewake, false, 1, 4.0)]));
        let cpu = text.split("### server CPU, s/GB\n").nth(1).expect("its table");
        assert_eq!(cpu.lines().nth(3), Some("| node, warm | - | - | 0.500 (0.500 .. 0.500) | - | - |"));
    }
}
