// SPDX-License-Identifier: MIT OR Apache-2.0
//! The figures of a run as Markdown, each with what is wanted beside it.

use std::fmt::Write as _;

use rewake_image_io::BLOCK;

use super::clients::{CLIENTS, ServedClients};
use super::round::{Maker, Pairing, Sample};
use super::{BackgroundLoad, ROUND_TRIP};
use crate::link;
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
    let mut pairings: Vec<Pairing> = Vec::new();
    samples.iter().filter(|sample| sample.round == 1).for_each(|sample| pairings.push(sample.pairing));
    for pairing in pairings {
        let cells = COLUMNS.map(|(_, value)| spread(over(samples, pairing, value))).join(" | ");
        let _ = writeln!(text, "| {pairing} | {cells} |");
    }
    let shares = COLUMNS.map(|(_, value)| spread(share(samples, value))).join(" | ");
    let _ = writeln!(text, "| rewake, rewake: share of stock, stock | {shares} |");
    let wanted = WANTED.map(|wanted| wanted.unwrap_or_default()).join(" | ");
    let _ = writeln!(text, "| wanted | {wanted} |");
    text
}

/// Latencies over a slow link, with what they may be.
pub(super) fn slow(slow: &[Sample], local: &[Sample]) -> String {
    let mut text =
        "| 1 Gbit/s, 1 ms: server, client | p50, ms | p99, ms | max, ms | GB/s |\n|---|---|---|---|---|\n"
            .to_owned();
    let columns: [Value; 4] = [
        |sample| sample.latency.map(|latency| latency.p50 / 1e3),
        |sample| sample.latency.map(|latency| latency.p99 / 1e3),
        |sample| sample.latency.map(|latency| latency.max / 1e3),
        |sample| Some(sample.rate),
    ];
    for pairing in [Pairing::STOCK, Pairing::REWAKE] {
        let cells = columns.map(|value| spread(over(slow, pairing, value))).join(" | ");
        let _ = writeln!(text, "| {pairing} | {cells} |");
    }
    let local = over(local, Pairing::REWAKE, |sample| sample.latency.map(|latency| latency.p99 / 1e3));
    let transfer = BLOCK as f64 / link::RATE as f64;
    let wanted = local.map(|local| (ROUND_TRIP.as_secs_f64() + transfer) * 1e3 + 3.0 * local.median);
    let wanted = wanted.map_or_else(|| "-".to_owned(), number);
    let _ = writeln!(
        text,
        "| wanted: round trip + a block's transfer + 3 x p99 on loopback |  | <= {wanted} |  |  |"
    );
    text
}

/// Rates of the background load alone.
pub(super) fn background(loads: &[BackgroundLoad]) -> String {
    let heading = "| background load, GB/s | rewake | plain loop | share, wanted >= 0.9 | loop that then fills memory \
                   | share | client CPU, s/GB |";
    let mut text = format!("{heading}\n|---|---|---|---|---|---|---|\n");
    for is_encrypted in [false, true] {
        let cell = |value: fn(&BackgroundLoad) -> f64| {
            let these = loads.iter().filter(|load| load.is_encrypted == is_encrypted);
            spread(Spread::of(these.map(value).collect()))
        };
        let cells = [
            cell(|load| load.sample.background_rate),
            cell(|load| load.plain),
            cell(|load| load.sample.background_rate / load.plain),
            cell(BackgroundLoad::plain_and_filled),
            cell(|load| load.sample.background_rate / load.plain_and_filled()),
            cell(|load| load.sample.client_cpu),
        ];
        let name = if is_encrypted { "TLS" } else { "clear" };
        let _ = writeln!(text, "| {name} | {} |", cells.join(" | "));
    }
    text
}

/// What a server reads for several clients at once, and their rates.
pub(super) fn clients(rounds: &[[ServedClients; 2]], bytes: u64) -> String {
    let cell =
        |value: &dyn Fn(&[ServedClients; 2]) -> f64| spread(Spread::of(rounds.iter().map(value).collect()));
    let mut text =
        "| clients of one image | read from the disk, of the memory | slowest client, GB/s | fastest |\n\
                    |---|---|---|---|\n"
            .to_owned();
    for (number, count) in [1, CLIENTS].into_iter().enumerate() {
        let cells = [
            cell(&|round| round[number].read as f64 / bytes as f64),
            cell(&|round| round[number].rates.min),
            cell(&|round| round[number].rates.max),
        ];
        let _ = writeln!(text, "| {count} | {} |", cells.join(" | "));
    }
    let reads = cell(&|[one, all]| all.read as f64 / one.read as f64);
    let slowest = cell(&|[_, all]| all.rates.min / all.rates.max);
    let _ = writeln!(text, "| share | {reads}; wanted <= 1.1 | {slowest} of the fastest; wanted >= 0.8 |  |");
    text
}

/// Memory of rewake's largest processes.
pub(super) fn memory(samples: &[&Sample], clients: &[[ServedClients; 2]]) -> String {
    let mib = |bytes: Option<u64>| {
        bytes.map_or_else(|| "-".to_owned(), |bytes| number(bytes as f64 / f64::from(1 << 20)))
    };
    let ours = |maker: fn(&Pairing) -> Maker| {
        samples.iter().filter(move |sample| maker(&sample.pairing) == Maker::Rewake)
    };
    format!(
        "Anonymous and shared memory of rewake's largest process: client {} MiB; server of one client {} MiB, of {CLIENTS} \
         {} MiB; wanted <= {} MiB\n",
        mib(ours(|pairing| pairing.client).map(|sample| sample.client_memory).max()),
        mib(ours(|pairing| pairing.server).map(|sample| sample.server_memory).max()),
        mib(clients.iter().map(|[_, all]| all.memory).max()),
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
