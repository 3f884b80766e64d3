// SPDX-License-Identifier: MIT OR Apache-2.0
//! Defects that the judge alone would notice: a gate that does not hold, a descriptor that is never closed.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use gpu_app::chain::{Lane, Step};
use gpu_app::gpu::Gpus;
use gpu_app::kernel::Kernel;
use rewake_amdgpu_uapi::criu;
use rewake_skip::need;
use rewake_testkit::soon;
use softgpu_tests::{Judge, REAL_GPUS, isolated, sys};

/// Longer than the judge lets a descriptor be in transit, on a machine with three GPUs.
const UNCLOSED: Duration = Duration::from_millis(4500);

#[test]
fn a_queue_that_runs_while_the_process_is_paused_is_reported() {
    isolated(1, |_| {
        let judge = need!(Judge::find(), REAL_GPUS);
        let gpus = Gpus::open(1).unwrap();
        let mut lane = Lane::new(&gpus, 1, 1).unwrap();
        let out = gpus.host(4096).unwrap();
        let kfd = Arc::clone(gpus.device(0).kfd());
        criu::process_info(kfd.as_fd()).unwrap();
        let kernel = Kernel::Fill { to: out.address(), words: 1024, value: 9 };
        lane.launch(&[Step { gpu: 0, queue: 0, kernel }]).unwrap();
        thread::sleep(Duration::from_millis(50));
        assert_eq!(out.cpu().load32(0), 0, "the gate holds");
        assert_eq!(judge.violations(), Vec::<String>::new());
        judge.break_gate(std::process::id(), lane.queues(0)[0].id());
        while out.cpu().load32(4092) != 9 {
            thread::sleep(Duration::from_millis(1));
        }
        criu::unpause(kfd.as_fd()).unwrap();
        let pid = format!(" {} ", std::process::id());
        assert!(judge.take("queue-ran-gated").iter().all(|line| line.contains(&pid)));
    });
}

#[test]
fn a_descriptor_that_alone_keeps_memory_is_reported() {
    isolated(1, |scene| {
        let judge = need!(Judge::find(), REAL_GPUS);
        if scene.role().is_some() {
            let gpus = Gpus::open(1).unwrap();
            let own = gpus.local(0, 4096).unwrap();
            let dmabuf = own.export().unwrap();
            scene.say(&dmabuf.as_raw_fd().to_string());
            let _ = scene.hear();
            return;
        }
        for import in [true, false] {
            let mut owner = scene.peer("owner");
            let number = owner.hear().parse().unwrap();
            let dmabuf = sys::descriptor_of(owner.pid(), number).unwrap();
            let gpus = import.then(|| Gpus::open(1).unwrap());
            let imported = gpus.as_ref().map(|gpus| gpus.import(dmabuf.as_fd()).unwrap());
            let processes = judge.alive()["processes"];
            owner.kill();
            if imported.is_some() {
                // The driver releases it in the background; from then on the judge would count.
                assert!(soon(|| judge.alive()["processes"] < processes), "{:?}", judge.alive());
                thread::sleep(UNCLOSED);
                assert_eq!(judge.violations(), Vec::<String>::new(), "it has another user");
            } else {
                // If no leak is reported, `take` fails.
                let _ = soon(|| !judge.violations().is_empty());
                assert_eq!(judge.take("leak").len(), 1);
            }
        }
    });
}
