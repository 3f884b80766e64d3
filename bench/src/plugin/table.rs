// SPDX-License-Identifier: MIT OR Apache-2.0
//! The figures of a run as a Markdown table, each with its required value. A figure that misses it is marked.

use softgpu_tests::criu::Plugin;

use super::Comparison;
use super::round::{Act, Sample};
use crate::harness::{kernel, of};
use crate::report::Wanted::{AtLeast, AtMost, Nothing};
use crate::report::{MIB, Spread, Table, Wanted, number, spread};

/// Required share of the slower of disk and copies.
const WANTED_SHARE: Wanted = AtLeast(0.9);
/// Memory above that of a process with tiny weights.
const WANTED_MIB: Wanted = AtMost(64.0);
/// Submissions for each small buffer.
const WANTED_SUBMISSIONS: Wanted = AtMost(1.0 / 16.0);

/// One figure: its name, of stock, of the serial loop, of rewake, and what is wanted of this.
type Row = (String, Option<Spread>, Option<f64>, Option<Spread>, Wanted);

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
    let Comparison { mib, gpus, rounds, limits, made_for, .. } = comparison;
    let mut table = Table::new(&["figure", "stock", "serial loop", "rewake", "wanted", "met"]);
    for (name, stock, serial, rewake, wanted) in rows(comparison) {
        let serial = serial.map_or_else(|| "-".to_owned(), number);
        let [wanted, met] = wanted.cells(rewake);
        table.row(&[name, spread(stock), serial, spread(rewake), wanted, met]);
    }
    let plain = limits.text(*made_for);
    format!("{mib} MiB on {gpus} GPUs, {rounds} rounds, Linux {}\n\n{plain}\n{table}", kernel())
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
    // Bytes that are not zero: the same for both plugins, and only one of them logs them.
    let contents = comparison.samples.iter().find_map(|taken| act(&taken.sample).contents);
    let bytes = contents.map(|contents| (contents.bytes - contents.zero) as f64);
    let figure = |plugin, value: &dyn Fn(Act) -> Option<f64>| {
        Spread::of(of(&comparison.samples, plugin).filter_map(|sample| value(act(sample))))
    };
    let stock = figure(Plugin::Stock, &|act| Some(bytes? / act.phase_s? / 1e6));
    let rewake = figure(Plugin::Ours, &|act| Some(act.contents?.rate()));
    let share = |spread: Spread| spread.of_whole(least);
    let [all_stock, all_rewake] =
        [Plugin::Stock, Plugin::Ours].map(|plugin| figure(plugin, &|act| Some((direction.whole)(&act))));
    [
        (format!("{name}: GPU memory, MB/s"), stock, Some(serial), rewake, Nothing),
        (
            format!("{name}: of the slower of disk and copies"),
            stock.map(share),
            Some(serial / least),
            rewake.map(share),
            WANTED_SHARE,
        ),
        (format!("{name}: {}", direction.whole_name), all_stock, None, all_rewake, Nothing),
    ]
}

fn memory(comparison: &Comparison, Direction { name, act, .. }: Direction) -> Row {
    let [stock, rewake] = [Plugin::Stock, Plugin::Ours].map(|plugin| {
        let tiny = act(of(&comparison.tiny, plugin).next()?).peak as f64;
        Spread::of(of(&comparison.samples, plugin).map(|sample| (act(sample).peak as f64 - tiny) / MIB))
    });
    (format!("{name}: memory above that for tiny weights, MiB"), stock, None, rewake, WANTED_MIB)
}

fn submissions(small: &Sample, Direction { name, act, .. }: Direction) -> Row {
    let contents = act(small).contents;
    let each = contents.map(|contents| contents.submissions as f64 / contents.buffers as f64);
    (format!("{name}: submissions for each small buffer"), None, None, Spread::of(each), WANTED_SUBMISSIONS)
}

#[cfg(test)]
mod tests {
    use super::super::log::Contents;
    use super::*;
    use crate::harness::Taken;
    use crate::limits::{Limits, MadeFor, Rates};

    fn sample(way: Plugin, seconds: f64, peak_mib: u64) -> Taken<Plugin, Sample> {
        let contents = Contents { bytes: 100_000_000, zero: 0, submissions: 50, buffers: 1000, seconds };
        let ours = way == Plugin::Ours;
        let act = Act {
            whole_s: seconds,
            durable_s: seconds + 1.0,
            contents: ours.then_some(contents),
            phase_s: (!ours).then_some(seconds),
            peak: peak_mib << 20,
        };
        Taken { way, round: 1, sample: Sample { dump: act, restore: act } }
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
            small: Some(sample(Plugin::Ours, 1.0, 10).sample),
        }
    }

    #[test]
    fn figures_are_shown_with_their_required_values() {
        let text = text(&comparison(1.05, 60));
        let row = "| dump: of the slower of disk and copies | 0.625 (0.625 .. 0.625) | 0.660 | 0.952 (0.952 \
                   .. 0.952) | at least 0.900 | yes |";
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
