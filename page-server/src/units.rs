// SPDX-License-Identifier: MIT OR Apache-2.0
//! Numbers for people.

use std::time::Duration;

/// `512.0 KiB`, `1.5 GiB`.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
pub fn bytes(count: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", units[unit]) }
}

/// `850 ns`, `85 µs`, `1.2 ms`, `3.0 s`.
#[must_use]
pub fn latency(time: Duration) -> String {
    match time.as_nanos() {
        nanos @ 0..1000 => format!("{nanos} ns"),
        nanos @ 1000..1_000_000 => format!("{} µs", nanos / 1000),
        1_000_000..1_000_000_000 => format!("{:.1} ms", time.as_secs_f64() * 1e3),
        _ => format!("{:.1} s", time.as_secs_f64()),
    }
}

/// `0.42 s`, `12.3 s`, `5 min 12 s`, `3 h 05 min`.
#[must_use]
pub fn seconds(time: Duration) -> String {
    match time.as_secs() {
        0..10 => format!("{:.2} s", time.as_secs_f64()),
        10..120 => format!("{:.1} s", time.as_secs_f64()),
        all @ 120..7200 => format!("{} min {:02} s", all / 60, all % 60),
        all => format!("{} h {:02} min", all / 3600, all / 60 % 60),
    }
}

/// Bytes in nanoseconds as `2.31 GB/s`; a dash when there was no time.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "two decimals are shown")]
pub fn rate(bytes: u64, nanos: u64) -> String {
    if nanos == 0 { "-".to_owned() } else { format!("{:.2} GB/s", bytes as f64 / nanos as f64) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_have_units() {
        assert_eq!([0, 1023, 1024, 1536 << 20].map(bytes), ["0 B", "1023 B", "1.0 KiB", "1.5 GiB"]);
        let nanos = [999, 85_400, 1_250_000, 3_000_000_000].map(Duration::from_nanos);
        assert_eq!(nanos.map(latency), ["999 ns", "85 µs", "1.2 ms", "3.0 s"]);
        let times = [0.42, 12.34, 312.0, 11_100.0].map(Duration::from_secs_f64);
        assert_eq!(times.map(seconds), ["0.42 s", "12.3 s", "5 min 12 s", "3 h 05 min"]);
        assert_eq!(rate(2_310_000_000, 1_000_000_000), "2.31 GB/s");
        assert_eq!(rate(1, 0), "-");
    }
}
