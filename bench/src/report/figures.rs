// SPDX-License-Identifier: MIT OR Apache-2.0
//! The compared figures: spread of each server's, ratio pair by pair.

use crate::lazy::{Sample, Server};

/// One compared figure of samples `S`.
#[derive(Debug)]
pub(crate) struct Figure<S> {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    /// Which direction is good; none where neither is.
    pub(crate) better: Option<Better>,
    pub(crate) value: fn(&S) -> Option<f64>,
}

/// Which of two values of a figure is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Better {
    Lower,
    Higher,
}
use Better::{Higher, Lower};

const MIB: f64 = (1 << 20) as f64;

fn latency_us(sample: &Sample, of: fn(&crate::touch::Percentiles) -> u64) -> Option<f64> {
    sample.touched.latency.as_ref().map(|latency| of(latency) as f64 / 1e3)
}

macro_rules! figure {
    ($name:literal, $unit:literal, $better:expr, $value:expr) => {
        Figure { name: $name, unit: $unit, better: $better, value: $value }
    };
}

/// The figures, in the order of the table.
pub(crate) const FIGURES: [Figure<Sample>; 14] = [
    figure!("criu restore returns after", "s", Some(Lower), |s| Some(s.restore_s)),
    figure!("all memory resident after", "s", Some(Lower), |s| Some(s.resident_s)),
    figure!("rate from restore's start", "GB/s", Some(Higher), |s| Some(s.rate_from_start)),
    figure!("rate from restore's return", "GB/s", Some(Higher), |s| s.rate_from_return),
    figure!("fault p50", "µs", Some(Lower), |s| latency_us(s, |l| l.p50)),
    figure!("fault p90", "µs", Some(Lower), |s| latency_us(s, |l| l.p90)),
    figure!("fault p99", "µs", Some(Lower), |s| latency_us(s, |l| l.p99)),
    figure!("fault p99.9", "µs", Some(Lower), |s| latency_us(s, |l| l.p999)),
    figure!("fault max", "µs", Some(Lower), |s| latency_us(s, |l| l.max)),
    figure!("time in faults, all together", "s", Some(Lower), |s| latency_us(s, |l| l.sum)
        .map(|us| us / 1e6)),
    figure!("faults", "", None, |s| Some(s.touched.faults as f64)),
    figure!("daemon CPU", "s/GB", Some(Lower), |s| Some(s.cpu_s_per_gb)),
    figure!("daemon peak RSS, largest process", "MiB", Some(Lower), |s| Some(s.memory.largest as f64 / MIB)),
    figure!("daemon peak RSS, sum", "MiB", Some(Lower), |s| Some(s.memory.sum as f64 / MIB)),
];

/// Smallest, middle and largest of some values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Spread {
    pub(crate) min: f64,
    pub(crate) median: f64,
    pub(crate) max: f64,
}

impl Spread {
    /// None for no values. The median of an even number is the mean of the middle two.
    pub(crate) fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_unstable_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let (low, high) = (values[(values.len() - 1) / 2], values[values.len() / 2]);
        Some(Self { min, median: f64::midpoint(low, high), max })
    }

    /// The values as shares of `whole`.
    pub(crate) fn of_whole(self, whole: f64) -> Self {
        Self { min: self.min / whole, median: self.median / whole, max: self.max / whole }
    }
}

impl<S> Figure<S> {
    /// Over all these samples.
    pub(crate) fn spread<'a>(&self, samples: impl Iterator<Item = &'a S>) -> Option<Spread>
    where
        S: 'a,
    {
        Spread::of(samples.filter_map(self.value).collect())
    }

    /// How many times better the second of each pair is than the first. Both ran in one round, so that a machine
    /// that slows down in time slows both.
    pub(crate) fn gain<'a>(&self, pairs: impl Iterator<Item = (&'a S, &'a S)>) -> Option<Spread>
    where
        S: 'a,
    {
        let better = self.better?;
        let ratio = |(first, second): (&S, &S)| {
            let (first, second) = ((self.value)(first)?, (self.value)(second)?);
            let ratio = if better == Lower { first / second } else { second / first };
            ratio.is_finite().then_some(ratio)
        };
        Spread::of(pairs.filter_map(ratio).collect())
    }
}

pub(crate) fn of_server(samples: &[Sample], server: Server) -> impl Iterator<Item = &Sample> {
    samples.iter().filter(move |sample| sample.server == server)
}

/// Both servers' samples of every round that both served.
pub(crate) fn pairs(samples: &[Sample], servers: [Server; 2]) -> impl Iterator<Item = (&Sample, &Sample)> {
    let [first, second] = servers;
    of_server(samples, first).filter_map(move |one| {
        let mut others = of_server(samples, second).filter(|other| other.round == one.round);
        Some((one, others.next()?))
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::processes::PeakMemory;
    use crate::touch::{Percentiles, Report};

    pub(crate) fn sample(server: Server, round: u64, resident_s: f64) -> Sample {
        let latency =
            Percentiles { p50: 10_000, p90: 20_000, p99: 30_000, p999: 40_000, max: 50_000, sum: 60_000 };
        Sample {
            server,
            round,
            restore_s: 0.1,
            resident_s,
            rate_from_start: 1.0 / resident_s,
            rate_from_return: None,
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
        }
    }

    const BOTH: [Server; 2] = [Server::Stock, Server::Rewake];

    fn named(name: &str) -> &'static Figure<Sample> {
        FIGURES.iter().find(|figure| figure.name == name).unwrap()
    }

    #[test]
    fn a_spread_has_the_middle_value() {
        let spread = |min, median, max| Some(Spread { min, median, max });
        assert_eq!(Spread::of(vec![3.0, 1.0, 2.0]), spread(1.0, 2.0, 3.0));
        assert_eq!(Spread::of(vec![4.0, 1.0, 2.0, 3.0]), spread(1.0, 2.5, 4.0));
        assert_eq!(Spread::of(vec![]), None);
    }

    #[test]
    fn a_gain_is_taken_pair_by_pair_and_above_one_is_better() {
        let samples = [
            sample(Server::Stock, 1, 8.0),
            sample(Server::Rewake, 1, 2.0),
            sample(Server::Stock, 2, 6.0),
            sample(Server::Rewake, 2, 3.0),
            sample(Server::Stock, 3, 100.0),
        ];
        let expected = Some(Spread { min: 2.0, median: 3.0, max: 4.0 });
        assert_eq!(named("all memory resident after").gain(pairs(&samples, BOTH)), expected);
        assert_eq!(named("rate from restore's start").gain(pairs(&samples, BOTH)), expected);
    }

    #[test]
    fn a_figure_without_a_good_direction_or_without_samples_has_no_gain() {
        let samples = [sample(Server::Stock, 1, 8.0), sample(Server::Rewake, 1, 2.0)];
        assert_eq!(named("faults").gain(pairs(&samples, BOTH)), None);
        assert_eq!(named("rate from restore's return").gain(pairs(&samples, BOTH)), None);
        assert_eq!(named("all memory resident after").gain(pairs(&samples[..1], BOTH)), None);
    }

    #[test]
    fn latencies_are_shown_in_microseconds_and_memory_in_mib() {
        let samples = [sample(Server::Stock, 1, 8.0)];
        assert_eq!(named("fault p99").spread(of_server(&samples, Server::Stock)).unwrap().median, 30.0);
        assert_eq!(
            named("daemon peak RSS, sum").spread(of_server(&samples, Server::Stock)).unwrap().median,
            6.0
        );
    }
}
