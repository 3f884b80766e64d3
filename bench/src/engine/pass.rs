// SPDX-License-Identifier: MIT OR Apache-2.0
//! One pass over all bytes of an image: by the engine, by memcpy, by read.

use std::fs::File;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use memmap2::MmapOptions;
use nix::sys::resource::UsageWho;
use nix::unistd::Pid;
use rewake_bo_contents::{BackgroundLoad, LoadEvent};

use super::image::{Image, read};
use super::pace;
use crate::processes::{cpu_seconds_of, high_water_mark};

/// The cost of one pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Pass {
    pub(super) gb_per_s: f64,
    /// CPU time of all of the bench's threads, user and system.
    pub(super) cpu_s_per_gb: f64,
    /// Peak of resident memory, above the value before: bytes.
    pub(super) memory: u64,
}

/// The engine as in a background load without CPU memory, from its opening to its end. Every byte that it
/// loaded is compared.
pub(super) fn engine(image: &Image) -> anyhow::Result<Pass> {
    image.poison()?;
    let (processes, device) = image.to_load();
    let mut whole = 0;
    let pass = measured(image.bytes(), || {
        let loading = BackgroundLoad::into_memory(&processes, device, Some(pace()?))?;
        loading
            .run(|of| whole += usize::from(matches!(of, LoadEvent::Buffer { .. })))?
            .context("the image has nothing to load")
    })?;
    ensure!(whole == image.buffers(), "the engine reported {whole} of {} buffers", image.buffers());
    image.check()?;
    Ok(pass)
}

/// One memcpy for each buffer, out of a mapping of the file; both sides were mapped and resident before.
pub(super) fn memcpy(image: &Image) -> anyhow::Result<Pass> {
    let file = File::open(image.pages()).context("open the pages file")?;
    // SAFETY: the bench made this file, and nothing writes it or makes it shorter before its removal.
    let from = unsafe { MmapOptions::new().populate().map(&file) }.context("mmap")?;
    let mut views = image.views()?;
    let parts: Vec<usize> =
        views.iter().map(|(offset, _)| usize::try_from(*offset)).collect::<Result<_, _>>()?;
    measured(image.bytes(), || {
        for ((_, view), at) in views.iter_mut().zip(parts) {
            let length = view.len();
            view.copy_from_slice(&from[at..at + length]);
        }
        Ok(())
    })
}

/// One `pread` for each buffer, into memory that was mapped and resident before.
pub(super) fn pread(image: &Image) -> anyhow::Result<Pass> {
    let file = File::open(image.pages()).context("open the pages file")?;
    let mut views = image.views()?;
    measured(image.bytes(), || views.iter_mut().try_for_each(|(offset, view)| read(&file, *offset, view)))
}

fn measured<T>(bytes: u64, act: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<Pass> {
    // The high-water mark is now the resident memory.
    std::fs::write("/proc/self/clear_refs", "5").context("reset the high-water mark")?;
    let resident = || high_water_mark(Pid::this()).context("VmHWM");
    let cpu = || cpu_seconds_of(UsageWho::RUSAGE_SELF);
    let (before, cpu_before, start) = (resident()?, cpu()?, Instant::now());
    act()?;
    let gb = bytes as f64 / 1e9;
    Ok(Pass {
        gb_per_s: gb / start.elapsed().as_secs_f64(),
        cpu_s_per_gb: (cpu()? - cpu_before) / gb,
        memory: resident()?.saturating_sub(before),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::time::{ClockId, clock_gettime};
    use std::time::Duration;

    #[test]
    fn a_pass_has_a_rate_the_cpu_time_of_all_threads_and_the_memory_that_it_had_for_a_while() {
        let bytes = 256 << 20;
        let pass = measured(1_000_000_000, || {
            // The thread's own time: other tests use the process's meanwhile. Slightly more than the test
            // needs: the kernel rounds.
            let used = || Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap());
            let spin = |time: Duration| {
                let start = used();
                while used() - start < time {}
            };
            std::thread::scope(|scope| scope.spawn(|| spin(Duration::from_millis(210))).join()).unwrap();
            drop(vec![1_u8; bytes]);
            Ok(())
        })
        .unwrap();
        assert!(pass.gb_per_s > 0.1 && pass.gb_per_s < 5.1, "{pass:?}");
        assert!(pass.cpu_s_per_gb >= 0.2, "{pass:?}");
        // Other tests allocate and free some meanwhile.
        assert!(pass.memory >= bytes as u64 / 2, "{pass:?}");
    }
}
