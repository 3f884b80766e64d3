// SPDX-License-Identifier: MIT OR Apache-2.0
//! Both sides of a migration, a link that is cut, and crashes: thousands of runs, each repeated by its seed.
//!
//! `REWAKE_SEED=N` begins with that seed. Rules: `world/rules.rs`. Each rule was seen to fail with a planted
//! mistake: the list is in docs/decisions/0023-migration.md.

mod link;
mod world;

use rewake_testkit::Random;
use rewake_testkit::random::count;
use world::rules::EndPlace;
use world::{FaultMix, World};

/// Random steps before a run is left to end.
const STEPS: usize = 600;
const RUNS: u64 = 3000;

fn seeds() -> std::ops::Range<u64> {
    let first = count("REWAKE_SEED", 1);
    first..first + RUNS
}

fn played(seed: u64, mix: FaultMix) -> World {
    let mut world = World::new(seed, mix);
    (0..STEPS).for_each(|_| world.step(true));
    world
}

fn settled(seed: u64, mix: FaultMix) -> World {
    let mut world = played(seed, mix);
    world.settle();
    world
}

#[test]
fn without_faults_the_program_migrates() {
    for seed in seeds() {
        let world = settled(seed, FaultMix::default());
        let end = (world.conclude(), world.is_migrated());
        assert_eq!(end, (EndPlace::Destination, true), "seed {seed}\n{}", world.story());
    }
}

/// The rules say that GRANT finds no block missing.
#[test]
fn with_all_memory_first_the_program_migrates() {
    let mix = FaultMix { cuts: true, all_first: true, ..FaultMix::default() };
    for seed in seeds() {
        let world = settled(seed, mix);
        let end = (world.conclude(), world.is_migrated());
        assert_eq!(end, (EndPlace::Destination, true), "seed {seed}\n{}", world.story());
    }
}

#[test]
fn after_cuts_of_the_link_the_program_migrates() {
    for seed in seeds() {
        let world = settled(seed, FaultMix { cuts: true, ..FaultMix::default() });
        let end = (world.conclude(), world.is_migrated());
        assert_eq!(end, (EndPlace::Destination, true), "seed {seed}\n{}", world.story());
    }
}

#[test]
fn after_crashes_of_agents_each_run_ends() {
    let mix = FaultMix { cuts: true, agent_crashes: true, aborts: true, ..FaultMix::default() };
    for seed in seeds() {
        settled(seed, mix).conclude();
    }
}

/// Each kind of event, in a third of the runs.
fn some_faults(seed: u64) -> FaultMix {
    let mut random = Random::new(!seed);
    let mut has = || random.below(3) == 0;
    FaultMix {
        cuts: has(),
        timeouts: has(),
        aborts: has(),
        agent_crashes: has(),
        host_crashes: has(),
        failures: has(),
        lies: false,
        all_first: has(),
    }
}

#[test]
fn each_end_is_reached_and_is_said() {
    let ends: Vec<EndPlace> = seeds().map(|seed| settled(seed, some_faults(seed)).conclude()).collect();
    let share = |place| ends.iter().filter(|end| **end == place).count();
    let shares = [EndPlace::Source, EndPlace::Destination, EndPlace::Nowhere].map(share);
    assert!(shares.iter().all(|runs| *runs > 50), "{shares:?}");
}

#[test]
fn a_destination_that_lies_makes_no_second_copy_run() {
    let mix = FaultMix { cuts: true, timeouts: true, agent_crashes: true, lies: true, ..FaultMix::default() };
    for seed in seeds() {
        // Each step checks the rules. What a liar gains is the loss of its own program.
        played(seed, mix);
    }
}
