// SPDX-License-Identifier: MIT OR Apache-2.0
//! The figures of the far end as a Markdown table.

use std::time::Duration;

use super::{Far, From, Round};
use crate::report::{Spread, number, spread};

/// Milliseconds that a demand may wait longer than the load of its buffer alone takes, by the median.
const WANTED_MS: f64 = 5.0;

pub(super) const HEAD: &str = "\
| the last buffer of | all in, s | alone it is loaded in, ms | demanded meanwhile, in | more | wanted | met |
|---|---|---|---|---|---|---|
";

pub(super) fn row(far: &Far) -> String {
    let Far { from, buffers, buffer_mib, all, rounds } = far;
    let from = match from {
        From::PageCache => "random, in the page cache",
        From::Disk => "random, on the disk",
        From::Holes => "holes",
    };
    let figure = |of: fn(&Round) -> f64| Spread::of(rounds.iter().map(of).collect());
    let more = figure(|of| ms(of.meanwhile) - ms(of.alone));
    let met = more.is_some_and(|more| more.median <= WANTED_MS);
    let cells = [
        format!("{buffers} x {buffer_mib} MiB, {from}"),
        number(all.as_secs_f64()),
        spread(figure(|of| ms(of.alone))),
        spread(figure(|of| ms(of.meanwhile))),
        spread(more),
        format!("at most {}", number(WANTED_MS)),
        if met { "yes" } else { "**MISSED**" }.to_owned(),
    ];
    format!("| {} |", cells.join(" | "))
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_extra_wait_is_of_one_round_and_a_missed_one_is_marked() {
        let round = |alone, meanwhile| Round {
            alone: Duration::from_millis(alone),
            meanwhile: Duration::from_millis(meanwhile),
        };
        let far =
            |from, rounds| Far { from, buffers: 128, buffer_mib: 64, all: Duration::from_secs(2), rounds };
        for (far, line) in [
            (
                far(From::PageCache, vec![round(10, 12), round(20, 19), round(10, 14)]),
                "| 128 x 64 MiB, random, in the page cache | 2.00 | 10.0 (10.0 .. 20.0) | 14.0 (12.0 .. 19.0) | \
                 2.00 (-1.00 .. 4.00) | at most 5.00 | yes |",
            ),
            (
                far(From::Disk, vec![round(50, 56)]),
                "| 128 x 64 MiB, random, on the disk | 2.00 | 50.0 (50.0 .. 50.0) | 56.0 (56.0 .. 56.0) | \
                 6.00 (6.00 .. 6.00) | at most 5.00 | **MISSED** |",
            ),
        ] {
            assert_eq!(row(&far), line);
        }
    }
}
