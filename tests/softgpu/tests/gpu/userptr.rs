// SPDX-License-Identifier: MIT OR Apache-2.0
//! Registered memory of the program: the GPU's view follows the program's changes. A page that is missing
//! under userfaultfd is an error, never a wait.

use std::os::fd::AsFd as _;

use gpu_app::chain::{Lane, Step};
use gpu_app::gpu::Gpus;
use gpu_app::kernel::Kernel;
use gpu_app::kfd::{Userptr, svm};
use rewake_amdgpu_uapi::abi::memory::Mapping;
use rewake_uffd::{FillPort as _, Uffd};
use softgpu_tests::isolated;

const PAGE: u64 = 4096;

fn copy(to: u64, from: u64) -> Step {
    Step { gpu: 0, queue: 0, kernel: Kernel::Copy { to, from, bytes: PAGE } }
}

/// Two pages that are missing, and watched by userfaultfd.
fn missing() -> (Uffd, Mapping) {
    let memory = Mapping::anonymous(2 * PAGE).unwrap();
    let uffd = Uffd::open(0).unwrap();
    uffd.register_missing(memory.address(), memory.len()).unwrap();
    (uffd, memory)
}

#[test]
fn a_gpu_reads_and_writes_the_programs_memory() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let mut lane = Lane::new(&gpus, 1, 1).unwrap();
        let from = gpus.registered(&[7; 4096]).unwrap();
        let to = gpus.registered(&[0; 4096]).unwrap();
        lane.run(&[copy(to.address(), from.address())]).unwrap();
        assert_eq!(
            (to.cpu().load64(0), to.cpu().load64(4088)),
            (0x0707_0707_0707_0707, 0x0707_0707_0707_0707)
        );
    });
}

#[test]
fn a_missing_page_refuses_registration_and_a_resident_does_not() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let mut lane = Lane::new(&gpus, 1, 1).unwrap();
        let to = gpus.host(PAGE).unwrap();
        let (uffd, memory) = missing();
        assert!(uffd.copy(memory.address(), &[3; 4096]).complete(PAGE));
        let (again, second) = missing();
        let error = Userptr::register(gpus.device(0), second).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EFAULT), "both pages missing: {error}");
        drop(again);
        assert!(uffd.copy(memory.address() + PAGE, &[4; 4096]).complete(PAGE));
        let userptr = Userptr::register(gpus.device(0), memory).unwrap();
        lane.run(&[copy(to.address(), userptr.address() + PAGE)]).unwrap();
        assert_eq!(to.cpu().load32(0), 0x0404_0404);
    });
}

#[test]
fn one_missing_page_of_two_refuses_registration() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let (uffd, memory) = missing();
        assert!(uffd.copy(memory.address(), &[3; 4096]).complete(PAGE));
        let error = Userptr::register(gpus.device(0), memory).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EFAULT), "{error}");
    });
}

#[test]
fn shared_memory_with_a_missing_page_is_refused_too() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let (uffd, memory) = missing();
        let result = svm::map_always(gpus.device(0), &memory);
        let expected = if gpus.device(0).node().has_svm() { libc::EFAULT } else { libc::EPERM };
        assert_eq!(result.unwrap_err().errno(), Some(expected));
        drop(uffd);
    });
}

#[test]
fn a_page_that_is_unmapped_and_accessed_again_is_followed() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let mut lane = Lane::new(&gpus, 1, 1).unwrap();
        let to = gpus.host(PAGE).unwrap();
        let from = gpus.registered(&[7; 4096]).unwrap();
        lane.run(&[copy(to.address(), from.address())]).unwrap();
        from.cpu().discard().unwrap();
        lane.run(&[copy(to.address(), from.address())]).unwrap();
        assert_eq!(to.cpu().load64(0), 0, "the new page");
        from.cpu().store64(0, 9);
        lane.run(&[copy(to.address(), from.address())]).unwrap();
        assert_eq!(to.cpu().load64(0), 9, "what the program wrote to the new page");
    });
}

#[test]
fn memory_moves_under_a_gpu_at_work() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let mut lane = Lane::new(&gpus, 1, 1).unwrap();
        let memory = gpus.registered(&vec![0; 1 << 20]).unwrap();
        // Adds 1 to each word, many times, while pages of another registered range are replaced. All queues
        // are evicted each time, and nothing may be lost or done twice.
        let ones = gpus.registered(&[1, 0, 0, 0].repeat(1 << 18)).unwrap();
        let other = gpus.registered(&[0; 4096]).unwrap();
        let sum = Kernel::Axpy { y: memory.address(), x: ones.address(), words: 1 << 18, a: 1 };
        let steps = [Step { gpu: 0, queue: 0, kernel: sum }; 8];
        lane.launch(&steps).unwrap();
        for round in 0..20 {
            other.cpu().store64(0, round);
            other.cpu().discard().unwrap();
        }
        lane.wait(steps.len()).unwrap();
        for at in [0, 4096, (1 << 20) - 4] {
            assert_eq!(memory.cpu().load32(at), 8, "at {at:#x}");
        }
    });
}

#[test]
fn shared_memory_is_used_in_place_where_the_kernel_can() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        if !gpus.device(0).node().has_svm() {
            let error = gpu_app::kfd::xnack(gpus.device(0).kfd()).unwrap_err();
            assert_eq!(error.errno(), Some(libc::EPERM));
            return;
        }
        let mut lane = Lane::new(&gpus, 1, 1).unwrap();
        let memory = Mapping::anonymous(2 * PAGE).unwrap();
        memory.write(0, &[5; 4096]);
        svm::map_always(gpus.device(0), &memory).unwrap();
        lane.run(&[copy(memory.address() + PAGE, memory.address())]).unwrap();
        assert_eq!(memory.load64(2 * PAGE - 8), 0x0505_0505_0505_0505);
        memory.discard().unwrap();
        lane.run(&[copy(memory.address() + PAGE, memory.address())]).unwrap();
        assert_eq!(memory.load64(PAGE), 0);
    });
}

#[test]
fn foreign_devices_are_no_memory_to_register() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let host = gpus.host(PAGE).unwrap();
        let render = gpus.device(0).render();
        let view = Mapping::shared(render.as_fd(), host.offset(), PAGE).unwrap();
        let error = Userptr::register(gpus.device(0), view).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EFAULT), "a device mapping: {error}");
    });
}
