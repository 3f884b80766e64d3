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
pub(crate) fn tenths(values: Vec<f64>) -> String {
    rounded(values, 1)
}

/// The same of shares.
pub(crate) fn hundredths(values: Vec<f64>) -> String {
    rounded(values, 2)
}

fn rounded(mut values: Vec<f64>, digits: usize) -> String {
    values.sort_unstable_by(f64::total_cmp);
    let at = |place: usize| values.get(place).copied().unwrap_or(f64::NAN);
    let [least, median, most] = [0, values.len() / 2, values.len().saturating_sub(1)].map(at);
    format!("{least:.digits$} {median:.digits$} {most:.digits$}")
}
