// SPDX-License-Identifier: MIT OR Apache-2.0
//! The table, for terminals and for Markdown: the same cells.

use std::fmt::Write as _;

use super::Comparison;
use super::figures::{FIGURES, Spread, of_server, pairs};
use crate::disk::ReadLatency;

const COLUMNS: usize = 5;

/// For a terminal: aligned columns.
pub(crate) fn terminal(comparison: &Comparison) -> String {
    let rows = rows(comparison);
    let mut widths = [0; COLUMNS];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut text = heading(comparison) + "\n\n";
    for row in &rows {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text.push('\n');
    for note in notes(comparison) {
        text += &note;
        text.push('\n');
    }
    text
}

/// For a Markdown page.
pub(crate) fn markdown(comparison: &Comparison) -> String {
    let mut text = heading(comparison) + "\n\n";
    for (number, row) in rows(comparison).iter().enumerate() {
        let _ = writeln!(text, "| {} |", row.join(" | "));
        if number == 0 {
            text += "|---|---|---|---|---|\n";
        }
    }
    text.push('\n');
    for note in notes(comparison) {
        let _ = writeln!(text, "- {note}");
    }
    text
}

fn heading(comparison: &Comparison) -> String {
    let setting = &comparison.setting;
    let cache = if comparison.cold { "not cached" } else { "cached" };
    let rounds = of_server(&comparison.samples, comparison.servers[0]).count();
    format!(
        "{} MiB, image {cache}, {rounds} rounds; {} x {}, Linux {}; {}",
        setting.size_mib,
        setting.cpus,
        setting.cpu,
        setting.kernel,
        setting.versions.join(" and ")
    )
}

/// The heading's cells, then one row for each figure.
fn rows(comparison: &Comparison) -> Vec<[String; COLUMNS]> {
    let (samples, servers) = (&comparison.samples, comparison.servers);
    let [one, two] = servers;
    let headings = ["figure", "unit", one.heading(), two.heading(), "times better"];
    let figures = FIGURES.iter().map(|figure| {
        [
            figure.name.to_owned(),
            figure.unit.to_owned(),
            spread(figure.spread(of_server(samples, one))),
            spread(figure.spread(of_server(samples, two))),
            spread(figure.gain(pairs(samples, servers))),
        ]
    });
    std::iter::once(headings.map(str::to_owned)).chain(figures).collect()
}

/// `median (min .. max)`, or a dash.
pub(crate) fn spread(spread: Option<Spread>) -> String {
    let Some(Spread { min, median, max }) = spread else { return "-".to_owned() };
    format!("{} ({} .. {})", number(median), number(min), number(max))
}

/// Three significant digits; whole numbers from 100 on.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        size if size == 0.0 || size >= 99.95 => format!("{value:.0}"),
        size if size >= 9.995 => format!("{value:.1}"),
        size if size >= 0.9995 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
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
    let rate = FIGURES.iter().find(|figure| figure.name == "rate from restore's return");
    let limit = comparison.limits.disk.as_ref().map_or(two, |disk| disk.sequential_gb_per_s.min(two));
    for server in comparison.servers {
        if let Some(rate) = rate.and_then(|figure| figure.spread(of_server(&comparison.samples, server))) {
            notes.push(format!(
                "{server:?} reaches {:.0} % of the lower limit after restore's return.",
                100.0 * rate.median / limit
            ));
        }
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::super::figures::tests::sample;
    use super::super::{Limits, Setting};
    use super::*;
    use crate::disk::DiskLimits;
    use crate::lazy::Server;

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
        let mut samples = vec![sample(Server::Stock, 1, 8.0), sample(Server::Rewake, 1, 2.0)];
        samples[1].rate_from_return = Some(0.75);
        Comparison {
            setting,
            servers: [Server::Stock, Server::Rewake],
            cold,
            limits: Limits { fill_gb_per_s: [2.0, 3.0], disk: cold.then_some(disk) },
            samples,
        }
    }

    #[test]
    fn the_markdown_table_is_one_and_has_every_figure() {
        let text = markdown(&comparison(false));
        let table: Vec<&str> = text.lines().filter(|line| line.starts_with('|')).collect();
        assert_eq!(table.len(), FIGURES.len() + 2);
        assert!(table.iter().all(|line| line.matches('|').count() == COLUMNS + 1));
        let row = "| all memory resident after | s | 8.00 (8.00 .. 8.00) | 2.00 (2.00 .. 2.00) | 4.00 (4.00 .. 4.00) |";
        assert!(table.contains(&row), "{text}");
    }

    #[test]
    fn limits_are_shown_with_the_results_and_the_lower_one_counts() {
        assert!(terminal(&comparison(false)).contains("Rewake reaches 25 % of the lower limit"));
        let cold = terminal(&comparison(true));
        assert!(cold.contains("1.50 GB/s sequential"), "{cold}");
        assert!(cold.contains("Rewake reaches 50 % of the lower limit"), "{cold}");
        assert!(!cold.contains("Stock reaches"), "stock has no such rate here: {cold}");
    }

    #[test]
    fn numbers_have_three_significant_digits() {
        let shown = [0.01234, 0.5, 1.239, 12.34, 123.4, 123_456.0, 0.0].map(number);
        assert_eq!(shown, ["0.012", "0.500", "1.24", "12.3", "123", "123456", "0"]);
    }
}
