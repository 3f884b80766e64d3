// SPDX-License-Identifier: MIT OR Apache-2.0
//! Invalid calls fail with the errno that the real drivers return. A case is an ioctl's number, its argument,
//! and that errno; sources: `kfd_chardev.c`, `kfd_queue.c`, `amdgpu_gem.c`, `amdgpu_ctx.c`, `amdgpu_cs.c` of
//! Linux 7.2.

use std::os::fd::{AsFd as _, BorrowedFd};

use gpu_app::kfd::{Buffer, Device, Spec};
use rewake_amdgpu_uapi::Kfd;
use rewake_amdgpu_uapi::abi::memory::Mapping;
use rewake_amdgpu_uapi::abi::*;
use rewake_amdgpu_uapi::render::Render;
use rewake_amdgpu_uapi::topology::Topology;
use softgpu_tests::{isolated, sys};

/// The kernel's own errno, which libc does not name.
const ENOTSUPP: i32 = 524;
/// Addresses that no program has memory at: the first page, kernel memory, and a non-canonical address.
const WILD: [u64; 4] = [8, 0xffff_8000_0000_1000, 0x8000_0000_0000_0000, u64::MAX - 7];

/// A struct's bytes, written field by field.
#[derive(Clone)]
struct Bytes(Vec<u8>);

fn zeros(size: usize) -> Bytes {
    Bytes(vec![0; size])
}

impl Bytes {
    fn u32(mut self, at: usize, value: u32) -> Self {
        self.0[at..at + 4].copy_from_slice(&value.to_le_bytes());
        self
    }

    fn u64(mut self, at: usize, value: u64) -> Self {
        self.0[at..at + 8].copy_from_slice(&value.to_le_bytes());
        self
    }
}

type Case = (&'static str, u32, Bytes, i32);

fn check(fd: BorrowedFd<'_>, arena: &Mapping, cases: &[Case]) {
    let mut wrong = Vec::new();
    for (what, number, bytes, right) in cases {
        let found = sys::misuse(fd, *number, &mut bytes.0.clone(), &[arena]);
        if found != *right {
            wrong.push(format!("{what}: errno {found}, expected {right}"));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn invalid_addresses_are_refused_at_once() {
    isolated(1, |_| {
        let kfd = Kfd::open().unwrap();
        let render = Render::open(Topology::read().unwrap().gpus().next().unwrap().render_minor()).unwrap();
        for address in WILD {
            for number in
                [IOC_GET_VERSION, IOC_CREATE_QUEUE, IOC_ALLOC_MEMORY_OF_GPU, IOC_CRIU_OP, IOC_WAIT_EVENTS]
            {
                assert_eq!(
                    sys::misuse_at(kfd.as_fd(), number, address),
                    libc::EFAULT,
                    "{number:#x} {address:#x}"
                );
            }
            for number in [DRM_AMD_INFO, DRM_AMD_GEM_CREATE, DRM_AMD_CS, DRM_AMD_GEM_VA] {
                assert_eq!(
                    sys::misuse_at(render.as_fd(), number, address),
                    libc::EFAULT,
                    "{number:#x} {address:#x}"
                );
            }
        }
    });
}

#[test]
fn invalid_numbers_are_refused() {
    isolated(1, |_| {
        let arena = Mapping::anonymous(1 << 16).unwrap();
        let kfd = Kfd::open().unwrap();
        let cases: Vec<Case> = vec![
            ("number 0", 0xc008_4b00, zeros(8), libc::ENOTTY),
            ("number 0x2b", 0xc008_4b2b, zeros(8), libc::ENOTTY),
            ("number 0xff", 0xc008_4bff, zeros(8), libc::ENOTTY),
            // The driver checks the last byte alone: it ignores type and direction.
            ("GET_VERSION of another letter", 0x8008_5801, zeros(8), 0),
            ("GET_VERSION of four bytes", 0x8004_4b01, zeros(4), 0),
            ("GET_VERSION of 128 bytes", 0x8080_4b01, zeros(128), 0),
        ];
        check(kfd.as_fd(), &arena, &cases);
    });
}

fn memory_cases(gpu: u32, handle: u64, list: u64) -> Vec<Case> {
    let alloc = || zeros(40).u64(0, 0x10_0000).u64(8, 4096).u32(32, gpu);
    let map = || zeros(24).u64(0, handle).u64(8, list).u32(16, 1);
    let free = |handle| zeros(8).u64(0, handle);
    let beyond = handle + 0x7000;
    vec![
        ("ALLOC of nothing", IOC_ALLOC_MEMORY_OF_GPU, alloc().u64(8, 0).u32(36, 2), libc::EINVAL),
        ("ALLOC of no kind", IOC_ALLOC_MEMORY_OF_GPU, alloc(), libc::EINVAL),
        ("ALLOC on no GPU", IOC_ALLOC_MEMORY_OF_GPU, alloc().u32(32, 0).u32(36, 2), libc::EINVAL),
        ("ALLOC of 4 EiB", IOC_ALLOC_MEMORY_OF_GPU, alloc().u64(8, 1 << 62).u32(36, 1), libc::ENOMEM),
        ("ALLOC of odd doorbells", IOC_ALLOC_MEMORY_OF_GPU, alloc().u32(36, 8), libc::EINVAL),
        ("ALLOC of many registers", IOC_ALLOC_MEMORY_OF_GPU, alloc().u64(8, 8192).u32(36, 16), libc::EINVAL),
        ("FREE of no GPU's", IOC_FREE_MEMORY_OF_GPU, free(1), libc::EINVAL),
        ("FREE of a missing buffer", IOC_FREE_MEMORY_OF_GPU, free(beyond), libc::EINVAL),
        ("MAP on no GPU", IOC_MAP_MEMORY_TO_GPU, map().u32(16, 0), libc::EINVAL),
        ("MAP that is past its end", IOC_MAP_MEMORY_TO_GPU, map().u32(20, 2), libc::EINVAL),
        ("MAP of a missing buffer", IOC_MAP_MEMORY_TO_GPU, map().u64(0, beyond), libc::ENOMEM),
        ("MAP of no GPU's", IOC_MAP_MEMORY_TO_GPU, map().u64(0, 1), libc::EINVAL),
        ("MAP with a wild list", IOC_MAP_MEMORY_TO_GPU, map().u64(8, WILD[1]), libc::EFAULT),
        ("MAP with the longest list", IOC_MAP_MEMORY_TO_GPU, map().u32(16, u32::MAX), libc::ENOMEM),
        ("MAP on an unknown GPU", IOC_MAP_MEMORY_TO_GPU, map().u64(8, list + 64), libc::EINVAL),
        ("UNMAP of a missing buffer", IOC_UNMAP_MEMORY_FROM_GPU, map().u64(0, beyond), libc::ENOMEM),
        ("UNMAP from an unknown GPU", IOC_UNMAP_MEMORY_FROM_GPU, map().u64(8, list + 64), libc::EINVAL),
        ("IMPORT of no descriptor", IOC_IMPORT_DMABUF, zeros(24).u32(16, gpu).u32(20, 9999), libc::EBADF),
        ("IMPORT on no GPU", IOC_IMPORT_DMABUF, zeros(24).u32(20, 9999), libc::EINVAL),
        ("EXPORT of a missing buffer", IOC_EXPORT_DMABUF, zeros(16).u64(0, beyond), libc::EINVAL),
        ("ACQUIRE_VM of no descriptor", IOC_ACQUIRE_VM, zeros(8).u32(0, 9999).u32(4, gpu), libc::EINVAL),
        ("AVAILABLE_MEMORY of no GPU", IOC_AVAILABLE_MEMORY, zeros(16), libc::EINVAL),
    ]
}

#[test]
fn memory_is_refused_with_the_drivers_words() {
    isolated(1, |_| {
        let arena = Mapping::anonymous(1 << 16).unwrap();
        let topology = Topology::read().unwrap();
        let node = topology.gpus().next().unwrap();
        let kfd = std::sync::Arc::new(Kfd::open().unwrap());
        let device = Device::open(&kfd, node).unwrap();
        let buffer = Buffer::alloc(&device, Spec::gtt(4096)).unwrap();
        arena.store32(0, node.gpu_id);
        arena.store32(64, 0xdead);
        check(kfd.as_fd(), &arena, &memory_cases(node.gpu_id, buffer.handle(), arena.address()));
        let second = Render::open(node.render_minor()).unwrap();
        let number = call::number(second.as_fd());
        let cases: Vec<Case> = vec![
            ("ACQUIRE_VM again", IOC_ACQUIRE_VM, zeros(8).u32(0, number).u32(4, node.gpu_id), libc::EBUSY),
            ("ACQUIRE_VM of no GPU", IOC_ACQUIRE_VM, zeros(8).u32(0, number), libc::EINVAL),
        ];
        check(kfd.as_fd(), &arena, &cases);
    });
}

fn queue_cases(gpu: u32) -> Vec<Case> {
    // No GPU mapping exists at these addresses.
    let create = || zeros(96).u32(32, 4096).u32(36, gpu).u32(40, 2).u32(44, 100).u32(48, 7);
    let update = || zeros(24).u32(8, 77).u32(12, 4096).u32(16, 100);
    let event = |id| zeros(8).u32(0, id);
    vec![
        ("CREATE_QUEUE of 101 %", IOC_CREATE_QUEUE, create().u32(44, 101), libc::EINVAL),
        ("CREATE_QUEUE of priority 16", IOC_CREATE_QUEUE, create().u32(48, 16), libc::EINVAL),
        ("CREATE_QUEUE of 3000 bytes", IOC_CREATE_QUEUE, create().u32(32, 3000), libc::EINVAL),
        ("CREATE_QUEUE of kind 99", IOC_CREATE_QUEUE, create().u32(40, 99), ENOTSUPP),
        ("CREATE_QUEUE on no GPU", IOC_CREATE_QUEUE, create().u32(36, 0), libc::EINVAL),
        ("CREATE_QUEUE with a wild ring", IOC_CREATE_QUEUE, create().u64(0, WILD[1]), libc::EFAULT),
        ("CREATE_QUEUE with a wild pointer", IOC_CREATE_QUEUE, create().u64(16, WILD[1]), libc::EFAULT),
        (
            "CREATE_QUEUE with a ring that is not mapped",
            IOC_CREATE_QUEUE,
            create().u64(0, 0x1000),
            libc::EINVAL,
        ),
        ("UPDATE_QUEUE of 101 %", IOC_UPDATE_QUEUE, update().u32(16, 101), libc::EINVAL),
        ("UPDATE_QUEUE of none", IOC_UPDATE_QUEUE, update(), libc::EFAULT),
        ("DESTROY_QUEUE of none", IOC_DESTROY_QUEUE, event(77), libc::EINVAL),
        ("SET_EVENT of none", IOC_SET_EVENT, event(77), libc::EINVAL),
        ("RESET_EVENT of none", IOC_RESET_EVENT, event(77), libc::EINVAL),
        ("DESTROY_EVENT of none", IOC_DESTROY_EVENT, event(77), libc::EINVAL),
        ("SMI_EVENTS of no GPU", IOC_SMI_EVENTS, zeros(8), libc::EINVAL),
        ("CRIU_OP of kind 99", IOC_CRIU_OP, zeros(56).u32(48, 99), libc::EINVAL),
        ("CRIU_OP RESTORE of nothing", IOC_CRIU_OP, zeros(56).u32(48, 3), libc::EINVAL),
        ("CRIU_OP CHECKPOINT of nothing", IOC_CRIU_OP, zeros(56).u32(48, 1), libc::EINVAL),
        ("CRIU_OP RESUME of no process", IOC_CRIU_OP, zeros(56).u32(48, 4).u32(44, 0x3f_fff0), libc::ESRCH),
    ]
}

#[test]
fn queues_and_events_are_refused_with_the_drivers_words() {
    isolated(1, |_| {
        let arena = Mapping::anonymous(1 << 16).unwrap();
        let topology = Topology::read().unwrap();
        let node = topology.gpus().next().unwrap();
        let kfd = std::sync::Arc::new(Kfd::open().unwrap());
        let _device = Device::open(&kfd, node).unwrap();
        check(kfd.as_fd(), &arena, &queue_cases(node.gpu_id));
        let misaligned = zeros(32).u64(0, arena.address() + 8).u64(8, 4096).u32(20, 1);
        let right = if node.has_svm() { libc::EINVAL } else { libc::EPERM };
        check(kfd.as_fd(), &arena, &[("SVM at an odd address", IOC_SVM + (8 << 16), misaligned, right)]);
    });
}

fn render_cases(handle: u32) -> Vec<Case> {
    let va = || zeros(64).u32(0, handle).u32(8, 1).u32(12, 6).u64(16, 0x10_0000).u64(32, 4096);
    let create = || zeros(32).u64(0, 4096).u64(16, 2);
    vec![
        ("GEM_CREATE with odd flags", DRM_AMD_GEM_CREATE, create().u64(24, 1 << 40), libc::EINVAL),
        ("GEM_CREATE in odd domains", DRM_AMD_GEM_CREATE, create().u64(16, 1 << 20), libc::EINVAL),
        ("GEM_MMAP of none", DRM_AMD_GEM_MMAP, zeros(8).u32(0, 999), libc::ENOENT),
        ("GEM_VA of none", DRM_AMD_GEM_VA, va().u32(0, 999), libc::ENOENT),
        ("GEM_VA at an odd address", DRM_AMD_GEM_VA, va().u64(16, 0x10_0008), libc::EINVAL),
        ("GEM_VA too low", DRM_AMD_GEM_VA, va().u64(16, 4096), libc::EINVAL),
        ("GEM_VA of kind 99", DRM_AMD_GEM_VA, va().u32(8, 99), libc::EINVAL),
        ("GEM_VA with odd flags", DRM_AMD_GEM_VA, va().u32(12, 1 << 30), libc::EINVAL),
        ("GEM_VA beyond the buffer", DRM_AMD_GEM_VA, va().u64(32, 1 << 30), libc::EINVAL),
        ("GEM_VA that unmaps nothing", DRM_AMD_GEM_VA, va().u32(8, 2), libc::ENOENT),
        ("CTX of kind 99", DRM_AMD_CTX, zeros(16).u32(0, 99), libc::EINVAL),
        ("CTX free of none", DRM_AMD_CTX, zeros(16).u32(0, 2).u32(8, 999), libc::EINVAL),
        ("CS of no context", DRM_AMD_CS, zeros(24).u32(0, 999).u32(8, 1), libc::EINVAL),
        ("CS of no chunks", DRM_AMD_CS, zeros(24).u32(0, 1), libc::EINVAL),
        ("CS with wild chunks", DRM_AMD_CS, zeros(24).u32(0, 1).u32(8, 1).u64(16, WILD[1]), libc::EFAULT),
        ("WAIT_CS of no context", DRM_AMD_WAIT_CS, zeros(32).u32(28, 999), libc::EINVAL),
        ("INFO of kind 999", DRM_AMD_INFO, zeros(32).u64(0, 8).u32(8, 4).u32(12, 999), libc::EINVAL),
        ("INFO to nowhere", DRM_AMD_INFO, zeros(32), libc::EINVAL),
        (
            "GEM_USERPTR at an odd address",
            DRM_AMD_GEM_USERPTR,
            zeros(24).u64(0, 9).u64(8, 4096).u32(16, 14),
            libc::EINVAL,
        ),
        (
            "GEM_USERPTR with odd flags",
            DRM_AMD_GEM_USERPTR,
            zeros(24).u64(8, 4096).u32(16, 1 << 9),
            libc::EINVAL,
        ),
        ("GEM_CLOSE of none", DRM_GEM_CLOSE, zeros(8).u32(0, 999), libc::EINVAL),
        ("PRIME of no handle", DRM_PRIME_HANDLE_TO_FD, zeros(12).u32(0, 999), libc::ENOENT),
        ("PRIME of no descriptor", DRM_PRIME_FD_TO_HANDLE, zeros(12).u32(8, 9999), libc::EBADF),
        ("SYNCOBJ_DESTROY of none", DRM_SYNCOBJ_DESTROY, zeros(8).u32(0, 999), libc::EINVAL),
        ("GEM_CHANGE_HANDLE, disabled", 0xc008_64d2, zeros(8).u32(0, handle).u32(4, 50), libc::EINVAL),
    ]
}

#[test]
fn render_nodes_refuse_with_the_drivers_words() {
    isolated(1, |_| {
        let arena = Mapping::anonymous(1 << 16).unwrap();
        let render = Render::open(Topology::read().unwrap().gpus().next().unwrap().render_minor()).unwrap();
        assert_eq!(render.context().unwrap(), 1, "the first context's number");
        let handle = render.create(4096, AMDGPU_GEM_DOMAIN_GTT, 0).unwrap();
        check(render.as_fd(), &arena, &render_cases(handle));
        render.map_gpu(handle, 0x10_0000, 4096).unwrap();
        let again = render.map_gpu(handle, 0x10_0000, 4096).unwrap_err();
        assert_eq!(again.errno(), Some(libc::EINVAL), "two mappings at one address");
    });
}

#[test]
fn mappings_of_nothing_are_refused() {
    isolated(1, |_| {
        let kfd = Kfd::open().unwrap();
        let node = Topology::read().unwrap().gpus().next().unwrap().clone();
        let render = Render::open(node.render_minor()).unwrap();
        let gpu = u64::from(node.gpu_id) << 46;
        let refused = |fd: BorrowedFd<'_>, offset, length| {
            Mapping::shared(fd, offset, length).unwrap_err().raw_os_error()
        };
        assert_eq!(refused(kfd.as_fd(), 3 << 62 | gpu, 4096), Some(libc::EINVAL), "half the doorbells");
        assert!(refused(kfd.as_fd(), 3 << 62, 8192).is_some(), "doorbells of no GPU");
        assert!(refused(kfd.as_fd(), 1 << 62 | gpu, 4096).is_some(), "of no kind");
        assert_eq!(refused(render.as_fd(), 0x1_0000_0000, 4096), Some(libc::EINVAL), "no buffer there");
    });
}
