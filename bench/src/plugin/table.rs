// SPDX-License-Identifier: MIT OR Apache-2.0
//! The figures of a run as a Markdown table, each with its required value. A figure that misses it is marked.

use std::fmt::Write as _;

use softgpu_tests::criu::Plugin;

use super::Comparison;
use super::round::{Act, Sample};
use crate::report::{Spread, number, spread};

/// Required share of the slower of disk and copies.
const WANTED_SHARE: f64 = 0.9;
/// Memory above that of a process with tiny weights.
const WANTED_MIB: f64 = 64.0;
/// Submissions for each small buffer.
const WANTED_SUBMISSIONS: f64 = 1.0 / 16.0;
const MIB: f64 = (1 << 20) as f64;

/// The required value of a figure.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Wanted {
    AtLeast(f64),
    AtMost(f64),
}

/// One figure.
#[derive(Debug)]
struct Row {
    name: String,
    stock: Option<Spread>,
    serial: Option<f64>,
    rewake: Option<Spread>,
    wanted: Option<Wanted>,
}

impl Row {
    fn cells(&self) -> [String; 6] {
        let wanted = match self.wanted {
            Some(Wanted::AtLeast(value)) => format!("at least {}", number(value)),
            Some(Wanted::AtMost(value)) => format!("at most {}", number(value)),
            None => String::new(),
        };
        let verdict =
            self.wanted.map_or("", |wanted| if wanted.is_met(self.rewake) { "yes" } else { "**MISSED**" });
        let serial = self.serial.map_or_else(|| "-".to_owned(), number);
        [self.name.clone(), spread(self.stock), serial, spread(self.rewake), wanted, verdict.to_owned()]
    }
}

impl Wanted {
    /// Compares the median. A figure without samples is not met.
    fn is_met(self, figure: Option<Spread>) -> bool {
        figure.is_some_and(|figure| match self {
            Self::AtLeast(value) => figure.median >= value,
            Self::AtMost(value) => figure.median <= value,
        })
    }
}

/// One direction of the samples and limits.
#[derive(Debug, Clone, Copy)]
struct Direction {
    name: &'static str,
    act: fn(&Sample) -> Act,
    /// Seconds of all of it.
    whole: fn(&Act) -> f64,
    whole_name: &'static str,
    serial: f64,
    /// The slower of disk and copies.
    least: f64,
}

/// For a terminal and for a page.
pub(super) fn text(comparison: &Comparison) -> String {
    let mut text = heading(comparison);
    text += "\n| figure | stock | serial loop | rewake | wanted | met |\n|---|---|---|---|---|---|\n";
    for row in rows(comparison) {
        let _ = writeln!(text, "| {} |", row.cells().join(" | "));
    }
    text
}

fn heading(comparison: &Comparison) -> String {
    let Comparison { mib, gpus, rounds, limits, made_for, .. } = comparison;
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let plain = limits.text(*made_for);
    format!("{mib} MiB on {gpus} GPUs, {rounds} rounds, Linux {}\n\n{plain}", kernel.trim())
}

fn rows(comparison: &Comparison) -> Vec<Row> {
    let (limits, least) = (&comparison.limits, comparison.limits.least());
    let dump = Direction {
        name: "dump",
        act: |sample| sample.dump,
        whole: |act| act.durable_s,
        whole_name: "all of CRIU, until all is on the disk, s",
        serial: limits.serial.dump,
        least: least.dump,
    };
    let restore = Direction {
        name: "restore",
        act: |sample| sample.restore,
        whole: |act| act.whole_s,
        whole_name: "all of CRIU, s",
        serial: limits.serial.restore,
        least: least.restore,
    };
    let mut rows = Vec::new();
    for direction in [dump, restore] {
        rows.extend(rates(comparison, direction));
    }
    for direction in [dump, restore] {
        rows.push(memory(comparison, direction));
    }
    if let Some(small) = &comparison.small {
        rows.extend([dump, restore].map(|direction| submissions(small, direction)));
    }
    rows
}

fn rates(comparison: &Comparison, direction: Direction) -> [Row; 3] {
    let Direction { name, act, serial, least, .. } = direction;
    let bytes = bytes(comparison, act);
    let of = |plugin, figure: &dyn Fn(Act) -> Option<f64>| figures(&comparison.samples, plugin, act, figure);
    let stock = of(Plugin::Stock, &|act| Some(bytes? / act.phase_s? / 1e6));
    let rewake = of(Plugin::Ours, &|act| Some(act.contents?.rate()));
    let share = |spread: Spread| spread.of_whole(least);
    let whole = |act: Act| Some((direction.whole)(&act));
    [
        Row { name: format!("{name}: GPU memory, MB/s"), stock, serial: Some(serial), rewake, wanted: None },
        Row {
            name: format!("{name}: of the slower of disk and copies"),
            stock: stock.map(share),
            serial: Some(serial / least),
            rewake: rewake.map(share),
            wanted: Some(Wanted::AtLeast(WANTED_SHARE)),
        },
        Row {
            name: format!("{name}: {}", direction.whole_name),
            stock: of(Plugin::Stock, &whole),
            serial: None,
            rewake: of(Plugin::Ours, &whole),
            wanted: None,
        },
    ]
}

/// Bytes that are not zero: the same for both plugins, and only one of them logs them.
fn bytes(comparison: &Comparison, act: fn(&Sample) -> Act) -> Option<f64> {
    let contents = comparison.samples.iter().find_map(|sample| act(sample).contents)?;
    Some((contents.bytes - contents.zero) as f64)
}

fn memory(comparison: &Comparison, direction: Direction) -> Row {
    let above = |plugin| {
        let tiny = comparison.tiny.iter().find(|sample| sample.plugin == plugin)?;
        let tiny = (direction.act)(tiny).peak as f64;
        figures(&comparison.samples, plugin, direction.act, &|act| Some((act.peak as f64 - tiny) / MIB))
    };
    Row {
        name: format!("{}: memory above that for tiny weights, MiB", direction.name),
        stock: above(Plugin::Stock),
        serial: None,
        rewake: above(Plugin::Ours),
        wanted: Some(Wanted::AtMost(WANTED_MIB)),
    }
}

fn submissions(small: &Sample, direction: Direction) -> Row {
    let contents = (direction.act)(small).contents;
    let each = contents.map(|contents| contents.submissions as f64 / contents.buffers as f64);
    Row {
        name: format!("{}: submissions for each small buffer", direction.name),
        stock: None,
        serial: None,
        rewake: each.and_then(|each| Spread::of(vec![each])),
        wanted: Some(Wanted::AtMost(WANTED_SUBMISSIONS)),
    }
}

fn figures(
    samples: &[Sample],
    plugin: Plugin,
    act: fn(&Sample) -> Act,
    figure: &dyn Fn(Act) -> Option<f64>,
) -> Option<Spread> {
    let of_plugin = samples.iter().filter(|sample| sample.plugin == plugin);
    Spread::of(of_plugin.filter_map(|sample| figure(act(sample))).collect())
}

#[cfg(test)]
mod tests {
    use super::super::log::Contents;
    use super::*;
    use crate::limits::{Limits, MadeFor, Rates};

    fn sample(plugin: Plugin, seconds: f64, peak_mib: u64) -> Sample {
        let contents = Contents { bytes: 100_000_000, zero: 0, submissions: 50, buffers: 1000, seconds };
        let ours = plugin == Plugin::Ours;
        let act = Act {
            whole_s: seconds,
            durable_s: seconds + 1.0,
            contents: ours.then_some(contents),
            phase_s: (!ours).then_some(seconds),
            peak: peak_mib << 20,
        };
        Sample { plugin, dump: act, restore: act }
    }

    fn comparison(seconds: f64, peak_mib: u64) -> Comparison {
        let rates = |rate| Rates { dump: rate, restore: rate };
        Comparison {
            mib: 96,
            gpus: 1,
            rounds: 1,
            made_for: MadeFor { disk: Some(100.0), copies: Some(200.0) },
            limits: Limits { disk: rates(100.0), copies: rates(198.0), serial: rates(66.0) },
            tiny: vec![sample(Plugin::Stock, 1.0, 10), sample(Plugin::Ours, 1.0, 10)],
            samples: vec![sample(Plugin::Stock, 1.6, 200), sample(Plugin::Ours, seconds, peak_mib)],
            small: Some(sample(Plugin::Ours, 1.0, 10)),
        }
    }

    #[test]
    fn figures_are_shown_with_their_required_values() {
        let text = text(&comparison(1.05, 60));
        let row = "| dump: of the slower of disk and copies | 0.625 (0.625 .. 0.625) | 0.660 | 0.952 (0.952 .. 0.952) \
                   | at least 0.900 | yes |";
        assert!(text.contains(row), "{text}");
        assert!(
            text.contains("| restore: memory above that for tiny weights, MiB | 190 (190 .. 190) | - | 50.0")
        );
        assert!(text.contains("submissions for each small buffer | - | - | 0.050"));
        assert!(!text.contains("MISSED") && !text.contains("trust"), "{text}");
    }

    #[test]
    fn a_missed_or_unmeasured_figure_is_marked() {
        let slow = text(&comparison(1.2, 60));
        assert_eq!(slow.matches("MISSED").count(), 2, "{slow}");
        let large = text(&comparison(1.0, 75));
        assert_eq!(large.matches("MISSED").count(), 2, "{large}");
        let mut without = comparison(1.0, 60);
        without.samples.pop();
        assert_eq!(text(&without).matches("MISSED").count(), 4);
    }

    #[test]
    fn a_machine_without_its_promised_rates_is_reported() {
        let mut busy = comparison(1.0, 60);
        busy.limits.disk.dump = 94.0;
        let text = super::text(&busy);
        assert_eq!(text.matches("do not trust this run").count(), 1, "{text}");
        let mut other = comparison(1.0, 60);
        other.limits.copies.dump = 150.0;
        assert!(!super::text(&other).contains("trust"), "copies do not decide");
    }
}
