// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cells of tables.

use std::time::Duration;

/// Least, median and most, in milliseconds.
pub(crate) fn spread(times: &mut [Duration]) -> String {
    times.sort_unstable();
    let at = |place: usize| times.get(place).map_or(0, Duration::as_millis);
    format!("{} {} {}", at(0), at(times.len() / 2), at(times.len().saturating_sub(1)))
}

/// The same of what may be less than nothing, and has a tenth.
pub(crate) fn tenths(mut values: Vec<f64>) -> String {
    values.sort_unstable_by(f64::total_cmp);
    let at = |place: usize| values.get(place).copied().unwrap_or(f64::NAN);
    format!("{:.1} {:.1} {:.1}", at(0), at(values.len() / 2), at(values.len().saturating_sub(1)))
}
