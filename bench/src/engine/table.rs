// SPDX-License-Identifier: MIT OR Apache-2.0
//! The figures of a run as a Markdown table, each with its required value. A figure that misses it is marked.

use super::pass::Pass;
use super::{Comparison, Way};
use crate::harness::{Taken, kernel, of, pairs};
use crate::report::Wanted::{AtLeast, AtMost, Nothing};
use crate::report::{MIB, Spread, Table, Wanted};

/// Required share of memcpy, and of fio.
const WANTED_SHARE: Wanted = AtLeast(0.9);
/// 16 MiB of staging memory, and as much again for everything else.
const WANTED_MIB: Wanted = AtMost(32.0);

enum Value {
    Rate(Way),
    /// The engine's rate, of this way's in the same round.
    OfRate(Way),
    Cpu(Way),
    Memory,
}
use Value::{Cpu, Memory, OfRate, Rate};

type Row = (&'static str, Value, Wanted);

const WARM: [Row; 9] = [
    ("in the page cache: memcpy, GB/s", Rate(Way::Memcpy), Nothing),
    ("pread, GB/s", Rate(Way::Pread), Nothing),
    ("engine, GB/s", Rate(Way::Engine), Nothing),
    ("engine, of memcpy", OfRate(Way::Memcpy), WANTED_SHARE),
    ("engine, of pread", OfRate(Way::Pread), Nothing),
    ("memcpy, CPU s/GB", Cpu(Way::Memcpy), Nothing),
    ("pread, CPU s/GB", Cpu(Way::Pread), Nothing),
    ("engine, CPU s/GB", Cpu(Way::Engine), Nothing),
    ("engine, memory, MiB", Memory, WANTED_MIB),
];
const COLD: [Row; 5] = [
    ("on the disk: fio, GB/s", Rate(Way::Fio), Nothing),
    ("engine, GB/s", Rate(Way::Engine), Nothing),
    ("engine, of fio", OfRate(Way::Fio), WANTED_SHARE),
    ("engine, CPU s/GB", Cpu(Way::Engine), Nothing),
    ("engine, memory, MiB", Memory, WANTED_MIB),
];

pub(super) fn text(comparison: &Comparison) -> String {
    let Comparison { mib, buffers, rounds, warm, cold } = comparison;
    let mut table = Table::new(&["figure", "", "wanted", "met"]);
    for (rows, samples) in [(&WARM[..], warm), (&COLD, cold)] {
        for (name, value, wanted) in rows {
            table.wanted(name, value.of(samples), *wanted);
        }
    }
    format!(
        "{mib} MiB in {buffers} buffers, {rounds} rounds, Linux {}; median (least .. most)\n\n{table}",
        kernel()
    )
}

impl Value {
    fn of(&self, samples: &[Taken<Way, Pass>]) -> Option<Spread> {
        match *self {
            Rate(way) => Spread::of(of(samples, way).map(|pass| pass.gb_per_s)),
            OfRate(way) => {
                let pairs = pairs(samples, [Way::Engine, way]);
                Spread::of(pairs.map(|(engine, other)| engine.gb_per_s / other.gb_per_s))
            }
            Cpu(way) => Spread::of(of(samples, way).map(|pass| pass.cpu_s_per_gb)),
            Memory => Spread::of(of(samples, Way::Engine).map(|pass| pass.memory as f64 / MIB)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_one_round_and_a_missed_figure_is_marked() {
        let taken = |way, round, gb_per_s| {
            let sample = Pass { gb_per_s, cpu_s_per_gb: 0.5, memory: 40 << 20 };
            Taken { way, round, sample }
        };
        let warm = [(Way::Memcpy, 10.0, 5.0), (Way::Pread, 1.0, 1.0), (Way::Engine, 8.0, 4.0)];
        let warm = warm.into_iter().flat_map(|(way, one, two)| [taken(way, 1, one), taken(way, 2, two)]);
        let cold = vec![taken(Way::Fio, 1, 2.0), taken(Way::Engine, 1, 1.9)];
        let text = text(&Comparison { mib: 64, buffers: 3, rounds: 2, warm: warm.collect(), cold });
        for line in [
            "| engine, of memcpy | 0.800 (0.800 .. 0.800) | at least 0.900 | **MISSED** |",
            "| engine, of fio | 0.950 (0.950 .. 0.950) | at least 0.900 | yes |",
            "| engine, memory, MiB | 40.0 (40.0 .. 40.0) | at most 32.0 | **MISSED** |",
        ] {
            assert!(text.contains(line), "{text}");
        }
    }
}
