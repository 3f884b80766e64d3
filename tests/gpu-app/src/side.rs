// SPDX-License-Identifier: MIT OR Apache-2.0
//! Other work during answers, in a thread of its own that checks each round.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use nix::errno::Errno;
use rewake_amdgpu_uapi::abi::memory::Access;

use crate::chain::{Lane, Step};
use crate::gpu::{Gpus, Memory};
use crate::kernel::{Kernel, axpy, hash, pairs, words};
use crate::shape::{Mode, Shape};
use crate::weights;

/// Dispatches at once: sums, and microseconds of a GPU's time after each of them.
#[derive(Debug)]
struct Batch {
    sums: u32,
    busy: u64,
}

/// Three seconds: more than CRIU needs from stopping a process to pausing its queues, in an emulated machine
/// too. A dump right after a round finds GPUs in the middle of the next one.
const LONG: Batch = Batch { sums: 60, busy: 50_000 };
const SHORT: Batch = Batch { sums: 16, busy: 0 };
/// Bytes of the memory that CPU and GPUs change alternately.
const TURNS: u64 = 64 * 1024;
/// Bytes that the CPU compares in one round.
const COMPARED: usize = 16 * 1024;
/// Pause between attempts of blocked calls.
const AGAIN: Duration = Duration::from_millis(1);
/// Pages of the largest buffer that is allocated and freed.
const PAGES: u64 = 64;

/// A thread that works and checks itself.
#[derive(Debug)]
pub struct Side {
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct State {
    stop: AtomicBool,
    rounds: AtomicU64,
    failure: Mutex<Option<String>>,
}

impl Side {
    /// Starts the other work of the shape's mode, if any; `layer` and `weights` are the first layer of this
    /// process.
    ///
    /// # Errors
    /// The driver refuses, or the CPU cannot access weights.
    pub fn start(shape: &Shape, gpus: &Arc<Gpus>, weights: &Arc<Memory>) -> anyhow::Result<Option<Self>> {
        let work: Box<dyn FnMut(u64) -> anyhow::Result<()> + Send> = match shape.mode {
            Mode::Idle | Mode::SharedBo | Mode::Graph | Mode::NoAccess | Mode::RenderOnly => return Ok(None),
            Mode::MidDispatch => Box::new(long_sums(shape, gpus, weights)?),
            Mode::CpuReads => Box::new(comparison(shape, weights)?),
            Mode::Allocating => Box::new(coming_and_going(shape, gpus)?),
            Mode::Userptr => {
                let memory = gpus.registered(&vec![0; usize::try_from(TURNS)?])?;
                Box::new(turns(shape, gpus, Memory::Registered(memory), &LONG)?)
            }
            Mode::Gtt => Box::new(turns(shape, gpus, Memory::Buffer(gpus.host(TURNS)?), &SHORT)?),
            Mode::Svm => Box::new(turns(shape, gpus, Memory::Attributed(gpus.attributed(TURNS)?), &LONG)?),
        };
        let state = Arc::new(State::default());
        let thread = thread::spawn({
            let state = Arc::clone(&state);
            move || state.run(work)
        });
        Ok(Some(Self { state, thread: Some(thread) }))
    }

    /// Rounds that were right.
    ///
    /// # Errors
    /// The error of the last one.
    pub fn rounds(&self) -> Result<u64, String> {
        let failure = self.state.failure.lock().unwrap_or_else(PoisonError::into_inner).clone();
        failure.map_or_else(|| Ok(self.state.rounds.load(Ordering::Relaxed)), Err)
    }
}

impl State {
    fn run(&self, mut work: Box<dyn FnMut(u64) -> anyhow::Result<()> + Send>) {
        let mut round = 0;
        while !self.stop.load(Ordering::Relaxed) {
            if let Err(error) = work(round) {
                let failure = format!("round {round}: {error:#}");
                *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure);
                return;
            }
            round += 1;
            self.rounds.store(round, Ordering::Relaxed);
        }
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // The thread has reported its failure already.
            let _ = thread.join();
        }
    }
}

impl Batch {
    fn steps(&self, sum: Kernel, gpu: usize) -> Vec<Step> {
        let busy = (self.busy > 0).then_some(Kernel::Spin { microseconds: self.busy });
        let one = || std::iter::once(sum).chain(busy);
        (0..self.sums).flat_map(|_| one()).map(|kernel| Step { gpu, queue: 0, kernel }).collect()
    }
}

fn alone(kernel: Kernel) -> Step {
    Step { gpu: 0, queue: 0, kernel }
}

/// `y += weights` again and again: lost or repeated work shows in the hash of `y`.
fn long_sums(
    shape: &Shape,
    gpus: &Arc<Gpus>,
    weights: &Arc<Memory>,
) -> anyhow::Result<impl FnMut(u64) -> anyhow::Result<()> + Send + use<>> {
    let mut lane = Lane::new(gpus, 1, 1)?;
    let bytes = shape.layer_bytes();
    let y = gpus.local(0, bytes)?;
    let result = gpus.host(8)?;
    lane.run(&[alone(Kernel::Fill { to: y.address(), words: bytes / 4, value: 0 })])?;
    let mut numbers = vec![0; usize::try_from(bytes)?];
    weights::layer(shape, 0, 0, &mut numbers);
    let mut expected = vec![0; numbers.len() / 4];
    let sum = Kernel::Axpy { y: y.address(), x: weights.address(), words: bytes / 4, a: 1 };
    Ok(move |_| {
        let mut steps = LONG.steps(sum, 0);
        steps.push(alone(Kernel::Hash { out: result.address(), from: y.address(), bytes, seed: 7 }));
        lane.run(&steps)?;
        let weights: Vec<u32> = words(&numbers).collect();
        axpy(&mut expected, &weights, LONG.sums);
        let (found, right) = (result.cpu().load64(0), hash(pairs(&expected), 7));
        ensure!(
            found == right,
            "long sums hash to {found:#x}, expected {right:#x}: work was lost or done twice"
        );
        Ok(())
    })
}

/// Reads weights through the buffer's mapping and compares.
fn comparison(
    shape: &Shape,
    weights: &Arc<Memory>,
) -> anyhow::Result<impl FnMut(u64) -> anyhow::Result<()> + Send + use<>> {
    ensure!(
        weights.cpu().access() == Access::ReadWrite,
        "--mode cpu-reads needs GPUs with a large BAR: the CPU cannot access weights on these"
    );
    let (shape, bytes, address) = (shape.clone(), shape.layer_bytes(), weights.address());
    let weights = Arc::clone(weights);
    Ok(move |round: u64| {
        let length = COMPARED.min(usize::try_from(bytes)?);
        let at = round.wrapping_mul(40_507) * 8 % (bytes - length as u64 + 8) / 8 * 8;
        let (mut found, mut right) = (vec![0; length], vec![0; length]);
        weights.cpu().read(at, &mut found);
        weights::layer(&shape, 0, at, &mut right);
        let wrong = found.iter().zip(&right).position(|(found, right)| found != right);
        if let Some(wrong) = wrong {
            let place = address + at + wrong as u64;
            anyhow::bail!("the CPU read {:#x} at {place:#x}, expected {:#x}", found[wrong], right[wrong]);
        }
        thread::sleep(Duration::from_millis(2));
        Ok(())
    })
}

/// Allocates memory on GPUs. While a restore blocks calls they return EAGAIN, and are repeated, as ROCm's
/// library does. A restore gives buffers new offsets. A program that was dumped between ALLOC and mmap asks
/// for the old one: no plugin can help (docs/plugin.md, "Limits"), so one failure is ignored.
fn made<T>(make: impl Fn() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let mut stale = false;
    loop {
        let done = make();
        let errno =
            done.as_ref().err().and_then(|error| error.downcast_ref::<rewake_amdgpu_uapi::Error>()?.errno());
        match errno.map(Errno::from_raw) {
            Some(Errno::EAGAIN) => thread::sleep(AGAIN),
            Some(Errno::EINVAL) if !stale => stale = true,
            _ => return done,
        }
    }
}

/// Allocates a buffer of a changing kind and size, fills it, hashes it, frees it.
fn coming_and_going(
    shape: &Shape,
    gpus: &Arc<Gpus>,
) -> anyhow::Result<impl FnMut(u64) -> anyhow::Result<()> + Send + use<>> {
    let mut lane = Lane::new(gpus, 1, 1)?;
    let gpus = Arc::clone(gpus);
    let result = gpus.host(8)?;
    let seed = shape.seed;
    Ok(move |round: u64| {
        let pages = 1 + round.wrapping_mul(seed | 1).wrapping_mul(0x9e37_79b9) % PAGES;
        let bytes = pages * 4096;
        let value = u32::try_from(round & 0xffff_ffff)? ^ 0x5a5a_5a5a;
        let mut check = |address: u64| -> anyhow::Result<()> {
            lane.run(&[
                alone(Kernel::Fill { to: address, words: bytes / 4, value }),
                alone(Kernel::Hash { out: result.address(), from: address, bytes, seed: round }),
            ])?;
            let double = u64::from(value) | u64::from(value) << 32;
            let count = usize::try_from(bytes / 8)?;
            let (found, right) = (result.cpu().load64(0), hash(std::iter::repeat_n(double, count), round));
            ensure!(found == right, "{bytes} bytes at {address:#x} hash to {found:#x}, expected {right:#x}");
            Ok(())
        };
        match round % 3 {
            0 => check(made(|| gpus.local(0, bytes)).context("VRAM")?.address()),
            1 => check(made(|| gpus.host(bytes)).context("host memory")?.address()),
            _ => {
                let zeros = vec![0; usize::try_from(bytes)?];
                check(made(|| gpus.registered(&zeros)).context("registered memory")?.address())
            }
        }
    })
}

/// In one memory: the CPU writes the first half and one word of the second. A GPU (each in turn) adds the
/// first half to the second several times. The CPU compares the second. Lost or repeated work stays visible;
/// a dump in the middle finds some sums done and others waiting.
fn turns(
    shape: &Shape,
    gpus: &Arc<Gpus>,
    memory: Memory,
    batch: &'static Batch,
) -> anyhow::Result<impl FnMut(u64) -> anyhow::Result<()> + Send + use<>> {
    let mut lane = Lane::new(gpus, gpus.count(), 1)?;
    let (seed, count, half) = (shape.seed, gpus.count() as u64, TURNS / 2);
    let (x, y) = (memory.address(), memory.address() + half);
    let sum = Kernel::Axpy { y, x, words: half / 4, a: 1 };
    let mut expected = vec![0_u32; usize::try_from(half / 4)?];
    let (mut given, mut found) = (vec![0; usize::try_from(half)?], vec![0; usize::try_from(half)?]);
    Ok(move |round: u64| {
        weights::given(seed, round, &mut given);
        memory.cpu().write(0, &given);
        let place = usize::try_from(round % (half / 4))?;
        expected[place] ^= 0xffff;
        memory.cpu().write(half + place as u64 * 4, &expected[place].to_le_bytes());
        let gpu = usize::try_from(round % count)?;
        lane.run(&batch.steps(sum, gpu))?;
        let given: Vec<u32> = words(&given).collect();
        axpy(&mut expected, &given, batch.sums);
        memory.cpu().read(half, &mut found);
        let wrong = words(&found).zip(&expected).position(|(found, right)| found != *right);
        if let Some(wrong) = wrong {
            let (place, right) = (y + wrong as u64 * 4, expected[wrong]);
            anyhow::bail!(
                "GPU {gpu} left {:#x} at {place:#x}, expected {right:#x}",
                memory.cpu().load32(half + wrong as u64 * 4)
            );
        }
        Ok(())
    })
}
