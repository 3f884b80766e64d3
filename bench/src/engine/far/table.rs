// SPDX-License-Identifier: MIT OR Apache-2.0
//! The figures of the far end as a Markdown table.

use std::time::Duration;

use super::{Far, From, Way};
use crate::harness::{of, pairs};
use crate::report::{Spread, Table, Wanted, number, spread};

/// Milliseconds that a demand may wait longer than the load of its buffer alone takes, by the median.
const WANTED_MS: Wanted = Wanted::AtMost(5.0);

pub(super) fn text(all: &[Far]) -> String {
    let heads = ["the last buffer of", "all in, s", "alone it is loaded in, ms", "demanded meanwhile, in"];
    let mut table = Table::new(&[&heads[..], &["more", "wanted", "met"]].concat());
    all.iter().for_each(|far| table.row(&cells(far)));
    table.to_string()
}

fn cells(far: &Far) -> [String; 7] {
    let Far { from, buffers, buffer_mib, all, times } = far;
    let from = match from {
        From::PageCache => "random, in the page cache",
        From::Disk => "random, on the disk",
        From::Holes => "holes",
    };
    let [alone, meanwhile] =
        [Way::Alone, Way::Meanwhile].map(|way| spread(Spread::of(of(times, way).map(|took| ms(*took)))));
    let both = pairs(times, [Way::Alone, Way::Meanwhile]);
    let more = Spread::of(both.map(|(alone, meanwhile)| ms(*meanwhile) - ms(*alone)));
    let [wanted, met] = WANTED_MS.cells(more);
    let name = format!("{buffers} x {buffer_mib} MiB, {from}");
    [name, number(all.as_secs_f64()), alone, meanwhile, spread(more), wanted, met]
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::Taken;

    #[test]
    fn the_extra_wait_is_of_one_round_and_a_missed_one_is_marked() {
        let far = |from, rounds: &[(u64, u64)]| {
            let taken = |way, round, ms| Taken { way, round, sample: Duration::from_millis(ms) };
            let round = |(round, (alone, meanwhile)): (u64, &(u64, u64))| {
                [taken(Way::Alone, round, *alone), taken(Way::Meanwhile, round, *meanwhile)]
            };
            let times = (1..).zip(rounds).flat_map(round).collect();
            Far { from, buffers: 128, buffer_mib: 64, all: Duration::from_secs(2), times }
        };
        for (far, line) in [
            (
                far(From::PageCache, &[(10, 12), (20, 19), (10, 14)]),
                "| 128 x 64 MiB, random, in the page cache | 2.00 | 10.0 (10.0 .. 20.0) | 14.0 (12.0 .. \
                 19.0) | 2.00 (-1.00 .. 4.00) | at most 5.00 | yes |",
            ),
            (
                far(From::Disk, &[(50, 56)]),
                "| 128 x 64 MiB, random, on the disk | 2.00 | 50.0 (50.0 .. 50.0) | 56.0 (56.0 .. 56.0) | \
                 6.00 (6.00 .. 6.00) | at most 5.00 | **MISSED** |",
            ),
        ] {
            assert_eq!(text(&[far]).lines().nth(2), Some(line));
        }
    }
}
