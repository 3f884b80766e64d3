// SPDX-License-Identifier: MIT OR Apache-2.0
//! Random moments, and how many of them a test tries.

use std::env;
use std::thread::sleep;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::pattern::Random;

/// The number in an environment variable, or `default`.
///
/// # Panics
/// The variable holds no number.
#[must_use]
pub fn count(variable: &str, default: usize) -> usize {
    env::var(variable)
        .map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{variable} is no number")))
}

/// The seed in `REWAKE_SEED`, or one of the clock's.
///
/// # Panics
/// The variable holds no number.
#[must_use]
pub fn seed() -> u64 {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is past 1970").subsec_nanos();
    env::var("REWAKE_SEED")
        .map_or_else(|_| now().into(), |text| text.parse().expect("REWAKE_SEED is a number"))
}

/// Sleeps until a random moment within `span`.
pub fn moment(span: Duration, random: &mut Random) {
    let micros = usize::try_from(span.as_micros()).unwrap_or(usize::MAX - 1);
    sleep(Duration::from_micros(random.below(micros + 1) as u64));
}
