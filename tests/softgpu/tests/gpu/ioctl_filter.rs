// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls that register memory wait until it is resident, where the kernel can delay them. Elsewhere they
//! fail: `userptr.rs`. The filter blocks other calls of marked processes.

use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::FileExt as _;
use std::thread;
use std::time::{Duration, Instant};

use gpu_app::gpu::Gpus;
use gpu_app::kfd::{Buffer, QueueSpec, SdmaQueue, Spec, Userptr, svm};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rewake_amdgpu_uapi::Kfd;
use rewake_amdgpu_uapi::abi::drm::gem_userptr;
use rewake_amdgpu_uapi::abi::memory::Mapping;
use rewake_amdgpu_uapi::abi::{IOC_EXPORT_DMABUF, KFD_IOCTL_SVM_ATTR_ACCESS};
use rewake_amdgpu_uapi::render::Render;
use rewake_ioctl_filter::{ACCESS, CREATE_PROCESS, CROSS_COPY, EXPORT};
use rewake_skip::skip;
use rewake_uffd::{FillPort as _, Uffd};
use softgpu_tests::sys::{descriptor_of, misuse_at, protect};
use softgpu_tests::{Scene, isolated};

const PAGE: u64 = 4096;
/// CREATE_PROCESS, `_IO('K', 0x27)`.
const NEW_PROCESS: u32 = 0x4b27;
/// CROSS_MEMORY_COPY of ROCm's own driver, `_IO('K', 0x83)`.
const CROSS_MEMORY_COPY: u32 = 0x4b83;
const PAGES: u64 = 5;
const ALL: [u64; 5] = [0, 1, 2, 3, 4];

/// Makes a call with memory of which these pages are watched and missing. Fills each page when the call waits
/// for it.
fn waits<T: Send>(watched: &[u64], call: impl FnOnce(Mapping) -> T + Send) -> T {
    let memory = Mapping::anonymous(PAGES * PAGE).unwrap();
    let address = memory.address();
    let uffd = Uffd::open(0).unwrap();
    watched.iter().for_each(|page| uffd.register_missing(address + page * PAGE, PAGE).unwrap());
    thread::scope(|scope| {
        let calling = scope.spawn(|| call(memory));
        for (at, page) in watched.iter().enumerate() {
            let is_waited_for = has_page_fault(&uffd, 60_000);
            if !is_waited_for || calling.is_finished() {
                let ended = calling.is_finished();
                // Otherwise the call waits for them, and this thread for the call.
                watched[at..].iter().for_each(|page| {
                    uffd.copy(address + page * PAGE, &[7; 4096]);
                });
                panic!("the call does not wait for page {page}; the call has ended: {ended}");
            }
            assert!(uffd.copy(address + page * PAGE, &[7; 4096]).complete(PAGE));
        }
        calling.join().unwrap()
    })
}

/// Returns whether a thread has a page fault within some milliseconds.
fn has_page_fault(uffd: &Uffd, limit: u16) -> bool {
    poll(&mut [PollFd::new(uffd.as_fd(), PollFlags::POLLIN)], PollTimeout::from(limit)).unwrap() == 1
}

#[test]
fn a_registration_waits_for_missing_memory() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let _hold = rewake_ioctl_filter::attach().unwrap();
        let memory = waits(&ALL, |memory| Userptr::register(gpus.device(0), memory).unwrap());
        assert_eq!(memory.cpu().load32((PAGES - 1) * PAGE), 0x0707_0707);
    });
}

#[test]
fn setting_attributes_waits_for_missing_memory() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        if !gpus.device(0).node().has_svm() {
            skip!("this kernel shares no memory by attributes (SVM)");
        }
        let _hold = rewake_ioctl_filter::attach().unwrap();
        let access = [(KFD_IOCTL_SVM_ATTR_ACCESS, gpus.device(0).gpu_id())];
        waits(&ALL, |memory| {
            svm::set(gpus.device(0).kfd(), memory.address(), memory.len(), &access).unwrap();
            memory
        });
    });
}

#[test]
fn render_node_calls_wait_for_missing_memory() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let render = Render::open(gpus.device(0).node().render_minor()).unwrap();
        let _hold = rewake_ioctl_filter::attach().unwrap();
        waits(&ALL, |memory| {
            render.userptr(&memory).unwrap();
            memory
        });
    });
}

#[test]
fn calls_wait_for_watched_pages_between_unwatched_mappings() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let _hold = rewake_ioctl_filter::attach().unwrap();
        for watched in [&[2][..], &[1, 3], &[0, 4]] {
            let memory = waits(watched, |memory| Userptr::register(gpus.device(0), memory).unwrap());
            for page in ALL {
                let expected = if watched.contains(&page) { 0x0707_0707 } else { 0 };
                assert_eq!(memory.cpu().load32(page * PAGE), expected, "page {page} of {watched:?}");
            }
        }
    });
}

#[test]
fn a_call_waits_while_another_thread_changes_mappings() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let _hold = rewake_ioctl_filter::attach().unwrap();
        thread::scope(|scope| {
            let calls = scope.spawn(|| {
                for _ in 0..100 {
                    waits(&[1, 3], |memory| Userptr::register(gpus.device(0), memory).unwrap());
                }
            });
            while !calls.is_finished() {
                Mapping::anonymous(PAGE).unwrap().populate().unwrap();
            }
        });
    });
}

const GIB: u64 = 1 << 30;
/// Bit 63 of an entry of `/proc/self/pagemap`: the page is present, also if it is the zero page.
const PRESENT: u64 = 1 << 63;

/// Returns how many pages of a GiB of this process's memory are present.
fn present(address: u64) -> usize {
    let mut entries = vec![0; usize::try_from(GIB / PAGE * 8).unwrap()];
    File::open("/proc/self/pagemap").unwrap().read_exact_at(&mut entries, address / PAGE * 8).unwrap();
    let entries = entries.chunks_exact(8).map(|entry| u64::from_ne_bytes(entry.try_into().unwrap()));
    entries.filter(|entry| entry & PRESENT != 0).count()
}

/// Makes a call that names a range, and that the driver refuses before it reads the range.
fn call_in_vain(render: &Render, memory: &Mapping) {
    assert_eq!(gem_userptr(render.as_fd(), memory, 0).unwrap_err().raw_os_error(), Some(libc::EACCES));
}

/// A page fault for each page would take hours.
#[test]
fn an_unwatched_range_costs_one_check_for_each_mapping() {
    isolated(1, |_| {
        /// The limit of 20 calls, emulated.
        const LIMIT: Duration = Duration::from_secs(2);
        let gpus = Gpus::open(1).unwrap();
        let render = gpus.device(0).render();
        let memory = Mapping::reserve(1024 * GIB).unwrap();
        assert_eq!(protect(&memory, libc::PROT_READ | libc::PROT_WRITE), 0);
        let time = || {
            let start = Instant::now();
            (0..20).for_each(|_| call_in_vain(render, &memory));
            start.elapsed()
        };
        let without = time();
        let _hold = rewake_ioctl_filter::attach().unwrap();
        let with = time();
        assert!(with < without + LIMIT, "{with:?}, and {without:?} without the filter");
        assert_eq!([present(memory.address()), present(memory.address() + 1023 * GIB)], [0, 0]);
    });
}

/// Bytes of a page that all read accesses of unwritten memory share, where the range allows it.
const HUGE: u64 = 2 << 20;
/// Resident memory whose pages a call reads for more than a second, and that the kernel unmaps at once.
const RESIDENT: u64 = 32 * GIB;

/// Makes calls with watched memory whose pages are missing, or resident.
fn call_with_watched(scene: &Scene, is_missing: bool) {
    let gpus = Gpus::open(1).unwrap();
    let render = gpus.device(0).render();
    let memory = Mapping::reserve(RESIDENT + HUGE).unwrap();
    assert_eq!(protect(&memory, libc::PROT_READ | libc::PROT_WRITE), 0);
    let start = memory.address().next_multiple_of(HUGE);
    let uffd = Uffd::open(0).unwrap();
    if is_missing {
        uffd.register_missing(start, RESIDENT).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| call_in_vain(render, &memory));
            assert!(has_page_fault(&uffd, 60_000));
            scene.say("waits");
        });
    }
    let own = File::open("/proc/self/mem").unwrap();
    for page in (start..start + RESIDENT).step_by(HUGE.try_into().unwrap()) {
        own.read_exact_at(&mut [0], page).unwrap();
    }
    assert_eq!(present(start) as u64, GIB / PAGE, "this kernel has no huge zero page");
    uffd.register_missing(start, RESIDENT).unwrap();
    let began = Instant::now();
    call_in_vain(render, &memory);
    scene.say(&began.elapsed().as_millis().to_string());
    call_in_vain(render, &memory);
}

#[test]
fn a_process_that_is_killed_in_a_waiting_call_ends() {
    isolated(1, |scene| {
        if let Some(role) = scene.role() {
            return call_with_watched(scene, role == "missing");
        }
        let _hold = rewake_ioctl_filter::attach().unwrap();
        let mut missing = scene.peer("missing");
        assert_eq!(missing.hear(), "waits");
        missing.kill();
        let mut resident = scene.peer("resident");
        let call = Duration::from_millis(resident.hear().parse().unwrap());
        // The second call has begun.
        thread::sleep(call / 10);
        let killed = Instant::now();
        resident.kill();
        let took = killed.elapsed();
        assert!(took < call / 2, "the call continued: {took:?} of {call:?}");
    });
}

/// Succeeds where a hook has no room for one more program.
#[test]
fn a_check_attaches_nothing() {
    isolated(1, |_| {
        /// `BPF_MAX_TRAMP_LINKS`
        const MOST: usize = 38;
        let attached: Vec<_> = std::iter::from_fn(|| rewake_ioctl_filter::attach().ok()).collect();
        assert!((1..=MOST).contains(&attached.len()), "{} filters are attached", attached.len());
        rewake_ioctl_filter::check().unwrap();
    });
}

#[test]
fn unmapped_memory_is_refused_by_the_driver() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let refused =
            || Userptr::register(gpus.device(0), Mapping::reserve(2 * PAGE).unwrap()).unwrap_err().errno();
        let plain = refused();
        let _hold = rewake_ioctl_filter::attach().unwrap();
        assert_eq!(refused(), plain);
    });
}

#[test]
fn unwatched_memory_is_registered_without_a_wait() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let (hold, _) = rewake_ioctl_filter::attach().unwrap();
        let (uffd, missing) = (Uffd::open(0).unwrap(), Mapping::anonymous(PAGE).unwrap());
        uffd.register_missing(missing.address(), PAGE).unwrap();
        drop(gpus.registered(&[7; 4096]).unwrap());
        drop(gpus.host(PAGE).unwrap());
        drop(hold);
        // The filter delays no call any more.
        let error = Userptr::register(gpus.device(0), missing).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EFAULT));
    });
}

/// The result of an export: an errno, 0 for none.
fn export(buffer: &Buffer) -> i32 {
    buffer.export().err().map_or(0, |error| error.errno().unwrap())
}

fn buffer(gpus: &Gpus, gpu: usize) -> Buffer {
    Buffer::mapped(gpus.device(gpu), Spec::gtt(PAGE)).unwrap()
}

#[test]
fn calls_of_a_marked_process_are_blocked() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let (device, mut buffer) = (gpus.device(0), buffer(&gpus, 0));
        let kfd = device.kfd().as_fd();
        let (_hold, marks) = rewake_ioctl_filter::attach().unwrap();
        let queue = || SdmaQueue::new(device, gpus.doorbells(0), QueueSpec::default());
        let before = queue().unwrap();
        let gpu = [device.gpu_id()];
        buffer.unmap(&gpu).unwrap();
        let mut calls = || {
            let others = [buffer.map(&gpu), queue().map(drop), before.update(100, 7)];
            assert!(others.iter().all(Result::is_ok), "calls that no rule names: {others:?}");
            let misused = [NEW_PROCESS, CROSS_MEMORY_COPY].map(|call| misuse_at(kfd, call, 0));
            [export(&buffer), misused[0], misused[1]]
        };
        let plain = calls();
        assert!(plain[0] == 0 && !plain.contains(&libc::EAGAIN), "{plain:?}");
        // The mark is of the process: calls of another open file do not count.
        let other = Kfd::open().unwrap();
        let blocked = |calls: &[usize]| {
            let mut expected = plain;
            calls.iter().for_each(|call| expected[*call] = libc::EAGAIN);
            expected
        };
        let all = [
            (gpu[0], EXPORT, blocked(&[0])),
            (0, CREATE_PROCESS, blocked(&[1])),
            (0, CROSS_COPY, blocked(&[2])),
            (0, CREATE_PROCESS | CROSS_COPY, blocked(&[1, 2])),
            // A class counts in its own part only.
            (0, EXPORT, plain),
            (gpu[0], CREATE_PROCESS | CROSS_COPY, plain),
        ];
        for (part, classes, expected) in all {
            marks.block(other.as_fd(), part, classes).unwrap();
            for _ in 0..3 {
                assert_eq!(calls(), expected);
            }
            marks.unblock(kfd, part).unwrap();
            assert_eq!(calls(), plain);
        }
        marks.block(kfd, gpu[0], EXPORT).unwrap();
        marks.block(kfd, 0, CREATE_PROCESS | CROSS_COPY).unwrap();
        assert_eq!(calls(), blocked(&[0, 1, 2]));
        marks.block(kfd, 0, CROSS_COPY).unwrap();
        assert_eq!(calls(), blocked(&[0, 2]));
    });
}

#[test]
fn no_access_is_given_to_mappings_of_a_marked_file() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let device = gpus.device(0);
        let hidden = |device| {
            let mut buffer = Buffer::alloc(device, Spec::gtt(PAGE)).unwrap();
            buffer.map_cpu_without_access().unwrap();
            buffer
        };
        let (buffer, shown) = (hidden(device), buffer(&gpus, 0));
        let other = Mapping::anonymous(PAGE).unwrap();
        let (_hold, marks) = rewake_ioctl_filter::attach().unwrap();
        let (none, read, all) = (libc::PROT_NONE, libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE);
        marks.block(device.render().as_fd(), 0, ACCESS).unwrap();
        for rights in [read, libc::PROT_WRITE, libc::PROT_EXEC, all] {
            assert_eq!(protect(buffer.cpu(), rights), libc::EAGAIN);
        }
        // Mappings without access, and of other files, are not refused.
        assert_eq!(
            [protect(buffer.cpu(), none), protect(shown.cpu(), read), protect(shown.cpu(), all)],
            [0; 3]
        );
        assert_eq!([protect(&other, none), protect(&other, read)], [0; 2]);
        marks.unblock(device.render().as_fd(), 0).unwrap();
        assert_eq!(protect(buffer.cpu(), all), 0);
        // Other kinds of argument belong to other calls.
        assert_eq!(protect(buffer.cpu(), none), 0);
        marks.block(device.render().as_fd(), 0, EXPORT | CROSS_COPY).unwrap();
        assert_eq!(protect(buffer.cpu(), all), 0);
    });
}

#[test]
fn a_marked_process_stays_the_one_that_is_marked() {
    isolated(1, |_| {
        let kfd = Kfd::open().unwrap();
        let replace = || misuse_at(kfd.as_fd(), NEW_PROCESS, 0);
        let plain = replace();
        assert_ne!(plain, libc::EAGAIN);
        let (_hold, marks) = rewake_ioctl_filter::attach().unwrap();
        marks.block(kfd.as_fd(), 0, CREATE_PROCESS).unwrap();
        assert_eq!(replace(), libc::EAGAIN);
        marks.unblock(kfd.as_fd(), 0).unwrap();
        assert_eq!(replace(), plain);
    });
}

#[test]
fn calls_of_unmarked_processes_are_not_blocked() {
    isolated(1, |scene| {
        let gpus = Gpus::open(1).unwrap();
        let buffer = buffer(&gpus, 0);
        let kfd = gpus.device(0).kfd().as_fd();
        if scene.role().is_some() {
            scene.say(&kfd.as_raw_fd().to_string());
            while scene.hear() == "export" {
                scene.say(&export(&buffer).to_string());
            }
            return;
        }
        let (_hold, marks) = rewake_ioctl_filter::attach().unwrap();
        let mut peer = scene.peer("marked");
        let its = descriptor_of(peer.pid(), peer.hear().parse().unwrap()).unwrap();
        let mut exports = || {
            peer.say("export");
            (peer.hear(), export(&buffer))
        };
        let gpu = gpus.device(0).gpu_id();
        marks.block(its.as_fd(), gpu, EXPORT).unwrap();
        assert_eq!(exports(), (libc::EAGAIN.to_string(), 0));
        marks.unblock(its.as_fd(), gpu).unwrap();
        assert_eq!(exports(), ("0".to_owned(), 0));
        peer.say("end");
        peer.finish();
    });
}

#[test]
fn other_gpus_of_a_marked_process_continue() {
    isolated(2, |_| {
        let gpus = Gpus::open(2).unwrap();
        let buffers = [0, 1].map(|gpu| buffer(&gpus, gpu));
        let (kfd, gpu) = (gpus.device(1).kfd().as_fd(), gpus.device(1).gpu_id());
        let (_hold, marks) = rewake_ioctl_filter::attach().unwrap();
        marks.block(kfd, gpu, EXPORT).unwrap();
        assert_eq!(buffers.each_ref().map(export), [0, libc::EAGAIN]);
        marks.unblock(kfd, gpu).unwrap();
        assert_eq!(buffers.each_ref().map(export), [0, 0]);
    });
}

#[test]
fn an_argument_that_cannot_be_read_is_the_driver_s_to_refuse() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let kfd = gpus.device(0).kfd().as_fd();
        let (_hold, marks) = rewake_ioctl_filter::attach().unwrap();
        // 0: the value that a part that was not read might be taken for.
        for part in [0, gpus.device(0).gpu_id()] {
            marks.block(kfd, part, EXPORT).unwrap();
        }
        assert_eq!(misuse_at(kfd, IOC_EXPORT_DMABUF, 0), libc::EFAULT);
        assert_eq!(misuse_at(kfd, IOC_EXPORT_DMABUF, u64::MAX - 7), libc::EFAULT);
    });
}

#[test]
fn marks_are_those_of_one_hold() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let buffer = buffer(&gpus, 0);
        let (kfd, gpu) = (gpus.device(0).kfd().as_fd(), gpus.device(0).gpu_id());
        let (hold, marks) = rewake_ioctl_filter::attach().unwrap();
        let (_other, others) = rewake_ioctl_filter::attach().unwrap();
        marks.block(kfd, gpu, EXPORT).unwrap();
        // A process with another number opens nothing.
        others.unblock(kfd, gpu).unwrap();
        assert_eq!(export(&buffer), libc::EAGAIN);
        drop(hold);
        assert_eq!(export(&buffer), 0);
        assert!(matches!(marks.block(kfd, gpu, EXPORT), Err(rewake_ioctl_filter::Error::NotAttached(_))));
        assert_eq!(export(&buffer), 0);
    });
}

#[test]
fn the_number_of_marks_is_limited() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let kfd = gpus.device(0).kfd().as_fd();
        let (_hold, marks) = rewake_ioctl_filter::attach().unwrap();
        let full = |part| matches!(marks.block(kfd, part, CROSS_COPY), Err(rewake_ioctl_filter::Error::Full));
        for part in 0..rewake_ioctl_filter::MAX_BLOCKS {
            marks.block(kfd, part, EXPORT).unwrap();
        }
        assert!(full(rewake_ioctl_filter::MAX_BLOCKS));
        // An existing mark may change.
        marks.block(kfd, 7, CROSS_COPY).unwrap();
        marks.unblock(kfd, 7).unwrap();
        assert!(!full(rewake_ioctl_filter::MAX_BLOCKS));
    });
}
