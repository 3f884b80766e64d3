// SPDX-License-Identifier: MIT OR Apache-2.0
//! What logs report of BO contents. This project's plugin counts them in CRIU's log, and its streamer in its
//! own; the stock plugin logs times only.

/// Bytes that a plugin moved between files and BOs in one operation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Contents {
    pub(crate) bytes: u64,
    pub(crate) zero: u64,
    pub(crate) submissions: u64,
    pub(crate) buffers: u64,
    pub(crate) seconds: f64,
}

impl Contents {
    /// The line of this project's plugin, or of the streamer; their sum, if several processes were dumped.
    pub(crate) fn of_rewake(log: &str) -> Option<Self> {
        log.lines().filter_map(Self::of_line).reduce(|all, one| Self {
            bytes: all.bytes + one.bytes,
            zero: all.zero + one.zero,
            submissions: all.submissions + one.submissions,
            buffers: all.buffers + one.buffers,
            seconds: all.seconds + one.seconds,
        })
    }

    /// `... contents saved: 9 bytes, 0 of them zero, 1 submissions for 1 buffers, 0.100 s, 0.1 MiB/s`
    fn of_line(line: &str) -> Option<Self> {
        let (_, rest) = line.split_once(" contents ")?;
        let (_, numbers) = rest.split_once(": ")?;
        let whole: Vec<u64> = numbers.split(' ').filter_map(|word| word.parse().ok()).collect();
        let [bytes, zero, submissions, buffers] = whole[..] else { return None };
        let seconds = numbers.split(", ").find_map(|part| part.strip_suffix(" s")?.parse().ok())?;
        Some(Self { bytes, zero, submissions, buffers, seconds })
    }

    /// Millions of bytes a second that are not zero: these pass through disk and copies.
    pub(crate) fn rate(&self) -> f64 {
        (self.bytes - self.zero) as f64 / self.seconds / 1e6
    }
}

/// Seconds between the first line of a log that has `first` in it and the last one with `last`, by CRIU's own
/// clock.
pub(crate) fn between(log: &str, first: &str, last: &str) -> Option<f64> {
    let start = log.lines().find(|line| line.contains(first)).and_then(time)?;
    let end = log.lines().rfind(|line| line.contains(last)).and_then(time)?;
    (end > start).then_some(end - start)
}

/// `(00.012345)` at the start of a line, in seconds.
fn time(line: &str) -> Option<f64> {
    line.strip_prefix('(')?.split_once(')')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = "(00.5) amdgpu_plugin: contents saved: 4096 bytes, 96 of them zero, 3 submissions for \
                        5 buffers, 0.002 s, 1.9 MiB/s\n";

    #[test]
    fn the_plugins_line_is_read_wherever_it_is() {
        let contents = Contents::of_rewake(&format!("(00.1) noise: 5 bytes\n{LINE}(00.9) more\n")).unwrap();
        let expected = Contents { bytes: 4096, zero: 96, submissions: 3, buffers: 5, seconds: 0.002 };
        assert_eq!(contents, expected);
        assert!((contents.rate() - 2.0).abs() < 1e-9);
        assert_eq!(Contents::of_rewake("(00.1) noise\n"), None);
        let streamer = LINE.replace("(00.5) amdgpu_plugin:", " INFO");
        assert_eq!(Contents::of_rewake(&streamer), Some(expected));
    }

    #[test]
    fn processes_add_up() {
        let contents = Contents::of_rewake(&LINE.repeat(3)).unwrap();
        assert_eq!((contents.bytes, contents.submissions, contents.buffers), (12288, 9, 15));
        assert!((contents.rate() - 2.0).abs() < 1e-9);
    }

    #[test]
    fn times_are_between_the_first_and_the_last_line_that_match() {
        let log = "(00.100000) begin\n(00.200000) begin\n(01.100000) end\n(12.350000) end\nend\n";
        assert!((between(log, "begin", ") end").unwrap() - 12.25).abs() < 1e-9);
        assert_eq!(between(log, "end", "begin"), None);
        assert_eq!(between(log, "nothing", "end"), None);
    }
}
