// SPDX-License-Identifier: MIT OR Apache-2.0
//! Numbers for users.

use std::time::Duration;

/// `0 B`, `1023 B`, `512.0 KiB`, `1.5 GiB`: four digits at most, never rounded up to the next unit.
#[must_use]
pub fn bytes(count: u64) -> String {
    if count < 1024 {
        return format!("{count} B");
    }
    // In tenths, so that no float rounds 1023.96 up to 1024.0.
    let mut tenths = u128::from(count) * 10 / 1024;
    let mut units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"].iter();
    let mut unit = units.next();
    while tenths >= 10 * 1024
        && let Some(next) = units.next()
    {
        tenths /= 1024;
        unit = Some(next);
    }
    format!("{}.{} {}", tenths / 10, tenths % 10, unit.unwrap_or(&"EiB"))
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

/// Bytes in nanoseconds as `2.31 GB/s`, less than a tenth of one as `6.29 MB/s`; a dash when there was no
/// time.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "two decimals are shown")]
pub fn rate(bytes: u64, nanos: u64) -> String {
    match bytes as f64 / nanos as f64 {
        _ if nanos == 0 => "-".to_owned(),
        slow if slow < 0.1 => format!("{:.2} MB/s", slow * 1e3),
        fast => format!("{fast:.2} GB/s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_binary_units_and_are_never_rounded_up() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (4096, "4.0 KiB"),
            (1024 * 1024 - 1, "1023.9 KiB"),
            (1536 << 20, "1.5 GiB"),
            (u64::MAX, "15.9 EiB"),
        ];
        for (count, text) in cases {
            assert_eq!(bytes(count), text);
        }
    }

    #[test]
    fn numbers_are_short_and_have_units() {
        let nanos = [999, 85_400, 1_250_000, 3_000_000_000].map(Duration::from_nanos);
        assert_eq!(nanos.map(latency), ["999 ns", "85 µs", "1.2 ms", "3.0 s"]);
        let times = [0.42, 12.34, 312.0, 11_100.0].map(Duration::from_secs_f64);
        assert_eq!(times.map(seconds), ["0.42 s", "12.3 s", "5 min 12 s", "3 h 05 min"]);
        assert_eq!(rate(2_310_000_000, 1_000_000_000), "2.31 GB/s");
        assert_eq!((rate(99_000_000, 1_000_000_000), rate(1, 0)), ("99.00 MB/s".to_owned(), "-".to_owned()));
    }
}
