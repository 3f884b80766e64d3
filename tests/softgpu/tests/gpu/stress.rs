// SPDX-License-Identifier: MIT OR Apache-2.0
//! Restores one image again and again, at various rates. A program acts on missing memory, or a busy server
//! gets requests: every byte and answer must be as with resident memory. `RESTORE_ROUNDS` is the number of
//! rounds, `RESTORE_SEED` chooses the actions.

use std::fs;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use gpu_app::shape::{Mode, Shape};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_amdgpu_uapi::topology::{Node, Topology};
use rewake_skip::need;
use softgpu_tests::accessor::BUFFERS;
use softgpu_tests::criu::{Criu, Version, wait_for_the_end_of};
use softgpu_tests::dumped::{Behind, Dumped};
use softgpu_tests::random::{Random, count};
use softgpu_tests::server::small;
use softgpu_tests::{Accessor, Machine, REAL_GPUS, Streamer, isolated};

/// Rounds of both versions of CRIU together.
const ROUNDS: u64 = 2;
const SEED: u64 = 0x5eed_0005;
/// Rates of the copy rings in 10^6 bytes a second: a load takes from nearly two seconds to an instant.
const PACES: [&str; 4] = ["5", "10", "40", "400"];
/// A round has one of eight ends. Those below this number end the program: it exits, executes another, or is
/// killed.
const LIVES: u64 = 3;
/// What the kernel writes to a buffer.
static GIVEN: [u8; 700_001] = [0xa5; 700_001];

/// What a program may still do with a buffer.
#[derive(Debug, Clone, Copy)]
struct Buffer {
    writable: bool,
    whole: bool,
}

/// The orders of a round.
fn orders(random: &mut Random) -> Vec<String> {
    let mut buffers = [Buffer { writable: true, whole: true }; BUFFERS];
    (0..random.below(7))
        .map(|_| {
            let which = random.below(BUFFERS);
            let buffer = &mut buffers[which];
            let mut can = vec!["check", "tail", "write", "move", "fork", "protect"];
            can.extend(buffer.writable.then_some("read"));
            can.extend(buffer.whole.then_some(["halve", "halve-write"]).into_iter().flatten());
            let what = random.of(&can);
            buffer.writable &= what != "protect";
            buffer.whole &= !what.starts_with("halve");
            // The last page has another content then, or is unmapped.
            let what = if what == "tail" && !buffer.whole { "check" } else { what };
            format!("{what} {which}")
        })
        .collect()
}

#[test]
fn random_orders_to_a_program_with_missing_memory() {
    isolated(1, |_| {
        let machine = need!(Machine::find(), REAL_GPUS);
        let mut random = Random::new(count("RESTORE_SEED", SEED));
        let rounds = count("RESTORE_ROUNDS", ROUNDS);
        assert!(rounds > 1, "RESTORE_ROUNDS is 2 at least");
        for version in [Version::V4_2, Version::V4_1] {
            let folder = tempfile::tempdir().unwrap();
            let mut accessor = Accessor::start(env!("CARGO_BIN_EXE_accessor"), folder.path(), None).unwrap();
            let criu = accessor.dump(version).unwrap();
            fs::write(folder.path().join("in"), GIVEN).unwrap();
            for round in 0..rounds / 2 {
                let pace = random.of(&PACES);
                let (orders, end) = (orders(&mut random), random.below(8));
                let story = format!("round {round} of {version:?}: {pace} MB/s, {orders:?}, {end}");
                eprintln!("{story}");
                machine.becomes(&[("copy_mbps", pace), ("sdma_rings", "1")]);
                let done = restore(&accessor, &criu, &orders, end, &mut random);
                done.unwrap_or_else(|why| panic!("{story}: {why:#}"));
            }
        }
    });
}

/// Modes of the server.
const BUSY: [Mode; 3] = [Mode::CpuReads, Mode::Allocating, Mode::NoAccess];

#[test]
fn requests_to_a_server_with_missing_memory() {
    isolated(1, |_| {
        let machine = need!(Machine::find(), REAL_GPUS);
        let mut random = Random::new(count("RESTORE_SEED", SEED));
        let rounds = count("RESTORE_ROUNDS", ROUNDS);
        let servers = [Version::V4_2, Version::V4_1].into_iter().flat_map(|of| BUSY.map(|mode| (of, mode)));
        // A few rounds are for as many servers.
        for (number, (version, mode)) in (0..6).zip(servers) {
            let rounds = rounds / 6 + u64::from(number < rounds % 6);
            if rounds == 0 {
                continue;
            }
            if mode == Mode::CpuReads && !Topology::read().unwrap().gpus().all(Node::has_large_bar) {
                continue;
            }
            let shape = Shape { mode, layer_kib: 2048, own_mib: 4, ..small() };
            let dumped = need!(Dumped::of(&shape, version));
            for round in 0..rounds {
                let (pace, behind) = (random.of(&PACES), random.of(&[Behind::Gpus, Behind::Both]));
                eprintln!("round {round} of {version:?}, {mode:?}: {pace} MB/s, {behind:?}");
                machine.becomes(&[("copy_mbps", pace), ("sdma_rings", "1")]);
                serve(&dumped, behind, &mut random);
            }
        }
    });
}

/// One round.
fn serve(dumped: &Dumped, behind: Behind, random: &mut Random) {
    let mut streamer = dumped.streamer_of(behind);
    let restored = dumped.restore_command(behind).status().unwrap();
    assert!(restored.success(), "{}\n{}", dumped.criu.log("restore"), streamer.said());
    thread::sleep(Duration::from_millis(random.below(300)));
    let asked = random.below(8) > 0;
    if asked {
        let answered = dumped.server.answers().and_then(|()| {
            let prompt: Vec<u32> = (0..=u32::try_from(random.below(4))?).map(|word| word * 37 + 5).collect();
            dumped.server.app.answers(&prompt, 1 + usize::try_from(random.below(4))?)
        });
        answered.unwrap_or_else(|error| panic!("{error:#}\n{}", streamer.said()));
    }
    if random.below(2) > 0 {
        dumped.ends();
        return assert!(streamer.end().unwrap().success(), "{}", streamer.said());
    }
    assert!(streamer.end().unwrap().success(), "{}", streamer.said());
    let answered = if asked { dumped.server.app.answers(&[9], 2) } else { dumped.server.answers() };
    answered.unwrap_or_else(|error| panic!("{error:#}\n{}", streamer.said()));
    dumped.ends();
}

/// One round; returns what went wrong.
fn restore(
    accessor: &Accessor,
    criu: &Criu,
    orders: &[String],
    end: u64,
    random: &mut Random,
) -> anyhow::Result<()> {
    let mut streamer = Streamer::start(criu.images())?;
    criu.restore()?;
    let done = act(accessor, orders, end, random);
    let status = streamer.end()?;
    let done = done.and_then(|()| {
        ensure!(status.success(), "the streamer failed: {status}");
        let buffers = if end < LIVES { 0..0 } else { 0..BUFFERS };
        buffers.into_iter().try_for_each(|buffer| accessor.asked(&format!("check {buffer}")))
    });
    // It may have ended by an order.
    let _ = kill(Pid::from_raw(accessor.pid().cast_signed()), Signal::SIGKILL);
    wait_for_the_end_of(accessor.pid())?;
    // The last order may have no answer.
    let _ = accessor.answered();
    done.with_context(|| streamer.said())
}

/// What the program does while its memory is missing.
fn act(accessor: &Accessor, orders: &[String], end: u64, random: &mut Random) -> anyhow::Result<()> {
    for order in orders {
        thread::sleep(Duration::from_millis(random.below(300)));
        accessor.asked(order)?;
    }
    match end {
        0 => accessor.ask("end 0"),
        1 => accessor.asked("execute 0"),
        2 => Ok(kill(Pid::from_raw(accessor.pid().cast_signed()), Signal::SIGKILL)?),
        LIVES.. => Ok(()),
    }
}
