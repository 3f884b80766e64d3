// SPDX-License-Identifier: MIT OR Apache-2.0
//! Times that people write, as seconds since 1970.

/// A day and a time of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WrittenTime {
    /// The year, month (from 1), day (from 1), hour, minute and second.
    pub fields: [i32; 6],
    /// It is UTC; else it is in the time zone of this machine.
    pub is_utc: bool,
}

impl WrittenTime {
    /// Returns the seconds since 1970; `None` for a day or a time that no calendar has.
    #[must_use]
    pub fn seconds(self) -> Option<i64> {
        let [year, month, day, hour, minute, second] = self.fields;
        // SAFETY: a `tm` is integers and a pointer, which may be null.
        let mut time: libc::tm = unsafe { std::mem::zeroed() };
        time.tm_year = year.checked_sub(1900)?;
        time.tm_mon = month.checked_sub(1)?;
        (time.tm_mday, time.tm_hour, time.tm_min, time.tm_sec) = (day, hour, minute, second);
        // The zone's rules decide whether it is summer time.
        time.tm_isdst = -1;
        let written = [time.tm_year, time.tm_mon, day, hour, minute, second];
        // SAFETY: both calls read and write this `tm` only, and the time zone of the process.
        let seconds =
            unsafe { if self.is_utc { libc::timegm(&raw mut time) } else { libc::mktime(&raw mut time) } };
        // A day that does not exist becomes one of the next month. An hour that a clock skips may change.
        let normal = [time.tm_year, time.tm_mon, time.tm_mday, hour, time.tm_min, time.tm_sec];
        (written == normal && (0..24).contains(&hour)).then_some(seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_times_are_seconds_since_1970() {
        let utc = |fields| WrittenTime { fields, is_utc: true }.seconds();
        assert_eq!(utc([1970, 1, 1, 0, 0, 0]), Some(0));
        assert_eq!(utc([2026, 11, 29, 17, 0, 1]), Some(1_795_971_601));
        assert_eq!(utc([2024, 2, 29, 23, 59, 59]), Some(1_709_251_199));
        for wrong in
            [[2025, 2, 29, 0, 0, 0], [2025, 13, 1, 0, 0, 0], [2025, 1, 1, 24, 0, 0], [2025, 1, 1, 0, 60, 0]]
        {
            assert_eq!(utc(wrong), None, "{wrong:?}");
        }
        let local = WrittenTime { fields: [2026, 6, 1, 12, 0, 0], is_utc: false }.seconds().unwrap();
        assert!((local - utc([2026, 6, 1, 12, 0, 0]).unwrap()).abs() <= 14 * 3600, "no zone is further");
    }
}
