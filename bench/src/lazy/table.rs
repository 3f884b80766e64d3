// SPDX-License-Identifier: MIT OR Apache-2.0
//! The figures of a run in Markdown.

use super::{Comparison, Sample};
use crate::disk::ReadLatency;
use crate::harness::{of, pairs};
use crate::report::Better::{Higher, Lower};
use crate::report::{Better, Figure, MIB, Spread, Table, number};
use crate::touch::Percentiles;

type Value = fn(&Sample) -> Option<f64>;

const fn figure(
    name: &'static str,
    unit: &'static str,
    better: Option<Better>,
    value: Value,
) -> Figure<Sample> {
    Figure { name, unit, better, value }
}

/// The figures, in the order of the table.
const FIGURES: [Figure<Sample>; 14] = [
    figure("criu restore returns after", "s", Some(Lower), |s| Some(s.restore_s)),
    figure("all memory resident after", "s", Some(Lower), |s| Some(s.resident_s)),
    figure("rate from restore's start", "GB/s", Some(Higher), |s| Some(s.rate_from_start)),
    RATE,
    figure("fault p50", "µs", Some(Lower), |s| latency_us(s, |l| l.p50)),
    figure("fault p90", "µs", Some(Lower), |s| latency_us(s, |l| l.p90)),
    figure("fault p99", "µs", Some(Lower), |s| latency_us(s, |l| l.p99)),
    figure("fault p99.9", "µs", Some(Lower), |s| latency_us(s, |l| l.p999)),
    figure("fault max", "µs", Some(Lower), |s| latency_us(s, |l| l.max)),
    figure("time in faults, all together", "s", Some(Lower), |s| latency_us(s, |l| l.sum).map(|us| us / 1e6)),
    figure("faults", "", None, |s| Some(s.touched.faults as f64)),
    figure("daemon CPU", "s/GB", Some(Lower), |s| Some(s.cpu_s_per_gb)),
    figure("daemon peak RSS, largest process", "MiB", Some(Lower), |s| Some(s.memory.largest as f64 / MIB)),
    figure("daemon peak RSS, sum", "MiB", Some(Lower), |s| Some(s.memory.sum as f64 / MIB)),
];
const RATE: Figure<Sample> =
    figure("rate from restore's return", "GB/s", Some(Higher), |s| s.rate_from_return);

fn latency_us(sample: &Sample, of: fn(&Percentiles) -> u64) -> Option<f64> {
    sample.touched.latency.as_ref().map(|latency| of(latency) as f64 / 1e3)
}

/// For a terminal and for a page.
pub(super) fn text(comparison: &Comparison) -> String {
    let Comparison { setting, servers, cold, samples, .. } = comparison;
    let [one, two] = *servers;
    let cache = if *cold { "not cached" } else { "cached" };
    let rounds = of(samples, one).count();
    let mut table = Table::new(&["figure", "unit", one.heading(), two.heading(), "times better"]);
    for figure in &FIGURES {
        table.row(&[
            figure.name.to_owned(),
            figure.unit.to_owned(),
            figure.cell(of(samples, one)),
            figure.cell(of(samples, two)),
            figure.gain(pairs(samples, *servers)),
        ]);
    }
    let notes: String = notes(comparison).iter().map(|note| format!("- {note}\n")).collect();
    format!("{} MiB, image {cache}, {rounds} rounds; {setting}\n\n{table}\n{notes}", setting.size_mib)
}

fn notes(comparison: &Comparison) -> Vec<String> {
    let [one, two] = comparison.limits.fill_gb_per_s;
    let mut notes = vec![
        "Each cell: median (min .. max) of the rounds. Times better: of each round's pair.".to_owned(),
        format!(
            "Limit of memory: UFFDIO_COPY from a cached buffer, {} GB/s with one thread, {} with two.",
            number(one),
            number(two)
        ),
    ];
    if let Some(disk) = &comparison.limits.disk {
        let latency =
            |read: ReadLatency| format!("p50 {} µs, p99 {} µs", number(read.p50_us), number(read.p99_us));
        notes.push(format!(
            "Limit of the disk: {} GB/s sequential; 4 KiB at random {}, beside the sequential reader {}.",
            number(disk.sequential_gb_per_s),
            latency(disk.random_alone),
            latency(disk.random_beside)
        ));
    }
    let limit = comparison.limits.disk.as_ref().map_or(two, |disk| disk.sequential_gb_per_s.min(two));
    for server in comparison.servers {
        let rates = of(&comparison.samples, server).filter_map(RATE.value);
        notes.extend(Spread::of(rates).map(|rate| {
            let share = 100.0 * rate.median / limit;
            format!("{server:?} reaches {share:.0} % of the lower limit after restore's return.")
        }));
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::super::round::PeakMemory;
    use super::super::{Limits, Server};
    use super::*;
    use crate::disk::DiskLimits;
    use crate::harness::{Setting, Taken};
    use crate::touch::Report;

    fn sample(way: Server, resident_s: f64) -> Taken<Server, Sample> {
        let latency =
            Percentiles { p50: 10_000, p90: 20_000, p99: 30_000, p999: 40_000, max: 50_000, sum: 60_000 };
        let sample = Sample {
            restore_s: 0.1,
            resident_s,
            rate_from_start: 1.0 / resident_s,
            rate_from_return: (way == Server::Rewake).then_some(0.75),
            cpu_s_per_gb: 0.5,
            memory: PeakMemory { largest: 4 << 20, sum: 6 << 20, processes: 2 },
            touched: Report {
                touches: 10,
                faults: 5,
                major_faults: 5,
                latency: Some(latency),
                wrong_touches: 0,
                wrong_words: 0,
            },
        };
        Taken { way, round: 1, sample }
    }

    fn comparison(cold: bool) -> Comparison {
        let setting = Setting {
            versions: vec!["Version: 4.2".to_owned(), "rewake 0.1".to_owned()],
            kernel: "6.18".to_owned(),
            cpu: "CPU".to_owned(),
            cpus: 2,
            size_mib: 64,
        };
        let latency = ReadLatency { p50_us: 90.0, p99_us: 1200.0 };
        let disk = DiskLimits { sequential_gb_per_s: 1.5, random_alone: latency, random_beside: latency };
        Comparison {
            setting,
            servers: [Server::Stock, Server::Rewake],
            cold,
            limits: Limits { fill_gb_per_s: [2.0, 3.0], disk: cold.then_some(disk) },
            samples: vec![sample(Server::Stock, 8.0), sample(Server::Rewake, 2.0)],
        }
    }

    #[test]
    fn the_markdown_table_is_one_and_has_every_figure() {
        let text = text(&comparison(false));
        let table: Vec<&str> = text.lines().filter(|line| line.starts_with('|')).collect();
        assert_eq!(table.len(), FIGURES.len() + 2);
        assert!(table.iter().all(|line| line.matches('|').count() == 6));
        assert!(text.starts_with("64 MiB, image cached, 1 rounds; 2 x CPU, Linux 6.18; Version: 4.2 and "));
        let row = "| all memory resident after | s | 8.00 (8.00 .. 8.00) | 2.00 (2.00 .. 2.00) | 4.00 (4.00 \
            .. 4.00) |";
        assert!(table.contains(&row), "{text}");
    }

    #[test]
    fn a_figure_without_a_good_direction_or_without_samples_has_no_gain() {
        let text = text(&comparison(false));
        for row in [
            "| faults |  | 5.00 (5.00 .. 5.00) | 5.00 (5.00 .. 5.00) | - |",
            "| rate from restore's return | GB/s | - | 0.750 (0.750 .. 0.750) | - |",
        ] {
            assert!(text.contains(row), "{text}");
        }
    }

    #[test]
    fn latencies_are_shown_in_microseconds_and_memory_in_mib() {
        let text = text(&comparison(false));
        assert!(text.contains("| fault p99 | µs | 30.0 (30.0 .. 30.0) |"), "{text}");
        assert!(text.contains("| daemon peak RSS, sum | MiB | 6.00 (6.00 .. 6.00) |"), "{text}");
    }

    #[test]
    fn limits_are_shown_with_the_results_and_the_lower_one_counts() {
        assert!(text(&comparison(false)).contains("Rewake reaches 25 % of the lower limit"));
        let cold = text(&comparison(true));
        assert!(cold.contains("1.50 GB/s sequential"), "{cold}");
        assert!(cold.contains("Rewake reaches 50 % of the lower limit"), "{cold}");
        assert!(!cold.contains("Stock reaches"), "stock has no such rate here: {cold}");
    }
}
