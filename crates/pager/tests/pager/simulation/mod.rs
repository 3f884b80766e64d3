// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs restored programs, a kernel and a streamer's rules in random order.
//!
//! A seed decides everything. A failure names its seed; `REWAKE_SIM_SEED=<seed> cargo test -p rewake-pager
//! simulation` runs it alone.

mod handler;
mod kernel;
mod program;
mod rng;

use std::collections::BTreeMap;

use handler::Handler;
use kernel::{Mm, Value};
use program::{Program, Wish};
use rewake_pager::{Extent, PAGE_SIZE, Plan};
use rng::Rng;

/// Addresses in use, in pages.
const ADDRESSES: u64 = 220;
/// Address spaces at most, so that forks of forks end.
const SPACES: usize = 4;
/// Steps until a run counts as hanging; the longest of thousands took a third of them.
const STEPS: u64 = 60_000;

/// The most crashes in one run, because the cost of crashes must not use up all progress.
const CRASHES: u64 = 8;

/// Contents of a page of an image file. Every fifth page is all zeros.
fn image_value(file: u32, page: u64) -> Value {
    if page.is_multiple_of(5) { 0 } else { 1 + u64::from(file) * 100_000 + page }
}

/// What a run tests, besides its seed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Variant {
    Plain,
    /// The streamer dies again and again, and a successor takes over.
    Crashes,
    /// The source fails once.
    SourceFails,
    /// No layout lock: wrong, and the simulation must find out.
    NoLock,
}

/// How a run without errors ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Finished,
    Killed,
}

struct World {
    rng: Rng,
    kernel: Vec<Mm>,
    programs: Vec<Program>,
    handler: Handler,
    workers: usize,
    variant: Variant,
    crashes: u64,
    /// How often each kind of actor moves: program, reader, worker, demand load.
    weights: [u64; 4],
}

impl World {
    fn new(seed: u64, variant: Variant) -> Self {
        let mut rng = Rng::new(seed);
        let extents = extents(&mut rng);
        let mut expect: BTreeMap<u64, Vec<Value>> = BTreeMap::new();
        for extent in &extents {
            let (target, offset) = (extent.target / PAGE_SIZE, extent.file_offset / PAGE_SIZE);
            expect.extend(
                (0..extent.pages).map(|page| (target + page, vec![image_value(extent.file, offset + page)])),
            );
            // Memory that was never written follows.
            for page in target + extent.pages..target + extent.pages + rng.within(0..4) {
                expect.entry(page).or_insert_with(|| vec![0]);
            }
        }
        let workers = rng.index(3) + 1;
        let mut handler = Handler::new(Plan::new(extents).unwrap(), workers);
        handler.locking = variant != Variant::NoLock;
        handler.failures = if variant == Variant::SourceFails { 8 } else { 0 };
        let kernel = vec![Mm::new(expect.keys().copied())];
        let programs = vec![Program::new(expect, rng.within(1..4), &mut rng)];
        let weights = std::array::from_fn(|_| rng.within(1..9));
        Self { rng, kernel, programs, handler, workers, variant, crashes: 0, weights }
    }

    fn run(&mut self) -> Result<End, String> {
        for _ in 0..STEPS {
            self.step()?;
            self.handler.check()?;
            if self.handler.failed {
                // The streamer kills the target. Until then its threads run or wait.
                for _ in 0..200 {
                    let mm = self.rng.index(self.kernel.len());
                    self.step_program(mm)?;
                }
                return Ok(End::Killed);
            }
            if self.handler.has_finished() && self.programs.iter().all(Program::has_ended) {
                return self.read_everything().map(|()| End::Finished);
            }
        }
        Err(format!("still not finished after {STEPS} steps"))
    }

    fn step(&mut self) -> Result<(), String> {
        let mm = self.rng.index(self.kernel.len());
        if self.variant == Variant::Crashes && self.crashes < CRASHES && self.rng.once_in(150) {
            self.crashes += 1;
            self.handler.crash(&mut self.kernel);
        }
        let mut turn = self.rng.within(0..self.weights.iter().sum());
        let actor = self.weights.iter().position(|weight| match turn.checked_sub(*weight) {
            Some(rest) => {
                turn = rest;
                false
            }
            None => true,
        });
        match actor {
            Some(0) => return self.step_program(mm),
            Some(1) => self.handler.read_events(mm, &mut self.kernel, &mut self.rng),
            Some(2) => {
                let worker = self.rng.index(self.workers);
                self.handler.work(worker, &mut self.kernel, &mut self.rng);
            }
            _ => self.handler.serve(&mut self.kernel, &mut self.rng),
        }
        // If the parent's descriptor is closed first, its child has none either.
        for child in self.handler.retire(mm, &mut self.kernel) {
            self.kernel[child].close();
        }
        Ok(())
    }

    fn step_program(&mut self, mm: usize) -> Result<(), String> {
        let child = self.kernel.len();
        let next_child = (child < SPACES).then_some(child);
        let wish = self.programs[mm].step(&mut self.kernel[mm], next_child, &mut self.rng);
        match wish.map_err(|error| format!("address space {mm}: {error}"))? {
            Wish::Nothing => {}
            Wish::Fork => {
                let rng = &mut self.rng;
                let forked = self.kernel[mm].fork(|| rng.once_in(2));
                self.kernel.push(forked);
                self.programs.push(self.programs[mm].forked());
            }
            Wish::Start(child) => {
                let threads = self.rng.within(1..3);
                self.programs[child].start(threads, &mut self.rng);
            }
            Wish::Orphan(child) => drop(self.kernel[child].close()),
        }
        Ok(())
    }

    /// Reads every page of all programs.
    fn read_everything(&mut self) -> Result<(), String> {
        for (mm, (program, kernel)) in self.programs.iter().zip(&mut self.kernel).enumerate() {
            for (page, expected) in &program.expect {
                let value = kernel.access(*page, 0).ok_or("a page is missing and is not served")?;
                if !expected.contains(&value) {
                    return Err(format!(
                        "address space {mm}: page {page} ended as {value}, one of {expected:?} was expected"
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Mappings in random order in two sparse files, so that there are several blocks.
fn extents(rng: &mut Rng) -> Vec<Extent> {
    let mut offsets = [0, 0];
    let mut target = 0;
    let mut extents = Vec::new();
    let forward = rng.once_in(2);
    for _ in 0..rng.within(1..7) {
        target += rng.within(0..6);
        let pages = rng.within(1..30);
        let file = u32::try_from(rng.within(0..2)).unwrap();
        let next = &mut offsets[file as usize];
        *next += rng.within(0..60);
        let offset = if forward { *next } else { 1000 - *next - pages };
        let (target_bytes, file_offset) = (target * PAGE_SIZE, offset * PAGE_SIZE);
        extents.push(Extent { target: target_bytes, file, file_offset, pages });
        *next += pages;
        target += pages;
    }
    extents
}

/// Runs `count` seeds, or the one in the environment.
fn run(variant: Variant, count: u64) -> Vec<End> {
    let asked =
        std::env::var("REWAKE_SIM_SEED").ok().map(|seed| seed.parse().expect("REWAKE_SIM_SEED: a number"));
    let seeds = asked.map_or(0..count, |seed: u64| seed..seed + 1);
    let run = |seed| match World::new(seed, variant).run() {
        Ok(end) => end,
        Err(error) => panic!("{variant:?}: {error}\nagain: REWAKE_SIM_SEED={seed}"),
    };
    seeds.map(run).collect()
}

#[test]
fn every_page_that_a_program_reads_is_right() {
    assert!(run(Variant::Plain, 2000).iter().all(|end| *end == End::Finished));
}

#[test]
fn a_successor_of_a_crashed_streamer_fills_no_wrong_page() {
    assert!(run(Variant::Crashes, 2000).iter().all(|end| *end == End::Finished));
}

#[test]
fn a_failing_source_ends_the_session_before_a_wrong_read() {
    let ends = run(Variant::SourceFails, 1000);
    assert!(ends.len() == 1 || ends.contains(&End::Killed));
}

#[test]
fn without_the_layout_lock_a_stale_page_is_found() {
    let wrong = |seed: &u64| {
        let end = World::new(*seed, Variant::NoLock).run();
        end.is_err_and(|error| error.contains(" expected"))
    };
    let seed = (0..2000).find(wrong).expect("the simulation is blind: no seed found a stale page");
    println!("found by seed {seed}");
    assert!(World::new(seed, Variant::Plain).run().is_ok(), "with the lock, the same seed is right");
}
