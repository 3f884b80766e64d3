// SPDX-License-Identifier: MIT OR Apache-2.0
//! The figures of a run as two Markdown tables: times of the restore, and the rate of GPU memory.

use super::Run;
use super::round::{Sample, Way};
use crate::harness::{kernel, of};
use crate::report::{Column, Spread, Table, Wanted, cells, heads, number};

/// Required share of the slower of disk and copies, from the handoff to the last byte, where nothing else
/// uses the disk.
const WANTED_SHARE: Wanted = Wanted::AtLeast(0.95);

impl Way {
    fn name(self) -> String {
        let name = match self {
            Self::AtOnce => "at once",
            Self::Gpu => "GPU memory in the background",
            Self::Both => "GPU and CPU memory in the background",
        };
        name.to_owned()
    }
}

/// For a terminal and for a page.
pub(super) fn text(run: &Run) -> String {
    let Run { mib, own_mib, rounds, image: (pages, all), limits, made_for, .. } = run;
    let mb = |bytes: u64| number(bytes as f64 / 1e6);
    format!(
        "{mib} MiB of weights and {own_mib} MiB of the program's own, {rounds} rounds, Linux {}; an image of \
         {} MB, of CPUs {} of them; medians (least .. most)\n\n{}\n{}\n{}",
        kernel(),
        mb(*all),
        mb(*pages),
        limits.text(*made_for),
        times(run),
        rates(run)
    )
}

fn times(run: &Run) -> Table {
    let columns: [Column<'_, Sample>; 4] = [
        ("it runs", &|sample| Some(sample.alive.as_secs_f64())),
        ("the first answer is right", &|sample| Some(sample.answered.as_secs_f64())),
        ("all is resident", &|sample| Some(sample.resident.as_secs_f64())),
        ("an answer takes then", &|sample| Some(sample.answer.as_secs_f64())),
    ];
    let mut table = Table::of("seconds since the start of `criu restore`", &columns);
    for way in Way::ALL {
        table.spreads(way.name(), of(&run.samples, way), &columns);
    }
    table
}

fn rates(run: &Run) -> Table {
    let least = run.limits.least().restore;
    let rates: [Column<'_, Sample>; 4] = [
        ("MB/s, by the log", &|sample| Some(sample.contents.rate())),
        ("of the slower of disk and copies", &|sample| Some(sample.contents.rate() / least)),
        ("since the handoff, MB/s", &since_handover),
        ("of the slower", &|sample| Some(since_handover(sample)? / least)),
    ];
    let moments: [Column<'_, Sample>; 3] = [
        ("of that time before it runs, s", &|sample| Some(sample.behind?.runs)),
        ("first process's queues resumed, s", &|sample| Some(sample.behind?.gates[0])),
        ("last one's", &|sample| Some(sample.behind?.gates[1])),
    ];
    let heads = [vec!["GPU memory"], heads(&rates), vec!["wanted", "met"], heads(&moments)].concat();
    let mut table = Table::new(&heads);
    for way in Way::ALL {
        let samples = || of(&run.samples, way);
        let wanted = if way == Way::Gpu { WANTED_SHARE } else { Wanted::Nothing };
        let share = Spread::of(samples().filter_map(rates[3].1));
        let row = [cells(samples(), &rates), wanted.cells(share).to_vec(), cells(samples(), &moments)];
        table.row(&[vec![way.name()], row.concat()].concat());
    }
    table
}

/// Millions of bytes a second, of what is not zero.
fn since_handover(sample: &Sample) -> Option<f64> {
    Some((sample.contents.bytes - sample.contents.zero) as f64 / sample.behind?.last / 1e6)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::round::Behind;
    use super::*;
    use crate::harness::Taken;
    use crate::limits::{Limits, MadeFor, Rates};
    use crate::plugin::log::Contents;

    fn run(last: f64) -> Run {
        let rates = |rate| Rates { dump: rate, restore: rate };
        let sample = |way, behind: bool| Taken {
            way,
            round: 1,
            sample: Sample {
                alive: Duration::from_millis(if behind { 500 } else { 4000 }),
                answered: Duration::from_secs(5),
                resident: Duration::from_secs(4),
                answer: Duration::from_millis(750),
                contents: Contents {
                    bytes: 101_000_000,
                    zero: 1_000_000,
                    submissions: 1,
                    buffers: 1,
                    seconds: 2.5,
                },
                behind: behind.then_some(Behind { runs: 0.125, last, gates: [1.5, 2.75] }),
            },
        };
        Run {
            mib: 96,
            own_mib: 0,
            rounds: 1,
            image: (1_000_000, 102_000_000),
            made_for: MadeFor { disk: Some(40.0), copies: Some(50.0) },
            limits: Limits { disk: rates(40.0), copies: rates(50.0), serial: rates(20.0) },
            samples: vec![sample(Way::AtOnce, false), sample(Way::Gpu, true)],
        }
    }

    #[test]
    fn each_kind_of_restore_has_times_and_rates_of_its_own() {
        let text = text(&run(2.6));
        let behind = "| GPU memory in the background | 0.500 (0.500 .. 0.500) | 5.00 (5.00 .. 5.00) | 4.00 \
                      (4.00 .. 4.00) | 0.750 (0.750 .. 0.750) |";
        assert!(text.contains(behind), "{text}");
        let rates = "| GPU memory in the background | 40.0 (40.0 .. 40.0) | 1.00 (1.00 .. 1.00) | 38.5 (38.5 \
                     .. 38.5) | 0.962 (0.962 .. 0.962) | at least 0.950 | yes | 0.125 (0.125 .. 0.125) | \
                     1.50 (1.50 .. 1.50) | 2.75 (2.75 .. 2.75) |";
        assert!(text.contains(rates), "{text}");
        assert!(
            text.contains(
                "| at once | 40.0 (40.0 .. 40.0) | 1.00 (1.00 .. 1.00) | - | - |  |  | - | - | - |"
            ),
            "{text}"
        );
        assert!(
            text.contains("| GPU and CPU memory in the background | - | - | - | - |  |  | - | - | - |"),
            "{text}"
        );
    }

    #[test]
    fn a_missed_figure_is_marked() {
        assert_eq!(text(&run(2.7)).matches("MISSED").count(), 1);
    }
}
