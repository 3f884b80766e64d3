// SPDX-License-Identifier: MIT OR Apache-2.0
//! Injected faults: exactly one call fails, or kills its caller. The judge reports what such a fault leaves
//! behind.

use std::fs;
use std::os::fd::AsFd as _;

use gpu_app::gpu::Gpus;
use nix::errno::Errno;
use rewake_amdgpu_uapi::abi::AMDGPU_GEM_DOMAIN_GTT;
use rewake_amdgpu_uapi::abi::call::number;
use rewake_amdgpu_uapi::render::Render;
use rewake_amdgpu_uapi::topology::Topology;
use rewake_amdgpu_uapi::{Kfd, criu};
use rewake_skip::need;
use softgpu_tests::faults::{Calls, Fault};
use softgpu_tests::judge::A_WHILE;
use softgpu_tests::{Faults, Judge, REAL_GPUS, Scene, isolated, sys};

const VERSIONS: Calls<'_> = Calls { comm: None, call: Some("kfd/GET_VERSION") };

fn errno<T>(result: Result<T, rewake_amdgpu_uapi::Error>) -> Option<Errno> {
    result.err().map(|error| Errno::from_raw(error.errno().unwrap()))
}

#[test]
fn the_nth_call_fails_once() {
    isolated(1, |_| {
        let faults = need!(Faults::find(), REAL_GPUS);
        let kfd = Kfd::open().unwrap();
        faults.fail(2, Fault::Errno(5), VERSIONS);
        assert!(!faults.hit());
        let found = [0; 4].map(|_| errno(kfd.version()));
        assert_eq!(found, [None, Some(Errno::EIO), None, None]);
        assert!(faults.hit());
        let calls = faults.calls();
        let results: Vec<_> = calls.iter().map(|call| (call.number, call.result, call.fault)).collect();
        let right = [(1, Some(0), false), (2, Some(-5), true), (3, Some(0), false), (4, Some(0), false)];
        assert_eq!(results, right);
        assert!(calls.iter().all(|call| call.pid == std::process::id() && call.name == "kfd/GET_VERSION"));
    });
}

#[test]
fn a_call_that_fails_has_done_nothing() {
    isolated(1, |_| {
        let faults = need!(Faults::find(), REAL_GPUS);
        let judge = need!(Judge::find(), REAL_GPUS);
        let gpus = Gpus::open(1).unwrap();
        let kfd = gpus.device(0).kfd().as_fd();
        faults.fail(1, Fault::Errno(12), Calls { call: Some("kfd/CRIU_OP/UNPAUSE"), ..Calls::default() });
        criu::process_info(kfd).unwrap();
        assert_eq!(errno(criu::unpause(kfd)), Some(Errno::ENOMEM));
        let still = judge.stopped_for(A_WHILE);
        assert_eq!(still.len(), 1);
        assert_eq!((still[0].pid, still[0].paused, still[0].evicted[0]), (std::process::id(), true, 1));
        criu::unpause(kfd).unwrap();
        assert_eq!(judge.stopped(), []);
        assert_eq!(judge.gates().len(), 1, "the process exists, and its gate is open");
    });
}

#[test]
fn calls_of_every_kind_are_counted_in_their_order() {
    isolated(1, |_| {
        let faults = need!(Faults::find(), REAL_GPUS);
        let judge = need!(Judge::find(), REAL_GPUS);
        let comm = fs::read_to_string("/proc/self/comm").unwrap();
        faults.count(Calls { comm: Some(comm.trim()), ..Calls::default() });
        let kfd = Kfd::open().unwrap();
        kfd.version().unwrap();
        assert!(criu::resume(kfd.as_fd(), std::process::id()).is_err());
        let topology = Topology::read().unwrap();
        let render = Render::open(topology.gpus().next().unwrap().render_minor()).unwrap();
        let buffer = render.create(4096, AMDGPU_GEM_DOMAIN_GTT, 0).unwrap();
        render.map_gpu(buffer, 1 << 32, 4096).unwrap();
        drm::control::Device::close_buffer(&render, drm::control::from_u32(buffer).unwrap()).unwrap();
        faults.off();
        kfd.version().unwrap();
        let calls = faults.calls();
        let names: Vec<&str> = calls.iter().map(|call| &*call.name).collect();
        let right =
            ["kfd/GET_VERSION", "kfd/CRIU_OP/RESUME", "amdgpu/GEM_CREATE", "amdgpu/GEM_VA", "drm/GEM_CLOSE"];
        assert_eq!((names, faults.seen()), (right.to_vec(), 5));
        assert_eq!(calls[1].result, Some(-22));
        judge.take("resume-repeated");
        assert!(!faults.hit());
    });
}

#[test]
fn other_processes_and_other_calls_are_left_alone() {
    isolated(1, |_| {
        let faults = need!(Faults::find(), REAL_GPUS);
        let kfd = Kfd::open().unwrap();
        for calls in [
            Calls { comm: Some("other"), ..VERSIONS },
            Calls { call: Some("kfd/CRIU_OP"), ..Calls::default() },
            Calls { call: Some("drm/VERSION"), ..Calls::default() },
        ] {
            faults.fail(1, Fault::Errno(5), calls);
            assert_eq!((errno(kfd.version()), faults.seen(), faults.hit()), (None, 0, false), "{calls:?}");
        }
    });
}

/// CRIU's call kills a process that pauses another process.
fn pauser_killed(scene: &Scene, fault: Fault) -> bool {
    let (Some(faults), Some(judge)) = (Faults::find(), Judge::find()) else {
        return fault == Fault::KillAfter;
    };
    if scene.role().is_some() {
        let (pid, fd) = (scene.hear().parse().unwrap(), scene.hear().parse().unwrap());
        let kfd = sys::descriptor_of(pid, fd).unwrap();
        sys::seize(pid).unwrap();
        let result = criu::process_info(kfd.as_fd());
        panic!("still alive after a call that kills: {result:?}");
    }
    let kfd = Kfd::open().unwrap();
    let mut peer = scene.peer("pauser");
    faults.fail(1, fault, Calls { call: Some("kfd/CRIU_OP/PROCESS_INFO"), ..Calls::default() });
    peer.say(&std::process::id().to_string());
    peer.say(&i64::from(number(kfd.as_fd())).to_string());
    let end = peer.end();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&end), Some(libc::SIGKILL));
    let paused = judge.gates().iter().any(|gate| gate.pid == std::process::id() && gate.paused);
    if paused {
        criu::unpause(kfd.as_fd()).unwrap();
    }
    paused
}

#[test]
fn a_caller_that_is_killed_before_has_done_nothing() {
    isolated(1, |scene| {
        assert!(!pauser_killed(scene, Fault::KillBefore));
    });
}

#[test]
fn a_caller_that_is_killed_after_has_done_it() {
    isolated(1, |scene| {
        assert!(pauser_killed(scene, Fault::KillAfter));
    });
}

#[test]
fn orders_that_make_no_sense_are_refused() {
    isolated(1, |_| {
        need!(Judge::find(), REAL_GPUS);
        let order = |line: &str| {
            let written = fs::write("/sys/kernel/debug/softgpu/faults", line);
            written.err().and_then(|error| error.raw_os_error())
        };
        for line in [
            " ",
            "of",
            "off 1",
            "count off",
            "nth=1",
            "errno=5",
            "kill=before",
            "count nth=1 errno=5",
            "count errno=5",
            "nth=0 errno=5",
            "nth=-1 errno=5",
            "nth=1 errno=0",
            "nth=1 errno=4096",
            "nth=1 errno=EIO",
            "nth=1 errno=5 kill=after",
            "nth=1 kill=now",
            "nth=1 nth=2 errno=5",
            "nth=1 errno=5 errno=5",
            "count comm=",
            "count comm=a comm=b",
            "count comm=0123456789abcdef",
            "count  comm=a",
            "count comm",
            "count who=a",
            &format!("count call={}", "x".repeat(200)),
        ] {
            assert_eq!(order(line), Some(libc::EINVAL), "{line:?}");
        }
        for call in
            ["kfd/NONE", "kfd/CRIU_OP/NONE", "kfd/", "CRIU_OP", "amdgpu/CRIU_OP", "kfd/CRIU_O", "drm/"]
        {
            assert_eq!(order(&format!("count call={call}")), Some(libc::ENOENT), "{call:?}");
        }
        for line in [
            "count",
            "count comm=0123456789abcde",
            "nth=1 errno=4095",
            "nth=18446744073709551615 kill=after",
            "nth=3 kill=before call=amdgpu/CS comm=criu",
            "count call=drm/PRIME_FD_TO_HANDLE",
            "count call=drm/SYNCOBJ_TIMELINE_WAIT",
            "count call=amdgpu/WAIT_CS",
            "count call=kfd/CRIU_OP/UNPAUSE",
            "off\n",
        ] {
            assert_eq!(order(line), None, "{line:?}");
        }
    });
}
