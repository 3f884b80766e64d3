// SPDX-License-Identifier: MIT OR Apache-2.0
//! The figures of a run as two Markdown tables: times of the restore, and the rate of GPU memory.

use std::fmt::Write as _;
use std::time::Duration;

use super::Run;
use super::round::{Behind, Sample, Way};
use crate::report::{Spread, number, spread};

/// Required share of the slower of disk and copies, from the handoff to the last byte, where nothing else
/// uses the disk.
const WANTED_SHARE: f64 = 0.95;

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::AtOnce => "at once",
            Self::Gpu => "GPU memory in the background",
            Self::Both => "GPU and CPU memory in the background",
        }
    }
}

/// For a terminal and for a page.
pub(super) fn text(run: &Run) -> String {
    format!("{}\n{}\n{}", heading(run), times(&run.samples), rates(run))
}

fn heading(run: &Run) -> String {
    let Run { mib, own_mib, rounds, image: (pages, all), limits, made_for, .. } = run;
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mb = |bytes: u64| number(bytes as f64 / 1e6);
    format!(
        "{mib} MiB of weights and {own_mib} MiB of the program's own, {rounds} rounds, Linux {}; an image of {} MB, of CPUs {} \
         of them; medians (least .. most)\n\n{}",
        kernel.trim(),
        mb(*all),
        mb(*pages),
        limits.text(*made_for)
    )
}

fn times(samples: &[Sample]) -> String {
    let mut text = "| seconds since the start of `criu restore` | it runs | the first answer is right | all is resident | an answer takes then |\n\
                    |---|---|---|---|---|\n"
        .to_owned();
    for way in Way::ALL {
        let of = |time: fn(&Sample) -> Duration| {
            spread(figures(samples, way, |sample| Some(time(sample).as_secs_f64())))
        };
        let cells = [of(|sample| sample.alive), of(|sample| sample.answered), of(|sample| sample.resident)]
            .join(" | ");
        let _ = writeln!(text, "| {} | {cells} | {} |", way.name(), of(|sample| sample.answer));
    }
    text
}

fn rates(run: &Run) -> String {
    let least = run.limits.least().restore;
    let mut text = "| GPU memory | MB/s, by the log | of the slower of disk and copies | since the handoff, MB/s \
                    | of the slower | wanted | met | of that time before it runs, s | first process's queues resumed, s | last one's |\n|---|---|---|---|---|---|---|---|---|---|\n"
        .to_owned();
    for way in Way::ALL {
        let rates = figures(&run.samples, way, |sample| Some(sample.contents.rate()));
        let whole = figures(&run.samples, way, since_handover);
        let share = |figure: Option<Spread>| figure.map(|figure| figure.of_whole(least));
        let (wanted, met) = match (way, share(whole)) {
            (Way::Gpu, Some(share)) if share.median >= WANTED_SHARE => (number(WANTED_SHARE), "yes"),
            (Way::Gpu, _) => (number(WANTED_SHARE), "**MISSED**"),
            _ => (String::new(), ""),
        };
        let cells = [rates, share(rates), whole, share(whole)].map(spread).join(" | ");
        let of = |time: fn(&Behind) -> f64| {
            spread(figures(&run.samples, way, |sample| sample.behind.as_ref().map(time)))
        };
        let moments = [of(|behind| behind.runs), of(|behind| behind.gates[0]), of(|behind| behind.gates[1])];
        let _ = writeln!(text, "| {} | {cells} | {wanted} | {met} | {} |", way.name(), moments.join(" | "));
    }
    text
}

/// Millions of bytes a second, of what is not zero.
fn since_handover(sample: &Sample) -> Option<f64> {
    Some((sample.contents.bytes - sample.contents.zero) as f64 / sample.behind?.last / 1e6)
}

fn figures(samples: &[Sample], way: Way, figure: impl Fn(&Sample) -> Option<f64>) -> Option<Spread> {
    Spread::of(samples.iter().filter(|sample| sample.way == way).filter_map(figure).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{Limits, MadeFor, Rates};
    use crate::plugin::log::Contents;

    fn run(last: f64) -> Run {
        let rates = |rate| Rates { dump: rate, restore: rate };
        let sample = |way, behind: bool| Sample {
            way,
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
        let behind = "| GPU memory in the background | 0.500 (0.500 .. 0.500) | 5.00 (5.00 .. 5.00) | 4.00 (4.00 .. 4.00) \
                      | 0.750 (0.750 .. 0.750) |";
        assert!(text.contains(behind), "{text}");
        let rates = "| GPU memory in the background | 40.0 (40.0 .. 40.0) | 1.00 (1.00 .. 1.00) | 38.5 (38.5 .. 38.5) \
                     | 0.962 (0.962 .. 0.962) | 0.950 | yes | 0.125 (0.125 .. 0.125) | 1.50 (1.50 .. 1.50) | 2.75 (2.75 .. 2.75) |";
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
