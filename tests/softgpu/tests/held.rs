// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls that register memory wait until it is there, where the kernel can be made to hold them. That they fail otherwise is seen in
//! `userptr.rs`.

use std::os::fd::AsFd as _;
use std::thread;

use gpu_app::gpu::Gpus;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rewake_kfd::abi::KFD_IOCTL_SVM_ATTR_ACCESS;
use rewake_kfd::abi::memory::Mapping;
use rewake_kfd::render::Render;
use rewake_kfd::{Userptr, held, svm};
use rewake_uffd::{FillPort as _, Uffd};
use softgpu_tests::isolated;

const PAGE: u64 = 4096;
const PAGES: u64 = 5;

/// Calls it with memory that is missing, and brings each page when it is waited for.
fn waits<T: Send>(call: impl FnOnce(Mapping) -> T + Send) -> T {
    let memory = Mapping::anonymous(PAGES * PAGE).unwrap();
    let address = memory.address();
    let uffd = Uffd::open(0).unwrap();
    uffd.register_missing(address, PAGES * PAGE).unwrap();
    thread::scope(|scope| {
        let calling = scope.spawn(|| call(memory));
        for page in 0..PAGES {
            let mut waited_for = [PollFd::new(uffd.as_fd(), PollFlags::POLLIN)];
            let asked = poll(&mut waited_for, PollTimeout::from(60_000_u16)).unwrap();
            if asked != 1 || calling.is_finished() {
                let ended = calling.is_finished();
                // It would wait for them for ever, and this for it.
                (page..PAGES).for_each(|page| {
                    uffd.copy(address + page * PAGE, &[7; 4096]);
                });
                panic!("page {page} is not waited for; the call has ended: {ended}");
            }
            assert!(uffd.copy(address + page * PAGE, &[7; 4096]).complete(PAGE));
        }
        calling.join().unwrap()
    })
}

#[test]
fn memory_that_is_registered_is_waited_for() {
    isolated("memory_that_is_registered_is_waited_for", 1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let _hold = held::registering().unwrap();
        let memory = waits(|memory| Userptr::register(gpus.device(0), memory).unwrap());
        assert_eq!(memory.cpu().load32((PAGES - 1) * PAGE), 0x0707_0707);
    });
}

#[test]
fn memory_with_attributes_is_waited_for() {
    isolated("memory_with_attributes_is_waited_for", 1, |_| {
        let gpus = Gpus::open(1).unwrap();
        if !gpus.device(0).node().has_svm() {
            return;
        }
        let _hold = held::registering().unwrap();
        let access = [(KFD_IOCTL_SVM_ATTR_ACCESS, gpus.device(0).gpu_id())];
        waits(|memory| {
            svm::set(gpus.device(0).kfd(), memory.address(), memory.len(), &access).unwrap();
            memory
        });
    });
}

#[test]
fn memory_of_render_nodes_is_waited_for() {
    isolated("memory_of_render_nodes_is_waited_for", 1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let render = Render::open(gpus.device(0).node().render_minor()).unwrap();
        let _hold = held::registering().unwrap();
        waits(|memory| {
            render.userptr(&memory).unwrap();
            memory
        });
    });
}

#[test]
fn what_is_not_there_at_all_is_the_driver_s_to_refuse() {
    isolated("what_is_not_there_at_all_is_the_driver_s_to_refuse", 1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let refused =
            || Userptr::register(gpus.device(0), Mapping::reserve(2 * PAGE).unwrap()).unwrap_err().errno();
        let plain = refused();
        let _hold = held::registering().unwrap();
        assert_eq!(refused(), plain);
    });
}

#[test]
fn other_memory_is_registered_as_ever() {
    isolated("other_memory_is_registered_as_ever", 1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let hold = held::registering().unwrap();
        let (uffd, missing) = (Uffd::open(0).unwrap(), Mapping::anonymous(PAGE).unwrap());
        uffd.register_missing(missing.address(), PAGE).unwrap();
        drop(gpus.registered(&[7; 4096]).unwrap());
        drop(gpus.host(PAGE).unwrap());
        drop(hold);
        // Held no more.
        let error = Userptr::register(gpus.device(0), missing).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EFAULT));
    });
}
