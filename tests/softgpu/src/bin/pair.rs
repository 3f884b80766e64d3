// SPDX-License-Identifier: MIT OR Apache-2.0
//! A program with two GPUs that share nothing. On each a copy engine and a compute queue copy parts of a
//! large buffer to a small one, over and over. The program checks each copy, and counts rounds: `pair FOLDER`
//! writes both counts to `counts` there, or what was wrong. `pair FOLDER same`: both large buffers have the
//! same bytes. For a file `look` it checks each byte of them. For a file `end-0` or `end-1` it ends that
//! GPU's queues; for a file `close` it closes `/dev/kfd`, and for `execute` becomes another program.

use std::fs;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use gpu_app::kernel::{self, Kernel};
use gpu_app::kfd::aql::Aql;
use gpu_app::kfd::{Buffer, ComputeQueue, Device, QueueSpec, SdmaQueue, Spec, doorbells};
use rewake_amdgpu_uapi::Kfd;
use rewake_amdgpu_uapi::packet::Sdma;
use rewake_amdgpu_uapi::topology::{Node, Topology};
use softgpu_tests::accessor::{LOOK, pattern_of};
use softgpu_tests::pair::{BYTES, COPIED};

/// Patience for a submission to a queue with space.
const SOON: Duration = Duration::from_secs(60);

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let folder = PathBuf::from(arguments.next().context("usage: pair FOLDER [same]")?);
    let same = arguments.next().is_some();
    let topology = Topology::read()?;
    let kfd = Arc::new(Kfd::open()?);
    let mut sides = Vec::new();
    for (number, node) in topology.gpus().take(2).enumerate() {
        sides.push(Side::new(&kfd, node, number, if same { 0 } else { number })?);
    }
    ensure!(sides.len() == 2, "{} GPUs, and two are needed", sides.len());
    loop {
        let all = folder.join("look");
        let is_asked = all.exists();
        for side in &mut sides {
            let looked = side.look().and_then(|()| if is_asked { side.look_at_all() } else { Ok(()) });
            if let Err(error) = looked {
                tell(&folder, &format!("{error:#}"))?;
                return Err(error);
            }
        }
        tell(&folder, &format!("{} {}", sides[0].rounds, sides[1].rounds))?;
        if is_asked {
            fs::remove_file(all)?;
        }
        for (number, side) in sides.iter_mut().enumerate() {
            if fs::remove_file(folder.join(format!("end-{number}"))).is_ok() {
                side.queues = None;
            }
        }
        if fs::remove_file(folder.join("close")).is_ok() {
            close(kfd.as_fd());
        }
        if fs::remove_file(folder.join("execute")).is_ok() {
            return Err(Command::new("sleep").arg("1000").exec().into());
        }
        thread::sleep(LOOK);
    }
}

/// No driver call follows: a drop would end the queues first.
fn close(kfd: BorrowedFd<'_>) {
    // SAFETY: nothing uses the number any more; this program is killed in the end, and drops nothing.
    unsafe { libc::close(kfd.as_raw_fd()) };
}

/// Writes the file as a whole, or not at all.
fn tell(folder: &Path, text: &str) -> anyhow::Result<()> {
    let part = folder.join("counts.part");
    fs::write(&part, text)?;
    Ok(fs::rename(part, folder.join("counts"))?)
}

/// A GPU with its memory.
struct Side {
    queues: Option<(SdmaQueue, ComputeQueue)>,
    large: Buffer,
    small: Buffer,
    code: Buffer,
    arguments: Buffer,
    number: usize,
    expected: Vec<u8>,
    /// The offset that the current round copies from.
    at: usize,
    rounds: u64,
}

impl Side {
    fn new(kfd: &Arc<Kfd>, node: &Node, number: usize, of: usize) -> anyhow::Result<Self> {
        let device = Device::open(kfd, node)?;
        let bells = doorbells(&device)?;
        let place = if node.has_large_bar() { Spec::vram } else { Spec::gtt };
        let large = Buffer::mapped(&device, place(BYTES[of] as u64))?;
        let expected = pattern_of(of, BYTES[of]);
        large.cpu().write(0, &expected);
        let code = Buffer::mapped(&device, Spec::gtt(kernel::CODE).executable())?;
        code.cpu().write(0, &kernel::code());
        let copies = SdmaQueue::new(&device, &bells, QueueSpec::default())?;
        let computes = ComputeQueue::new(&device, &bells, QueueSpec::default())?;
        let mut side = Self {
            queues: Some((copies, computes)),
            large,
            small: Buffer::mapped(&device, Spec::gtt(2 * COPIED as u64))?,
            code,
            arguments: Buffer::mapped(&device, Spec::gtt(kernel::ARGUMENTS))?,
            number,
            expected,
            at: 0,
            rounds: 0,
        };
        side.begin()?;
        Ok(side)
    }

    /// Both queues copy the same bytes.
    fn begin(&mut self) -> anyhow::Result<()> {
        let Some((copies, computes)) = &mut self.queues else { return Ok(()) };
        self.small.cpu().write(0, &[0; 2 * COPIED]);
        let (from, to, bytes) = (self.large.address() + self.at as u64, self.small.address(), COPIED as u64);
        copies.submit(Sdma::new().copy(to, from, bytes).bytes(), SOON)?;
        let kernel = Kernel::Copy { to: to + bytes, from, bytes };
        self.arguments.cpu().write(0, &kernel.arguments());
        let packet = Aql::dispatch(self.code.address() + kernel.code_offset(), self.arguments.address(), 0);
        Ok(computes.submit(&[packet], SOON)?)
    }

    /// Checks all of the large buffer by the CPU.
    fn look_at_all(&self) -> anyhow::Result<()> {
        let mut found = vec![0; self.expected.len()];
        self.large.cpu().read(0, &mut found);
        ensure!(found == self.expected, "GPU {}: its CPU reads other bytes", self.number);
        Ok(())
    }

    /// Begins another round, elsewhere, when the last one has ended.
    fn look(&mut self) -> anyhow::Result<()> {
        let Some((copies, computes)) = &self.queues else { return Ok(()) };
        if copies.read_pointer() != copies.written() || computes.read_pointer() != computes.written() {
            return Ok(());
        }
        let mut found = vec![0; 2 * COPIED];
        self.small.cpu().read(0, &mut found);
        let right = &self.expected[self.at..self.at + COPIED];
        for (half, by) in found.chunks(COPIED).zip(["a copy engine", "a compute queue"]) {
            ensure!(half == right, "GPU {}: {by} has copied other bytes at {:#x}", self.number, self.at);
        }
        self.rounds += 1;
        // Near its end, which is loaded last.
        self.at = self.expected.len() - COPIED * if self.rounds.is_multiple_of(2) { 1 } else { 2 };
        self.begin()
    }
}
