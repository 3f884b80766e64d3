// SPDX-License-Identifier: MIT OR Apache-2.0
//! Restores with a background load where a GPU has no free memory, or does not copy. No partial process is
//! left, and the next restore is whole.

use gpu_app::gpu::Gpus;
use gpu_app::kfd::{Buffer, Spec};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_skip::need;
use softgpu_tests::criu::{Version, wait_for_the_end_of};
use softgpu_tests::dumped::{Dumped, ONE_RING, unreached};
use softgpu_tests::faults::{Calls, Fault};
use softgpu_tests::{Faults, Machine, REAL_GPUS, Scene, isolated};

const MIB: u64 = 1 << 20;

/// Another program, which takes all memory of a GPU until the test ends it.
fn takes_all(scene: &Scene) {
    let gpus = Gpus::open(1).unwrap();
    let take = |bytes| std::iter::from_fn(move || Buffer::alloc(gpus.device(0), Spec::vram(bytes)).ok());
    let taken: Vec<Buffer> = [64 * MIB, MIB].into_iter().flat_map(|bytes| take.clone()(bytes)).collect();
    scene.say("taken");
    let _ = scene.hear();
    drop(taken);
}

#[test]
fn a_gpu_whose_memory_another_program_has() {
    isolated(1, |scene| {
        if scene.role().is_some() {
            return takes_all(scene);
        }
        let dumped = need!(Dumped::of(&unreached(), Version::V4_2));
        let mut other = scene.peer("takes all");
        assert_eq!(other.hear(), "taken");
        let mut streamer = dumped.streamer();
        let error = dumped.criu.restore().unwrap_err().to_string();
        assert!(error.contains("CRIU_OP RESTORE") && error.contains("Cannot allocate memory"), "{error}");
        wait_for_the_end_of(dumped.server.pid).unwrap();
        // It may have ended by itself.
        let _ = kill(Pid::from_raw(streamer.pid().cast_signed()), Signal::SIGTERM);
        assert!(!streamer.end().unwrap().success(), "{}", streamer.said());
        other.say("end");
        other.finish();
        dumped.restores();
        dumped.server.ends_well();
    });
}

#[test]
fn a_gpu_that_does_not_copy() {
    isolated(1, |_| {
        let faults = need!(Faults::find(), REAL_GPUS);
        let _machine = Machine::with(&ONE_RING).expect("a software GPU");
        let dumped = need!(Dumped::of(&unreached(), Version::V4_2));
        for nth in 1..=3 {
            let mut streamer = dumped.streamer();
            let copies = Calls { comm: Some("rewake"), call: Some("amdgpu/CS") };
            faults.fail(nth, Fault::Errno(libc::EIO), copies);
            // The target may run when the first copies fail, or not yet.
            let _ = dumped.criu.restore();
            let status = streamer.end().unwrap();
            assert!(faults.hit() && status.code() == Some(1), "{nth}: {status}, {}", streamer.said());
            assert!(streamer.said().contains("Input/output error"), "{nth}: {}", streamer.said());
            faults.off();
            wait_for_the_end_of(dumped.server.pid).unwrap();
        }
        dumped.restores();
        dumped.server.ends_well();
    });
}
