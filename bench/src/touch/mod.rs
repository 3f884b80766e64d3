// SPDX-License-Identifier: MIT OR Apache-2.0
//! The process that is dumped and restored. It fills memory with a known pattern and waits. On SIGUSR1 it
//! accesses its pages in random order, on SIGUSR2 it stops. Then it verifies all of it and writes a
//! [`Report`].

mod memory;
mod pattern;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use serde::{Deserialize, Serialize};

use memory::{Memory, Samples, accessed_word};
use pattern::{Permutation, word};

/// Arguments of the hidden subcommand.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Size of the memory in MiB
    #[arg(long)]
    pub(crate) size_mib: u64,
    /// File to create when the memory is filled
    #[arg(long)]
    pub(crate) ready: PathBuf,
    /// File to write the report to
    #[arg(long)]
    pub(crate) report: PathBuf,
    /// Microseconds to sleep between two accesses
    #[arg(long, default_value_t = 0)]
    pub(crate) pause_us: u64,
}

/// The process's figures of its own restore. Latencies in nanoseconds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Pages accessed before the stop.
    pub(crate) touches: u64,
    /// Accesses that took a page fault.
    pub(crate) faults: u64,
    /// The number of these that the kernel counted as major faults.
    pub(crate) major_faults: u64,
    /// Latency of the accesses that faulted; none without a fault.
    pub(crate) latency: Option<Percentiles>,
    /// Accesses that read the wrong bytes.
    pub(crate) wrong_touches: u64,
    /// 64-bit words of the whole memory that were wrong at the end.
    pub(crate) wrong_words: u64,
}

/// Exact percentiles (nearest rank) and the sum, in the unit of the samples.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Percentiles {
    pub(crate) p50: u64,
    pub(crate) p90: u64,
    pub(crate) p99: u64,
    pub(crate) p999: u64,
    pub(crate) max: u64,
    pub(crate) sum: u64,
}

impl Percentiles {
    /// Sorts the samples; none for no samples.
    fn of(samples: &mut [u64]) -> Option<Self> {
        samples.sort_unstable();
        let max = *samples.last()?;
        let rank = |per_mille: usize| samples[(samples.len() * per_mille).div_ceil(1000).max(1) - 1];
        Some(Self {
            p50: rank(500),
            p90: rank(900),
            p99: rank(990),
            p999: rank(999),
            max,
            sum: samples.iter().sum(),
        })
    }
}

const WAIT: u8 = 0;
const TOUCH: u8 = 1;
const STOP: u8 = 2;
static PHASE: AtomicU8 = AtomicU8::new(WAIT);
/// A process without a stop signal ends by itself: an interrupted bench leaves nothing for longer than this.
const LIFETIME_SLEEPS: u32 = 900_000;
const SLEEP: Duration = Duration::from_millis(1);

extern "C" fn on_signal(signal: libc::c_int) {
    let phase = if signal == libc::SIGUSR1 { TOUCH } else { STOP };
    PHASE.fetch_max(phase, Ordering::Relaxed);
}

/// Runs the touched process until SIGUSR2 or the end of its lifetime.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    // CRIU dumps whole sessions, and no descriptor that a caller left open by mistake.
    nix::unistd::setsid().context("setsid of the touched process")?;
    // SAFETY: nothing in this process has opened a descriptor above 2 yet, so all of them are leaked ones.
    unsafe { libc::close_range(3, u32::MAX, 0) };
    let action = SigAction::new(SigHandler::Handler(on_signal), SaFlags::SA_RESTART, SigSet::empty());
    for signal in [Signal::SIGUSR1, Signal::SIGUSR2] {
        // SAFETY: the handler does one atomic operation.
        unsafe { sigaction(signal, &action) }.context("sigaction")?;
    }
    let memory = Memory::filled(options.size_mib << 8);
    let mut samples = Samples::with_capacity(memory.pages())?;
    std::fs::write(&options.ready, b"ready").with_context(|| options.ready.display().to_string())?;
    sleep_until(TOUCH)?;
    samples.make_present();
    let mut report = touch_all(&memory, &mut samples, Duration::from_micros(options.pause_us));
    sleep_until(STOP)?;
    report.latency = Percentiles::of(samples.recorded());
    report.wrong_words = memory.wrong_words();
    std::fs::write(&options.report, serde_json::to_vec(&report)?)
        .with_context(|| options.report.display().to_string())
}

fn sleep_until(phase: u8) -> anyhow::Result<()> {
    for _ in 0..LIFETIME_SLEEPS {
        if PHASE.load(Ordering::Relaxed) >= phase {
            return Ok(());
        }
        std::thread::sleep(SLEEP);
    }
    anyhow::bail!("no process sent the signal for phase {phase}: the bench has ended");
}

/// (major, minor) faults of this thread so far. A missing page of a userfaultfd range usually counts as
/// major, because the kernel retries the access. It counts as minor when the first attempt was under the
/// VMA's lock alone. A page that UFFDIO_COPY has filled is mapped and takes neither. So either count means
/// that this access waited.
fn faults_so_far() -> (i64, i64) {
    let usage = getrusage(UsageWho::RUSAGE_THREAD).expect("getrusage of a thread cannot fail");
    (usage.major_page_faults(), usage.minor_page_faults())
}

fn touch_all(memory: &Memory, samples: &mut Samples, pause: Duration) -> Report {
    let mut report =
        Report { touches: 0, faults: 0, major_faults: 0, latency: None, wrong_touches: 0, wrong_words: 0 };
    // Not measured: this first pass also faults in the loop's code and stack.
    std::hint::black_box((memory.touch(0), faults_so_far(), Instant::now().elapsed(), word(0)));
    let mut before = faults_so_far();
    for page in Permutation::new(memory.pages()) {
        if PHASE.load(Ordering::Relaxed) >= STOP {
            break;
        }
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
        let start = Instant::now();
        let value = memory.touch(page);
        let latency = start.elapsed();
        let after = faults_so_far();
        report.touches += 1;
        report.wrong_touches += u64::from(value != word(accessed_word(page)));
        if after != before {
            report.faults += 1;
            report.major_faults += u64::from(after.0 > before.0);
            samples.push(u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX));
        }
        before = after;
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples_at_the_nearest_rank() {
        let mut samples: Vec<u64> = (1..=1000).rev().collect();
        let expected = Percentiles { p50: 500, p90: 900, p99: 990, p999: 999, max: 1000, sum: 500_500 };
        assert_eq!(Percentiles::of(&mut samples), Some(expected));
        let one = Percentiles { p50: 7, p90: 7, p99: 7, p999: 7, max: 7, sum: 7 };
        assert_eq!(Percentiles::of(&mut [7]), Some(one));
        assert_eq!(Percentiles::of(&mut []), None);
    }
}
