// SPDX-License-Identifier: MIT OR Apache-2.0
//! Random numbers and moments that a seed repeats, and how many of them a test tries.

use std::env;
use std::fmt::Debug;
use std::str::FromStr;
use std::thread::sleep;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// SplitMix64 (Steele, Lea and Flood): each seed, also 0 and 1, gives an unrelated sequence.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator that gives the same numbers for the same seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `end`.
    ///
    /// # Panics
    /// `end` is not positive.
    pub fn below<T: TryInto<u64, Error: Debug> + TryFrom<u64, Error: Debug>>(&mut self, end: T) -> T {
        let end = end.try_into().expect("a positive end");
        T::try_from(self.number() % end).expect("less than the end")
    }

    /// An element of a list.
    ///
    /// # Panics
    /// The list is empty.
    pub fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }

    /// The numbers 0 to `count` - 1 in a random order.
    pub fn shuffled(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for last in (1..count).rev() {
            order.swap(last, self.below(last + 1));
        }
        order
    }
}

/// A bijective scrambler (the finaliser of SplitMix64).
#[must_use]
// Targets compute each word of their memory with it, in the development build, too.
#[inline(always)]
pub fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// The number in an environment variable, or `default`.
///
/// # Panics
/// The variable holds no number.
#[must_use]
pub fn count<T: FromStr>(variable: &str, default: T) -> T {
    let parse = |text: String| text.parse().unwrap_or_else(|_| panic!("{variable}={text} is no number"));
    env::var(variable).map_or(default, parse)
}

/// Rounds of a campaign of which a share must have the outcome that its moments are chosen for. The few
/// rounds of the suite show that no outcome is wrong; `cargo xtask stress` runs enough of them for a share.
const ENOUGH: usize = 8;

/// Whether at least one of `every` rounds had that outcome, if there were enough rounds for such a share.
#[must_use]
pub fn is_share(hits: usize, every: usize, rounds: usize) -> bool {
    rounds < ENOUGH || hits * every >= rounds
}

/// The seed in `REWAKE_SEED`, or one of the clock's.
///
/// # Panics
/// The variable holds no number.
#[must_use]
pub fn seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is past 1970");
    count("REWAKE_SEED", u64::from(now.subsec_nanos()))
}

/// Sleeps until a random moment within `span`.
pub fn moment(span: Duration, random: &mut Random) {
    let micros = u64::try_from(span.as_micros()).unwrap_or(u64::MAX - 1);
    sleep(Duration::from_micros(random.below(micros + 1)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_asked_of_a_campaign_and_not_of_a_few_rounds() {
        assert!(is_share(0, 2, 2) && is_share(4, 2, 8) && !is_share(3, 2, 8));
    }

    #[test]
    fn a_shuffle_visits_every_page_once() {
        let mut order = Random::new(3).shuffled(1000);
        assert_ne!(order[..10], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        order.sort_unstable();
        assert!(order.iter().enumerate().all(|(index, page)| index == *page));
    }
}
