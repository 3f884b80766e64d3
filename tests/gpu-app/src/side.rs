// SPDX-License-Identifier: MIT OR Apache-2.0
//! What goes on beside the answers, in a thread of its own, checking itself round by round.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rewake_kfd::Buffer;
use rewake_kfd::abi::memory::Access;

use crate::chain::{Lane, Step};
use crate::gpu::Gpus;
use crate::kernel::{Kernel, axpy, hash, pairs, words};
use crate::shape::{Mode, Shape};
use crate::weights;

/// Sums in one batch of long dispatches, and how long each is kept long.
const BATCH: u32 = 4;
const BUSY: u64 = 20_000;
/// Bytes that the CPU compares in one round.
const COMPARED: usize = 16 * 1024;
/// Pages of the largest buffer that comes and goes.
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
    /// Starts what the shape's mode asks for, if anything; `layer` and `weights` are the first layer of this process.
    ///
    /// # Errors
    /// The driver refuses, or the CPU cannot reach weights.
    pub fn start(shape: &Shape, gpus: &Arc<Gpus>, weights: &Arc<Buffer>) -> anyhow::Result<Option<Self>> {
        let work: Box<dyn FnMut(u64) -> anyhow::Result<()> + Send> = match shape.mode {
            Mode::Idle | Mode::SharedBo | Mode::Graph => return Ok(None),
            Mode::MidDispatch => Box::new(long_sums(shape, gpus, weights)?),
            Mode::CpuReads => Box::new(comparison(shape, weights)?),
            Mode::Allocating => Box::new(coming_and_going(shape, gpus)?),
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
    /// What was wrong in the last one.
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
            // It has told of its failure already.
            let _ = thread.join();
        }
    }
}

fn alone(kernel: Kernel) -> Step {
    Step { gpu: 0, queue: 0, kernel }
}

/// `y += weights` again and again: work that is lost, or done twice, is seen in the hash of `y`.
fn long_sums(
    shape: &Shape,
    gpus: &Arc<Gpus>,
    weights: &Arc<Buffer>,
) -> anyhow::Result<impl FnMut(u64) -> anyhow::Result<()> + Send + use<>> {
    let mut lane = Lane::new(gpus, 1, 1)?;
    let bytes = shape.layer_bytes();
    let y = gpus.local(0, bytes)?;
    let result = gpus.host(8)?;
    lane.run(&[alone(Kernel::Fill { to: y.address(), words: bytes / 4, value: 0 })])?;
    let mut numbers = vec![0; usize::try_from(bytes)?];
    weights::layer(shape.seed, 0, 0, &mut numbers);
    let mut expected = vec![0; numbers.len() / 4];
    let sum = Kernel::Axpy { y: y.address(), x: weights.address(), words: bytes / 4, a: 1 };
    Ok(move |_| {
        let mut steps = Vec::new();
        for _ in 0..BATCH {
            steps.push(alone(sum));
            steps.push(alone(Kernel::Spin { microseconds: BUSY }));
        }
        steps.push(alone(Kernel::Hash { out: result.address(), from: y.address(), bytes, seed: 7 }));
        lane.run(&steps)?;
        let weights: Vec<u32> = words(&numbers).collect();
        axpy(&mut expected, &weights, BATCH);
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
    weights: &Arc<Buffer>,
) -> anyhow::Result<impl FnMut(u64) -> anyhow::Result<()> + Send + use<>> {
    ensure!(
        weights.cpu().access() == Access::ReadWrite,
        "--mode cpu-reads needs GPUs with a large BAR: the CPU cannot reach weights on these"
    );
    let (seed, bytes, address) = (shape.seed, shape.layer_bytes(), weights.address());
    let weights = Arc::clone(weights);
    Ok(move |round: u64| {
        let length = COMPARED.min(usize::try_from(bytes)?);
        let at = round.wrapping_mul(40_507) * 8 % (bytes - length as u64 + 8) / 8 * 8;
        let (mut found, mut right) = (vec![0; length], vec![0; length]);
        weights.cpu().read(at, &mut found);
        weights::layer(seed, 0, at, &mut right);
        let wrong = found.iter().zip(&right).position(|(found, right)| found != right);
        if let Some(wrong) = wrong {
            let place = address + at + wrong as u64;
            anyhow::bail!("the CPU read {:#x} at {place:#x}, expected {:#x}", found[wrong], right[wrong]);
        }
        thread::sleep(Duration::from_millis(2));
        Ok(())
    })
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
            0 => check(gpus.local(0, bytes).context("VRAM")?.address()),
            1 => check(gpus.host(bytes).context("host memory")?.address()),
            _ => check(
                gpus.registered(&vec![0; usize::try_from(bytes)?]).context("registered memory")?.address(),
            ),
        }
    })
}
