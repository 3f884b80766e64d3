// SPDX-License-Identifier: MIT OR Apache-2.0
//! The figures of a run as a Markdown table, each with its required value. A figure that misses it is marked.

use std::fmt::Write as _;

use super::pass::Pass;
use super::{Cold, Comparison, Warm};
use crate::report::{Spread, number, spread};

/// Required share of memcpy, and of fio.
const WANTED_SHARE: f64 = 0.9;
/// 16 MiB of staging memory, and as much again for everything else.
const WANTED_MIB: f64 = 32.0;
const MIB: f64 = (1 << 20) as f64;

/// One figure: its name, its values, and whether they meet the requirement.
struct Row(&'static str, Vec<f64>, Wanted);

/// The required value of a figure's median.
enum Wanted {
    AtLeast(f64),
    AtMost(f64),
    Nothing,
}

impl Row {
    fn cells(self) -> [String; 4] {
        let Self(name, values, wanted) = self;
        let figure = Spread::of(values);
        let median = figure.map_or(f64::NAN, |figure| figure.median);
        let verdict = |met| if met { "yes" } else { "**MISSED**" };
        let (wanted, met) = match wanted {
            Wanted::AtLeast(value) => (format!("at least {}", number(value)), verdict(median >= value)),
            Wanted::AtMost(value) => (format!("at most {}", number(value)), verdict(median <= value)),
            Wanted::Nothing => (String::new(), ""),
        };
        [name.to_owned(), spread(figure), wanted, met.to_owned()]
    }
}

pub(super) fn text(comparison: &Comparison) -> String {
    let Comparison { mib, buffers, warm, cold } = comparison;
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut text = format!(
        "{mib} MiB in {buffers} buffers, {} rounds, Linux {}; median (least .. most)\n\n",
        warm.len(),
        kernel.trim()
    );
    text += "| figure | | wanted | met |\n|---|---|---|---|\n";
    for row in warm_rows(warm).into_iter().chain(cold_rows(cold)) {
        let _ = writeln!(text, "| {} |", row.cells().join(" | "));
    }
    text
}

fn warm_rows(rounds: &[Warm]) -> [Row; 9] {
    let all = |figure: fn(&Warm) -> f64| rounds.iter().map(figure).collect::<Vec<_>>();
    let share = Wanted::AtLeast(WANTED_SHARE);
    [
        Row("in the page cache: memcpy, GB/s", all(|of| of.memcpy.gb_per_s), Wanted::Nothing),
        Row("pread, GB/s", all(|of| of.pread.gb_per_s), Wanted::Nothing),
        Row("engine, GB/s", all(|of| of.engine.gb_per_s), Wanted::Nothing),
        Row("engine, of memcpy", all(|of| of.engine.gb_per_s / of.memcpy.gb_per_s), share),
        Row("engine, of pread", all(|of| of.engine.gb_per_s / of.pread.gb_per_s), Wanted::Nothing),
        Row("memcpy, CPU s/GB", all(|of| of.memcpy.cpu_s_per_gb), Wanted::Nothing),
        Row("pread, CPU s/GB", all(|of| of.pread.cpu_s_per_gb), Wanted::Nothing),
        Row("engine, CPU s/GB", all(|of| of.engine.cpu_s_per_gb), Wanted::Nothing),
        Row("engine, memory, MiB", all(|of| mib(of.engine)), Wanted::AtMost(WANTED_MIB)),
    ]
}

fn cold_rows(rounds: &[Cold]) -> [Row; 5] {
    let all = |figure: fn(&Cold) -> f64| rounds.iter().map(figure).collect::<Vec<_>>();
    let share = Wanted::AtLeast(WANTED_SHARE);
    [
        Row("on the disk: fio, GB/s", all(|of| of.fio_gb_per_s), Wanted::Nothing),
        Row("engine, GB/s", all(|of| of.engine.gb_per_s), Wanted::Nothing),
        Row("engine, of fio", all(|of| of.engine.gb_per_s / of.fio_gb_per_s), share),
        Row("engine, CPU s/GB", all(|of| of.engine.cpu_s_per_gb), Wanted::Nothing),
        Row("engine, memory, MiB", all(|of| mib(of.engine)), Wanted::AtMost(WANTED_MIB)),
    ]
}

fn mib(pass: Pass) -> f64 {
    pass.memory as f64 / MIB
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_one_round_and_a_missed_figure_is_marked() {
        let pass = |gb_per_s| Pass { gb_per_s, cpu_s_per_gb: 0.5, memory: 40 << 20 };
        let warm = |memcpy, engine| Warm { memcpy: pass(memcpy), pread: pass(1.0), engine: pass(engine) };
        let cold = vec![Cold { fio_gb_per_s: 2.0, engine: pass(1.9) }];
        let text =
            text(&Comparison { mib: 64, buffers: 3, warm: vec![warm(10.0, 8.0), warm(5.0, 4.0)], cold });
        for line in [
            "| engine, of memcpy | 0.800 (0.800 .. 0.800) | at least 0.900 | **MISSED** |",
            "| engine, of fio | 0.950 (0.950 .. 0.950) | at least 0.900 | yes |",
            "| engine, memory, MiB | 40.0 (40.0 .. 40.0) | at most 32.0 | **MISSED** |",
        ] {
            assert!(text.contains(line), "{text}");
        }
    }
}
