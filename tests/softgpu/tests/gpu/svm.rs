// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ordinary memory that GPUs use in place: by attributes, and, with retry faults, by access alone. Kernels
//! without SVM skip these tests; `userptr.rs` checks that they report it.

use std::sync::Arc;

use gpu_app::chain::{Lane, Step};
use gpu_app::gpu::{Gpus, PATIENCE};
use gpu_app::kernel::Kernel;
use gpu_app::kfd::{QueueSpec, SdmaQueue, WaitOutcome, set_xnack, svm, xnack};
use rewake_amdgpu_uapi::abi::memory::Mapping;
use rewake_amdgpu_uapi::abi::{
    KFD_IOCTL_SVM_ATTR_ACCESS, KFD_IOCTL_SVM_ATTR_GRANULARITY, KFD_IOCTL_SVM_ATTR_NO_ACCESS,
    KFD_IOCTL_SVM_ATTR_PREFERRED_LOC, KFD_IOCTL_SVM_ATTR_PREFETCH_LOC, KFD_IOCTL_SVM_ATTR_SET_FLAGS,
    KFD_IOCTL_SVM_FLAG_GPU_RO, KFD_IOCTL_SVM_LOCATION_UNDEFINED,
};
use rewake_amdgpu_uapi::packet::Sdma;
use rewake_skip::need;
use rewake_uffd::{FillPort as _, Uffd};
use softgpu_tests::isolated;

const PAGE: u64 = 4096;

/// One GPU whose memory can be shared this way.
fn shared_gpu() -> Result<Arc<Gpus>, &'static str> {
    let gpus = Gpus::open(1).unwrap();
    let able = gpus.device(0).node().has_svm();
    able.then_some(gpus).ok_or("this kernel shares no memory by attributes (SVM)")
}

/// The same, with retry faults on, on chips that have them.
fn retrying_gpu() -> Result<Arc<Gpus>, &'static str> {
    let gpus = shared_gpu()?;
    set_xnack(gpus.device(0).kfd(), true).map(|()| gpus).map_err(|_| "this chip has no retry faults")
}

fn copy(to: u64, from: u64) -> Step {
    Step { gpu: 0, queue: 0, kernel: Kernel::Copy { to, from, bytes: PAGE } }
}

fn share(gpus: &Gpus, start: u64, size: u64) {
    let access = [(KFD_IOCTL_SVM_ATTR_ACCESS, gpus.device(0).gpu_id())];
    svm::set(gpus.device(0).kfd(), start, size, &access).unwrap();
}

/// Two adjacent mappings of two pages, so that one of them can be unmapped.
fn neighbours() -> (Mapping, Mapping) {
    let room = Mapping::reserve(4 * PAGE).unwrap();
    let start = room.address();
    drop(room);
    (
        Mapping::anonymous_at(start, 2 * PAGE).unwrap(),
        Mapping::anonymous_at(start + 2 * PAGE, 2 * PAGE).unwrap(),
    )
}

/// A copy engine writes to an unmapped address: the fault is reported.
fn write_faults(gpus: &Arc<Gpus>, address: u64) {
    let mut queue = SdmaQueue::new(gpus.device(0), gpus.doorbells(0), QueueSpec::default()).unwrap();
    queue.submit(Sdma::new().fill(address, 0, 64).bytes(), PATIENCE).unwrap();
    let outcome = gpus.events().wait(&[gpus.fault()], 30_000).unwrap();
    assert_eq!(outcome, WaitOutcome::Fault { gpu: gpus.device(0).gpu_id(), address });
}

#[test]
fn attributes_are_those_that_were_set() {
    isolated(1, |_| {
        let gpus = need!(shared_gpu());
        let kfd = gpus.device(0).kfd();
        let memory = Mapping::anonymous(4 * PAGE).unwrap();
        let wanted = [
            KFD_IOCTL_SVM_ATTR_PREFERRED_LOC,
            KFD_IOCTL_SVM_ATTR_PREFETCH_LOC,
            KFD_IOCTL_SVM_ATTR_SET_FLAGS,
            KFD_IOCTL_SVM_ATTR_GRANULARITY,
        ];
        let values = |start| {
            let all = svm::get(kfd, start, PAGE, &wanted).unwrap();
            all.iter().map(|(_, value)| *value).collect::<Vec<_>>()
        };
        let nowhere = KFD_IOCTL_SVM_LOCATION_UNDEFINED;
        assert_eq!(values(memory.address()), [nowhere, nowhere, 3, 9], "of memory without attributes");
        let flags = [(KFD_IOCTL_SVM_ATTR_SET_FLAGS, KFD_IOCTL_SVM_FLAG_GPU_RO)];
        svm::set(kfd, memory.address() + PAGE, PAGE, &flags).unwrap();
        assert_eq!(values(memory.address() + PAGE), [nowhere, nowhere, 11, 9]);
        assert_eq!(values(memory.address() + 2 * PAGE), [nowhere, nowhere, 3, 9], "of the next page");
    });
}

#[test]
fn gpus_cannot_access_unmapped_memory_and_can_the_rest() {
    isolated(1, |_| {
        let gpus = need!(shared_gpu());
        let mut lane = Lane::new(&gpus, 1, 1).unwrap();
        let (first, second) = neighbours();
        share(&gpus, first.address(), 4 * PAGE);
        first.write(0, &[6; 4096]);
        lane.run(&[copy(second.address() + PAGE, first.address())]).unwrap();
        assert_eq!(second.load32(2 * PAGE - 4), 0x0606_0606);
        let gone = second.address();
        drop(second);
        lane.run(&[copy(first.address() + PAGE, first.address())]).unwrap();
        assert_eq!(first.load32(2 * PAGE - 4), 0x0606_0606);
        write_faults(&gpus, gone);
    });
}

#[test]
fn access_is_taken_from_a_part() {
    isolated(1, |_| {
        let gpus = need!(shared_gpu());
        let mut lane = Lane::new(&gpus, 1, 1).unwrap();
        let memory = Mapping::anonymous(3 * PAGE).unwrap();
        share(&gpus, memory.address(), 3 * PAGE);
        let none = [(KFD_IOCTL_SVM_ATTR_NO_ACCESS, gpus.device(0).gpu_id())];
        svm::set(gpus.device(0).kfd(), memory.address() + PAGE, PAGE, &none).unwrap();
        memory.write(0, &[9; 4096]);
        lane.run(&[copy(memory.address() + 2 * PAGE, memory.address())]).unwrap();
        assert_eq!(memory.load32(3 * PAGE - 4), 0x0909_0909);
        write_faults(&gpus, memory.address() + PAGE);
    });
}

#[test]
fn with_retry_faults_an_access_is_enough() {
    isolated(1, |_| {
        let gpus = need!(retrying_gpu());
        assert!(xnack(gpus.device(0).kfd()).unwrap());
        let mut lane = Lane::new(&gpus, 1, 1).unwrap();
        let memory = Mapping::anonymous(2 * PAGE).unwrap();
        memory.write(0, &[4; 4096]);
        lane.run(&[copy(memory.address() + PAGE, memory.address())]).unwrap();
        assert_eq!(memory.load32(2 * PAGE - 4), 0x0404_0404);
        memory.discard().unwrap();
        lane.run(&[copy(memory.address() + PAGE, memory.address())]).unwrap();
        assert_eq!(memory.load32(PAGE), 0, "the old pages were unmapped");
        let refused = set_xnack(gpus.device(0).kfd(), false).unwrap_err();
        assert_eq!(refused.errno(), Some(libc::EBUSY), "there are queues");
    });
}

#[test]
fn a_retry_fault_never_waits_for_userfaultfd() {
    isolated(1, |_| {
        let gpus = need!(retrying_gpu());
        let memory = Mapping::anonymous(PAGE).unwrap();
        let uffd = Uffd::open(0).unwrap();
        uffd.register_missing(memory.address(), memory.len()).unwrap();
        write_faults(&gpus, memory.address());
        assert!(uffd.copy(memory.address(), &[1; 4096]).complete(PAGE), "and it stays missing");
    });
}
