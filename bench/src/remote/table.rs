// SPDX-License-Identifier: MIT OR Apache-2.0
//! The figures of a run as Markdown, each with what is wanted beside it.

use std::fmt::Write as _;

use super::round::{Maker, Pairing, Sample};
use crate::report::{Setting, Spread, number, spread};

/// What a process of rewake may have of anonymous and shared memory, in MiB.
const WANTED_MEMORY_MIB: f64 = 96.0;

type Value = fn(&Sample) -> Option<f64>;

/// The columns of the table of demand loads.
const COLUMNS: [(&str, Value); 6] = [
    ("p50, µs", |sample| sample.latency.map(|latency| latency.p50)),
    ("p99, µs", |sample| sample.latency.map(|latency| latency.p99)),
    ("max, ms", |sample| sample.latency.map(|latency| latency.max / 1e3)),
    ("GB/s", |sample| Some(sample.rate)),
    ("client CPU, s/GB", |sample| Some(sample.client_cpu)),
    ("server CPU, s/GB", |sample| Some(sample.server_cpu)),
];

/// The wanted share of stock's, and whether more is better.
const WANTED: [Option<&str>; 6] = [Some("<= 0.5"), Some("<= 0.5"), None, Some(">= 2"), None, None];

/// Where and how the samples are taken.
pub(super) fn heading(setting: &Setting, rounds: u64, pause_us: u64) -> String {
    format!(
        "{} MiB in the page cache, loopback, {rounds} rounds, {pause_us} µs between accesses; {} x {}, Linux {}; {}\n\
         Each cell: median (least .. most). Shares are of one round each.\n",
        setting.size_mib,
        setting.cpus,
        setting.cpu,
        setting.kernel,
        setting.versions.join(" and ")
    )
}

/// Latencies, rates and CPU time of each pairing.
pub(super) fn demand(samples: &[Sample]) -> String {
    let names = COLUMNS.map(|(name, _)| name).join(" | ");
    let mut text = format!("| server, client | {names} |\n|---|---|---|---|---|---|---|\n");
    for pairing in Pairing::ALL {
        let cells = COLUMNS.map(|(_, value)| spread(over(samples, pairing, value))).join(" | ");
        let _ = writeln!(text, "| {pairing} | {cells} |");
    }
    let shares = COLUMNS.map(|(_, value)| spread(share(samples, value))).join(" | ");
    let _ = writeln!(text, "| rewake, rewake: share of stock, stock | {shares} |");
    let wanted = WANTED.map(|wanted| wanted.unwrap_or_default()).join(" | ");
    let _ = writeln!(text, "| wanted | {wanted} |");
    text
}

/// Memory of rewake's largest processes.
pub(super) fn memory(samples: &[Sample]) -> String {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let largest = |of: fn(&Pairing) -> Maker, value: fn(&Sample) -> u64| {
        let ours = samples.iter().filter(|sample| of(&sample.pairing) == Maker::Rewake);
        ours.map(value).max().map_or_else(|| "-".to_owned(), |bytes| number(mib(bytes)))
    };
    format!(
        "Anonymous and shared memory of rewake's largest process: client {} MiB, server {} MiB; wanted <= {} MiB\n",
        largest(|pairing| pairing.client, |sample| sample.client_memory),
        largest(|pairing| pairing.server, |sample| sample.server_memory),
        number(WANTED_MEMORY_MIB)
    )
}

fn of(samples: &[Sample], pairing: Pairing) -> impl Iterator<Item = &Sample> {
    samples.iter().filter(move |sample| sample.pairing == pairing)
}

fn over(samples: &[Sample], pairing: Pairing, value: Value) -> Option<Spread> {
    Spread::of(of(samples, pairing).filter_map(value).collect())
}

/// The shares that rewake's figures are of stock's in the same rounds.
fn share(samples: &[Sample], value: Value) -> Option<Spread> {
    let shares = of(samples, Pairing::REWAKE).filter_map(|ours| {
        let stock = of(samples, Pairing::STOCK).find(|stock| stock.round == ours.round)?;
        Some(value(ours)? / value(stock)?)
    });
    Spread::of(shares.collect())
}
