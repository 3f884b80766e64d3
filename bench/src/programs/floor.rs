// SPDX-License-Identifier: MIT OR Apache-2.0
//! The floor of a first answer: the program runs as soon as stock restores it, and answers as if all of its
//! memory were resident. How near to it rewake comes.

use super::Taken;
use super::round::{Sample, Way};
use crate::report::{Column, Table};

const HEADING: &str = "
### first right answer and its floor, s

Floor: the time after which stock's `criu restore` returns, and then the time of the same answer when all
memory is resident, after an eager restore. Gap closed: the share of stock's time above the floor that rewake
saves.

";

/// The first answers of one round, in seconds.
#[derive(Debug, Clone, Copy)]
struct FirstAnswers {
    floor: f64,
    stock: f64,
    rewake: f64,
}

impl FirstAnswers {
    /// None where stock itself reached the floor.
    fn gap_closed(&self) -> Option<f64> {
        let gap = self.stock - self.floor;
        (gap > 0.0).then(|| (self.stock - self.rewake) / gap)
    }
}

/// The name and the samples of each row: one program in one state of its image.
pub(super) type Group = (String, Vec<Taken<Way, Sample>>);

/// A row of each program and state that a round was restored in every way; nothing without a row.
pub(super) fn table(groups: &[Group]) -> String {
    let columns: [Column<'_, FirstAnswers>; 4] = [
        ("floor", &|round| Some(round.floor)),
        ("stock", &|round| Some(round.stock)),
        ("rewake", &|round| Some(round.rewake)),
        ("gap closed", &|round| round.gap_closed()),
    ];
    let (mut table, mut is_empty) = (Table::of("program, image", &columns), true);
    for (name, samples) in groups {
        let stocks = samples.iter().filter(|taken| taken.way == Way::Stock);
        let round = |stock: &Taken<Way, Sample>| {
            let other = |way| samples.iter().find(|other| other.way == way && other.round == stock.round);
            let (eager, rewake) = (other(Way::Eager)?, other(Way::Rewake)?);
            Some(FirstAnswers {
                floor: stock.sample.returned_s + eager.sample.first_repeated_s,
                stock: stock.sample.answered_s,
                rewake: rewake.sample.answered_s,
            })
        };
        let rounds: Vec<FirstAnswers> = stocks.filter_map(round).collect();
        if !rounds.is_empty() {
            table.spreads(name.clone(), rounds.iter(), &columns);
            is_empty = false;
        }
    }
    if is_empty { String::new() } else { format!("{HEADING}{table}") }
}
