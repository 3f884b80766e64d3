// SPDX-License-Identifier: MIT OR Apache-2.0
//! How often a fetcher that has ended is started again.

use std::time::{Duration, Instant};

use anyhow::ensure;

/// How many fetchers may end within [`WINDOW`] before no other one is started: none helps if each fails at
/// once.
const MAX_FETCHERS: usize = 8;
/// The time in which the ends are counted: longer than all pauses together, so that a fetcher that fails at
/// once reaches [`MAX_FETCHERS`].
const WINDOW: Duration = Duration::from_secs(10);
/// How many fetchers in a row may end without a page that has arrived. Each waits 30 s for an answer: a
/// migration's link may be cut for 300 s, and this limit is longer.
const MAX_FRUITLESS: u32 = 16;
/// The pause before the second fetcher within [`WINDOW`]. The first is started at once, and each further
/// pause is twice as long, 3 s in all, so that a peer that restarts has time for that.
const FIRST_INTERVAL: Duration = Duration::from_millis(50);
const _: () = assert!(FIRST_INTERVAL.as_millis() * ((1 << (MAX_FETCHERS - 2)) - 1) < WINDOW.as_millis());

/// The ends of the fetchers of a session, or of an image in the node's cache.
#[derive(Debug, Default)]
pub struct FetcherRestarts {
    /// The ends within [`WINDOW`].
    ends: Vec<Instant>,
    /// What had arrived when the last one ended.
    arrived: u64,
    /// How many have ended in a row without more.
    fruitless: u32,
}

impl FetcherRestarts {
    /// Notes that a fetcher has ended after `arrived` pages had arrived. Returns the pause until another one
    /// is started.
    ///
    /// # Errors
    /// No other one would help.
    pub fn note_end(&mut self, arrived: u64) -> anyhow::Result<Duration> {
        self.note_end_at(Instant::now(), arrived)
    }

    fn note_end_at(&mut self, now: Instant, arrived: u64) -> anyhow::Result<Duration> {
        self.fruitless = if arrived == self.arrived { self.fruitless + 1 } else { 0 };
        self.arrived = arrived;
        ensure!(self.fruitless < MAX_FRUITLESS, "{MAX_FRUITLESS} connections in a row have brought no page");
        self.ends.retain(|end| now.saturating_duration_since(*end) < WINDOW);
        let earlier = self.ends.len();
        self.ends.push(now);
        ensure!(earlier + 1 < MAX_FETCHERS, "{MAX_FETCHERS} fetchers ended within {} s", WINDOW.as_secs());
        Ok(match earlier {
            0 => Duration::ZERO,
            _ => FIRST_INTERVAL * (1 << (earlier - 1)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn eight_fetchers_in_ten_seconds_are_too_many() {
        let (mut restarts, now) = (FetcherRestarts::default(), Instant::now());
        let pauses: Vec<u128> = (1..MAX_FETCHERS as u64)
            .map(|page| restarts.note_end_at(now, page).unwrap().as_millis())
            .collect();
        assert_eq!(pauses, [0, 50, 100, 200, 400, 800, 1600]);
        let error = restarts.note_end_at(now + WINDOW - SECOND, 8).unwrap_err();
        assert_eq!(error.to_string(), "8 fetchers ended within 10 s");
        let later = restarts.note_end_at(now + WINDOW, 9).unwrap();
        assert_eq!(later.as_millis(), 50, "one has ended in the last 10 s");
    }

    #[test]
    fn fetchers_that_bring_nothing_are_started_16_times() {
        let (mut restarts, now) = (FetcherRestarts::default(), Instant::now());
        let end = |restarts: &mut FetcherRestarts, number: u32, arrived| {
            restarts.note_end_at(now + WINDOW * number, arrived)
        };
        for number in 0..MAX_FRUITLESS {
            end(&mut restarts, number, 7).unwrap();
        }
        let error = end(&mut restarts, 20, 7).unwrap_err();
        assert_eq!(error.to_string(), "16 connections in a row have brought no page");
        assert_eq!(end(&mut restarts, 21, 8).unwrap(), Duration::ZERO, "a page has arrived");
        assert_eq!(end(&mut restarts, 22, 8).unwrap(), Duration::ZERO);
    }
}
