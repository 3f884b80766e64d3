// SPDX-License-Identifier: MIT OR Apache-2.0
//! The figures of a run in Markdown, each with what is wanted beside it.

use rewake_image_io::BLOCK;

use super::clients::{CLIENTS, ServedClients};
use super::round::{Latency, Maker, Pairing, Sample};
use super::{BackgroundLoad, Link, ROUND_TRIP};
use crate::harness::{Taken, of, pairs};
use crate::link;
use crate::report::{Column, MIB, Spread, Table, number, spread};

/// What a process of rewake may have of anonymous and shared memory, in MiB.
const WANTED_MEMORY_MIB: f64 = 96.0;
/// Numbers of clients at once.
pub(super) const COUNTS: [usize; 2] = [1, CLIENTS];

type Value = fn(&Sample) -> Option<f64>;
type Samples = [Taken<Pairing, Sample>];

/// The columns of the table of demand loads, with the wanted share of stock's.
const COLUMNS: [(&str, Value, &str); 6] = [
    ("p50, µs", |sample| us(sample, |latency| latency.p50), "<= 0.5"),
    ("p99, µs", |sample| us(sample, |latency| latency.p99), "<= 0.5"),
    ("max, ms", |sample| ms(sample, |latency| latency.max), ""),
    ("GB/s", |sample| Some(sample.rate), ">= 2"),
    ("client CPU, s/GB", |sample| Some(sample.client_cpu), ""),
    ("server CPU, s/GB", |sample| Some(sample.server_cpu), ""),
];

fn us(sample: &Sample, of: fn(&Latency) -> f64) -> Option<f64> {
    sample.latency.as_ref().map(of)
}

fn ms(sample: &Sample, of: fn(&Latency) -> f64) -> Option<f64> {
    us(sample, of).map(|us| us / 1e3)
}

/// Latencies, rates and CPU time of each pairing.
pub(super) fn demand(pairings: &[Pairing], samples: &Samples) -> Table {
    let columns = COLUMNS.each_ref().map(|(head, value, _)| -> Column<'_, Sample> { (head, value) });
    let mut table = Table::of("server, client", &columns);
    for pairing in pairings {
        table.spreads(format!("{pairing:?}"), of(samples, *pairing), &columns);
    }
    // Of the same rounds.
    let share = |(_, value, _): (&str, Value, &str)| {
        let pairs = pairs(samples, [Pairing::REWAKE, Pairing::STOCK]);
        spread(Spread::of(pairs.filter_map(|(ours, stock)| Some(value(ours)? / value(stock)?))))
    };
    let shares = ["rewake, rewake: share of stock, stock".to_owned()];
    table.row(&[&shares[..], &COLUMNS.map(share)].concat());
    table.row(&[&["wanted".to_owned()][..], &COLUMNS.map(|(_, _, wanted)| wanted.to_owned())].concat());
    table
}

/// Latencies over a slow link, with what they may be.
pub(super) fn slow(slow: &Samples, local: &Samples) -> Table {
    let columns: [Column<'_, Sample>; 4] = [
        ("p50, ms", &|sample| ms(sample, |latency| latency.p50)),
        ("p99, ms", &|sample| ms(sample, |latency| latency.p99)),
        ("max, ms", &|sample| ms(sample, |latency| latency.max)),
        ("GB/s", &|sample| Some(sample.rate)),
    ];
    let mut table = Table::of("1 Gbit/s, 1 ms: server, client", &columns);
    for pairing in [Pairing::STOCK, Pairing::REWAKE] {
        table.spreads(format!("{pairing:?}"), of(slow, pairing), &columns);
    }
    let local = Spread::of(of(local, Pairing::REWAKE).filter_map(columns[1].1));
    let transfer = BLOCK as f64 / link::RATE as f64;
    let wanted = local.map(|local| (ROUND_TRIP.as_secs_f64() + transfer) * 1e3 + 3.0 * local.median);
    let wanted = wanted.map_or_else(|| "-".to_owned(), number);
    let name = "wanted: round trip + a block's transfer + 3 x p99 on loopback".to_owned();
    table.row(&[name, String::new(), format!("<= {wanted}"), String::new(), String::new()]);
    table
}

/// Rates of the background load alone.
pub(super) fn background(loads: &[Taken<Link, BackgroundLoad>]) -> Table {
    let columns: [Column<'_, BackgroundLoad>; 6] = [
        ("rewake", &|load| Some(load.sample.background_rate)),
        ("plain loop", &|load| Some(load.plain)),
        ("share, wanted >= 0.9", &|load| Some(load.sample.background_rate / load.plain)),
        ("loop that then fills memory", &|load| Some(load.plain_and_filled())),
        ("share", &|load| Some(load.sample.background_rate / load.plain_and_filled())),
        ("client CPU, s/GB", &|load| Some(load.sample.client_cpu)),
    ];
    let mut table = Table::of("background load, GB/s", &columns);
    for (link, name) in [(Link::Clear, "clear"), (Link::Tls, "TLS")] {
        table.spreads(name.to_owned(), of(loads, link), &columns);
    }
    table
}

/// What a server reads for several clients at once, and their rates.
pub(super) fn clients(rounds: &[Taken<usize, ServedClients>], bytes: u64) -> Table {
    let columns: [Column<'_, ServedClients>; 3] = [
        ("read from the disk, of the memory", &|served| Some(served.read as f64 / bytes as f64)),
        ("slowest client, GB/s", &|served| Some(served.rates.min)),
        ("fastest", &|served| Some(served.rates.max)),
    ];
    let mut table = Table::of("clients of one image", &columns);
    for count in COUNTS {
        table.spreads(count.to_string(), of(rounds, count), &columns);
    }
    let reads = pairs(rounds, COUNTS).map(|(one, all)| all.read as f64 / one.read as f64);
    let slowest = of(rounds, CLIENTS).map(|all| all.rates.min / all.rates.max);
    let [reads, slowest] = [Spread::of(reads), Spread::of(slowest)].map(spread);
    table.row(&[
        "share".to_owned(),
        format!("{reads}; wanted <= 1.1"),
        format!("{slowest} of the fastest; wanted >= 0.8"),
        String::new(),
    ]);
    table
}

/// Memory of rewake's largest processes.
pub(super) fn memory(samples: &[(Pairing, &Sample)], clients: &[Taken<usize, ServedClients>]) -> String {
    let mib = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), |bytes| number(bytes as f64 / MIB));
    let ours = |maker: fn(&Pairing) -> Maker| {
        samples.iter().filter(move |(pairing, _)| maker(pairing) == Maker::Rewake)
    };
    format!(
        "Anonymous and shared memory of rewake's largest process: client {} MiB; server of one client {} \
         MiB, of {CLIENTS} {} MiB; wanted <= {} MiB\n",
        mib(ours(|pairing| pairing.client).map(|(_, sample)| sample.client_memory).max()),
        mib(ours(|pairing| pairing.server).map(|(_, sample)| sample.server_memory).max()),
        mib(of(clients, CLIENTS).map(|all| all.memory).max()),
        number(WANTED_MEMORY_MIB)
    )
}
