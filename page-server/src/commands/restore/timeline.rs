// SPDX-License-Identifier: MIT OR Apache-2.0
//! What happened when, for people and programs.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::bar::{resident, total};
use crate::control::proto::{Ended, Session};
use rewake_streamer::units;

/// One restore. Times are milliseconds since CRIU was started.
#[derive(Debug, Default, Serialize, PartialEq)]
pub(super) struct Timeline {
    /// Number of the session in its daemon.
    pub(super) session: u64,
    /// True when the daemon was started for this restore.
    pub(super) own_daemon: bool,
    /// All memory is back, or was let go of by the processes.
    pub(super) ok: bool,
    /// Why not.
    pub(super) reason: Option<String>,
    /// CRIU's exit code; none when it was killed, or was not waited for.
    pub(super) criu_exit_code: Option<i32>,
    /// CRIU ended, with its status.
    pub(super) criu_ended_ms: Option<f64>,
    /// The restored processes ran.
    pub(super) alive_ms: Option<f64>,
    /// Lazy memory that was back at that time.
    pub(super) alive_resident_bytes: u64,
    /// The first fault was served.
    pub(super) first_fault_ms: Option<f64>,
    /// The last.
    pub(super) last_fault_ms: Option<f64>,
    /// All memory was back.
    pub(super) all_resident_ms: Option<f64>,
    /// From `alive_ms` to `all_resident_ms`, in 10^9 bytes a second.
    pub(super) gb_per_s: Option<f64>,
    /// Tasks restored, zombies included.
    pub(super) tasks: u32,
    /// Memory that lazy restore left out.
    pub(super) lazy_bytes: u64,
    /// Of it, brought back with bytes.
    pub(super) copied_bytes: u64,
    /// Of it, brought back as zero pages.
    pub(super) zero_bytes: u64,
    /// Faults served.
    pub(super) faults: u64,
    /// Median latency of a fault, in microseconds.
    pub(super) fault_p50_us: Option<f64>,
    /// 99 % of the faults were faster.
    pub(super) fault_p99_us: Option<f64>,
}

/// Maps a session's clock, which counts from its start in the daemon, to milliseconds since `started` here.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    offset_ms: f64,
}

impl Clock {
    /// From a report that has just come.
    pub(super) fn new(started: Instant, session: &Session) -> Self {
        Self { offset_ms: started.elapsed().as_secs_f64() * 1e3 - millis(session.elapsed_ns) }
    }

    /// A time of the session; none for 0, which means "not yet".
    pub(super) fn at(self, nanos: u64) -> Option<f64> {
        (nanos != 0).then(|| (millis(nanos) + self.offset_ms).max(0.0))
    }
}

#[expect(clippy::cast_precision_loss, reason = "far less than 2^53 ns is measured")]
fn millis(nanos: u64) -> f64 {
    nanos as f64 / 1e6
}

impl Timeline {
    /// Takes in how the session ended, at `all_resident_ms`.
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    pub(super) fn end(&mut self, ended: &Ended, clock: Clock) {
        let session = ended.summary.clone().unwrap_or_default();
        let page = rewake_uffd::PAGE_SIZE;
        let micros = |nanos: u64| (session.faults > 0).then(|| millis(nanos) * 1e3);
        self.ok = ended.ok;
        self.reason = (!ended.ok).then(|| ended.reason.clone());
        self.alive_ms = self.alive_ms.or_else(|| clock.at(session.running_ns));
        self.first_fault_ms = clock.at(session.first_fault_ns);
        self.last_fault_ms = clock.at(session.last_fault_ns);
        self.all_resident_ms = if ended.ok { clock.at(session.elapsed_ns) } else { None };
        self.tasks = session.tasks;
        self.lazy_bytes = total(&session);
        self.copied_bytes = session.pages_copied * page;
        self.zero_bytes = session.pages_zero * page;
        self.faults = session.faults;
        self.fault_p50_us = micros(session.fault_p50_ns);
        self.fault_p99_us = micros(session.fault_p99_ns);
        let streaming =
            self.all_resident_ms.zip(clock.at(session.running_ns)).map(|(end, start)| end - start);
        self.gb_per_s = streaming.filter(|&ms| ms > 0.0).map(|ms| resident(&session) as f64 / ms / 1e6);
    }

    /// For people.
    pub(super) fn text(&self) -> String {
        let mut text = String::from("     0.0 ms  restore started\n");
        let mut moments: Vec<(f64, String)> = Vec::new();
        let mut moment = |ms: Option<f64>, what: String| moments.extend(ms.map(|ms| (ms, what)));
        let back = (units::bytes(self.alive_resident_bytes), units::bytes(self.lazy_bytes));
        moment(self.alive_ms, format!("process is alive; {} of {} resident", back.0, back.1));
        moment(self.first_fault_ms, "first fault".to_owned());
        moment(self.last_fault_ms, "last fault".to_owned());
        let rate = self.gb_per_s.map(|rate| format!(", {rate:.2} GB/s")).unwrap_or_default();
        moment(self.all_resident_ms, format!("all memory resident{rate}"));
        moments.sort_by(|(one, _), (two, _)| one.total_cmp(two));
        for (ms, what) in moments {
            // Writing to a String cannot fail, here and below.
            let _ = writeln!(text, "{ms:8.1} ms  {what}");
        }
        let micros = |micros: Option<f64>| {
            micros.map_or_else(
                || "-".to_owned(),
                |micros| units::latency(Duration::from_secs_f64(micros / 1e6)),
            )
        };
        let _ = writeln!(
            text,
            "{} tasks, {} copied, {} zero; {} faults, p50 {}, p99 {}",
            self.tasks,
            units::bytes(self.copied_bytes),
            units::bytes(self.zero_bytes),
            self.faults,
            micros(self.fault_p50_us),
            micros(self.fault_p99_us),
        );
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::proto::State;

    fn ended() -> Ended {
        let summary = Session {
            state: State::Complete as i32,
            elapsed_ns: 1_100_000_000,
            running_ns: 100_000_000,
            tasks: 1,
            pages_total: 1 << 18,
            pages_copied: 1 << 18,
            faults: 10,
            fault_p50_ns: 20_000,
            fault_p99_ns: 80_000,
            first_fault_ns: 90_000_000,
            last_fault_ns: 500_000_000,
            ..Default::default()
        };
        Ended { ok: true, reason: String::new(), summary: Some(summary) }
    }

    #[test]
    fn moments_are_told_in_their_order_on_the_clock_of_the_command() {
        let mut timeline = Timeline { alive_resident_bytes: 4096, ..Default::default() };
        timeline.end(&ended(), Clock { offset_ms: -50.0 });
        let text = timeline.text();
        let wanted = [
            "     0.0 ms  restore started",
            "    40.0 ms  first fault",
            "    50.0 ms  process is alive; 4.0 KiB of 1.0 GiB resident",
            "   450.0 ms  last fault",
            "  1050.0 ms  all memory resident, 1.07 GB/s",
            "1 tasks, 1.0 GiB copied, 0 B zero; 10 faults, p50 20 µs, p99 80 µs",
        ];
        assert_eq!(text.lines().collect::<Vec<_>>(), wanted);
    }

    #[test]
    fn a_failed_session_has_a_reason_and_no_end_of_memory() {
        let mut timeline = Timeline::default();
        timeline.end(&Ended { ok: false, reason: "cut".to_owned(), ..ended() }, Clock { offset_ms: 0.0 });
        assert_eq!((timeline.reason.as_deref(), timeline.all_resident_ms), (Some("cut"), None));
        assert_eq!(timeline.gb_per_s, None);
    }
}
