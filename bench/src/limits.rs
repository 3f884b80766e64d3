// SPDX-License-Identifier: MIT OR Apache-2.0
//! The rates of the disk and of the copy engines alone, and of a serial loop of both: a buffer is copied,
//! then written, or read, then copied. The stock plugin does this, but through the page cache. All of it with
//! as many bytes as are dumped later. And the machine's promised rates.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use gpu_app::gpu::Gpus;
use gpu_app::kfd::Buffer;
use rewake_amdgpu_uapi::render::Render;
use rewake_sdma_copy::{
    Bo, CopyEngine, Shape, Slot, Staging, StagingMemory, StagingOffset, Ticket, Transfer,
};

use crate::report::number;

/// Bytes of a request to the disk or to an engine without other load.
const PIECE: u64 = 2 << 20;
/// Bytes of a buffer of the serial loop, which copies and writes it whole. A disk with a rate limit does a
/// tenth of a second's bytes ahead of time, and an engine's bandwidth is right on average only: smaller
/// buffers would not be serial.
const WHOLE: u64 = 32 << 20;
/// Copies in flight without other load.
const DEPTH: usize = 4;
/// Pause before each measurement: a disk with a rate limit gives a little at once after a rest, to plugins as
/// well.
const REST: Duration = Duration::from_millis(500);
const PATIENCE: Duration = Duration::from_secs(60);
/// How far plain loops may be from the machine's promised rates.
const TRUST: f64 = 0.05;

/// Both directions, in millions of bytes a second.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rates {
    pub(crate) dump: f64,
    pub(crate) restore: f64,
}

/// The measured rates.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) disk: Rates,
    /// The rates of copies, of all GPUs together.
    pub(crate) copies: Rates,
    pub(crate) serial: Rates,
}

/// Rates that the machine promises, in millions of bytes a second; None without a promise.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct MadeFor {
    pub(crate) disk: Option<f64>,
    /// The rate of copies, of all GPUs together.
    pub(crate) copies: Option<f64>,
}

impl MadeFor {
    /// From `cargo xtask vm`'s disk, and from softgpu.ko's parameters.
    pub(crate) fn of_this_machine(gpus: usize) -> Self {
        let parameter = |name: &str| {
            let text = std::fs::read_to_string(format!("/sys/module/softgpu/parameters/{name}")).ok()?;
            text.trim().parse::<f64>().ok().filter(|value| *value > 0.0)
        };
        let disk = std::env::var("DISK_MBPS").ok().and_then(|text| text.parse().ok());
        // Contexts reach two of a GPU's rings.
        let rings = parameter("sdma_rings").map(|rings| rings.min(2.0));
        let copies = parameter("copy_mbps").zip(rings).map(|(rate, rings)| rate * rings * gpus as f64);
        Self { disk, copies }
    }
}

impl Limits {
    /// A line each for a page. A rate that differs from the promised one is marked.
    pub(crate) fn text(&self, made_for: MadeFor) -> String {
        let plain = [
            ("disk, written", self.disk.dump, made_for.disk, self.least().dump),
            ("disk, read", self.disk.restore, made_for.disk, self.least().restore),
            ("copied out of GPUs", self.copies.dump, made_for.copies, self.least().dump),
            ("copied into GPUs", self.copies.restore, made_for.copies, self.least().restore),
        ];
        let mut text = String::new();
        for (name, rate, made_for, least) in plain {
            let made = made_for.map_or_else(String::new, |made| format!(", made for {}", number(made)));
            // A rate that is not the limit does not matter.
            let far = rate <= least && made_for.is_some_and(|made| (rate / made - 1.0).abs() > TRUST);
            let mark = if far { " **NOT WHAT IT WAS MADE FOR: do not trust this run**" } else { "" };
            let _ = writeln!(text, "- plain loop, {name}: {} MB/s{made}{mark}", number(rate));
        }
        text
    }

    /// The limit of every dump and restore: the slower of the two.
    pub(crate) fn least(&self) -> Rates {
        Rates {
            dump: self.disk.dump.min(self.copies.dump),
            restore: self.disk.restore.min(self.copies.restore),
        }
    }
}

/// A GPU with one buffer.
struct Gpu {
    engine: CopyEngine,
    bo: Bo,
    /// Copies in flight, in order.
    flying: VecDeque<Ticket>,
    /// The memory itself.
    _buffer: Buffer,
}

/// Files, staging memory and engines of the measurements.
struct Bench {
    gpus: Vec<Gpu>,
    _process: Arc<Gpus>,
    /// A slot for each GPU, of a whole buffer.
    staging: Staging,
    file: File,
    /// The bytes of each GPU.
    bytes: u64,
}

/// Measures with `mib` MiB in all and a file in `folder`, which is removed.
pub(crate) fn measure(gpus: usize, mib: u64, folder: &Path) -> anyhow::Result<Limits> {
    let path = folder.join("limits");
    let mut bench = Bench::new(gpus, mib, &path)?;
    let disk = Rates { dump: bench.rate(Bench::write)?, restore: bench.rate(Bench::read)? };
    // Memory of the software GPU is allocated at its first write.
    bench.copy_in()?;
    let copies = Rates { dump: bench.rate(Bench::copy_out)?, restore: bench.rate(Bench::copy_in)? };
    let serial = Rates { dump: bench.rate(Bench::serial_out)?, restore: bench.rate(Bench::serial_in)? };
    std::fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
    Ok(Limits { disk, copies, serial })
}

impl Bench {
    fn new(count: usize, mib: u64, path: &Path) -> anyhow::Result<Self> {
        let process = Gpus::open(count)?;
        let renders: Result<Vec<Render>, _> =
            (0..count).map(|gpu| Render::open(process.device(gpu).node().render_minor())).collect();
        let renders = renders?;
        let shape = Shape { slots: u32::try_from(count)?, slot_bytes: WHOLE };
        let staging = Staging::new(shape, &renders.iter().collect::<Vec<_>>())?;
        ensure!(
            staging.memory() == StagingMemory::Pages,
            "files cannot be read into the staging memory here"
        );
        let bytes = ((mib << 20) / count as u64).next_multiple_of(PIECE);
        let mut gpus = Vec::new();
        for (gpu, render) in renders.into_iter().enumerate() {
            let buffer = process.local(gpu, bytes)?;
            let mut engine = CopyEngine::open(render, &staging)?;
            let bo = engine.import(buffer.export()?.as_fd(), buffer.size())?;
            gpus.push(Gpu { engine, bo, flying: VecDeque::new(), _buffer: buffer });
        }
        let mut options = OpenOptions::new();
        // Bypasses the page cache.
        options.read(true).write(true).create(true).truncate(true).custom_flags(libc::O_DIRECT);
        let file = options.open(path).with_context(|| format!("create {}", path.display()))?;
        Ok(Self { gpus, _process: process, staging, file, bytes })
    }

    fn rate(&mut self, act: fn(&mut Self) -> anyhow::Result<()>) -> anyhow::Result<f64> {
        std::thread::sleep(REST);
        let start = Instant::now();
        act(self)?;
        Ok(self.all() as f64 / start.elapsed().as_secs_f64() / 1e6)
    }

    fn write(&mut self) -> anyhow::Result<()> {
        parts(self.all(), PIECE).try_for_each(|(at, bytes)| self.write_part(0, at, bytes))
    }

    fn read(&mut self) -> anyhow::Result<()> {
        parts(self.all(), PIECE).try_for_each(|(at, bytes)| self.read_part(0, at, bytes))
    }

    fn copy_out(&mut self) -> anyhow::Result<()> {
        self.copy_all(|bo, at, to, bytes| Transfer::Save { bo, at, to, bytes })
    }

    fn copy_in(&mut self) -> anyhow::Result<()> {
        self.copy_all(|bo, at, from, bytes| Transfer::Load { bo, at, from, bytes })
    }

    /// All GPUs at once, some copies in flight on each.
    fn copy_all(&mut self, transfer: fn(Bo, u64, StagingOffset, u64) -> Transfer) -> anyhow::Result<()> {
        let deadline = || Instant::now() + PATIENCE;
        for (turn, (at, bytes)) in parts(self.bytes, PIECE).enumerate() {
            for (gpu, slot) in self.gpus.iter_mut().zip(self.staging.slots()) {
                if gpu.flying.len() == DEPTH
                    && let Some(ticket) = gpu.flying.pop_front()
                {
                    gpu.engine.wait(ticket, deadline())?;
                }
                let place = StagingOffset { slot, at: (turn % DEPTH) as u64 * PIECE };
                gpu.flying.push_back(gpu.engine.submit(&[transfer(gpu.bo, at, place, bytes)])?);
            }
        }
        for gpu in &mut self.gpus {
            for ticket in std::mem::take(&mut gpu.flying) {
                gpu.engine.wait(ticket, deadline())?;
            }
        }
        Ok(())
    }

    fn serial_out(&mut self) -> anyhow::Result<()> {
        for gpu in 0..self.gpus.len() {
            for (at, bytes) in parts(self.bytes, WHOLE) {
                self.copy(gpu, |bo, to| Transfer::Save { bo, at, to, bytes })?;
                self.write_part(gpu, gpu as u64 * self.bytes + at, bytes)?;
            }
        }
        Ok(())
    }

    fn serial_in(&mut self) -> anyhow::Result<()> {
        for gpu in 0..self.gpus.len() {
            for (at, bytes) in parts(self.bytes, WHOLE) {
                self.read_part(gpu, gpu as u64 * self.bytes + at, bytes)?;
                self.copy(gpu, |bo, from| Transfer::Load { bo, at, from, bytes })?;
            }
        }
        Ok(())
    }

    /// One copy between a GPU's buffer and its slot, to its end.
    fn copy(&mut self, gpu: usize, transfer: impl Fn(Bo, StagingOffset) -> Transfer) -> anyhow::Result<()> {
        let place = StagingOffset { slot: self.slot(gpu), at: 0 };
        let Gpu { engine, bo, .. } = &mut self.gpus[gpu];
        let ticket = engine.submit(&[transfer(*bo, place)])?;
        Ok(engine.wait(ticket, Instant::now() + PATIENCE)?)
    }

    /// Bytes of all GPUs.
    fn all(&self) -> u64 {
        self.bytes * self.gpus.len() as u64
    }

    fn slot(&self, gpu: usize) -> Slot {
        self.staging.slots().nth(gpu).expect("one for each GPU")
    }

    fn write_part(&mut self, gpu: usize, at: u64, bytes: u64) -> anyhow::Result<()> {
        let slot = self.slot(gpu);
        self.file.write_all_at(memory(&mut self.staging, slot, bytes), at).context("write to the disk")
    }

    fn read_part(&mut self, gpu: usize, at: u64, bytes: u64) -> anyhow::Result<()> {
        let slot = self.slot(gpu);
        self.file.read_exact_at(memory(&mut self.staging, slot, bytes), at).context("read from the disk")
    }
}

/// Starts and lengths of the parts of `bytes` bytes.
fn parts(bytes: u64, each: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..bytes.div_ceil(each)).map(move |part| (part * each, each.min(bytes - part * each)))
}

/// The start of a slot that no engine uses.
fn memory(staging: &mut Staging, slot: Slot, bytes: u64) -> &mut [u8] {
    let bytes = usize::try_from(bytes).unwrap_or(0);
    let start = staging.pointer(StagingOffset { slot, at: 0 }, bytes);
    // SAFETY: the slot's memory, whose length was checked, stays mapped while the staging is borrowed here.
    // Copies have ended before this is called, so that nothing else writes or reads it.
    unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_as_long_as_the_whole() {
        assert_eq!(parts(10, 4).collect::<Vec<_>>(), [(0, 4), (4, 4), (8, 2)]);
        assert_eq!(parts(8, 8).collect::<Vec<_>>(), [(0, 8)]);
    }

    #[test]
    fn the_slower_of_disk_and_copies_is_the_limit_of_each_direction() {
        let disk = Rates { dump: 1.0, restore: 4.0 };
        let copies = Rates { dump: 2.0, restore: 3.0 };
        let least = Limits { disk, copies, serial: disk }.least();
        assert_eq!((least.dump, least.restore), (1.0, 3.0));
    }
}
