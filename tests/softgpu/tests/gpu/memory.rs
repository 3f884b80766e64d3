// SPDX-License-Identifier: MIT OR Apache-2.0
//! Buffers: where their bytes are, which processors can access them, what they cost.

use std::fs;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::fd::AsFd as _;

use gpu_app::chain::{Lane, Step};
use gpu_app::gpu::{Gpus, Uploader};
use gpu_app::kernel::Kernel;
use gpu_app::kfd::{Buffer, MemoryKind, Spec};
use rewake_amdgpu_uapi::Error;
use rewake_amdgpu_uapi::abi::call;
use rewake_amdgpu_uapi::abi::kfd_ioctl_free_memory_of_gpu_args;
use rewake_amdgpu_uapi::abi::memory::Mapping;
use rewake_amdgpu_uapi::packet::Sdma;
use rewake_amdgpu_uapi::render::Render;
use rewake_skip::skip;
use softgpu_tests::isolated;

fn on_first(kernel: Kernel) -> Step {
    Step { gpu: 0, queue: 0, kernel }
}

/// The flags that the kernel shows for the mapping at `address`.
fn vm_flags(address: u64) -> Vec<String> {
    let text = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut inside = false;
    for line in text.lines() {
        if line.contains('-') && !line.contains(": ") {
            inside = line.starts_with(&format!("{address:x}-"));
        }
        if let (true, Some(flags)) = (inside, line.strip_prefix("VmFlags:")) {
            return flags.split_whitespace().map(str::to_owned).collect();
        }
    }
    panic!("no mapping begins at {address:#x}");
}

#[test]
fn bytes_that_the_cpu_writes_are_read_by_the_gpu_and_back() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let mut lane = Lane::new(&gpus, 1, 1).unwrap();
        let (host, back) = (gpus.host(8192).unwrap(), gpus.host(8192).unwrap());
        let local = gpus.local(0, 8192).unwrap();
        let bytes: Vec<u8> = (0..8192_u32).map(|byte| u8::try_from(byte % 251).unwrap()).collect();
        host.cpu().write(0, &bytes);
        let copy = |to: &Buffer, from: &Buffer| {
            on_first(Kernel::Copy { to: to.address(), from: from.address(), bytes: 8192 })
        };
        lane.run(&[copy(&local, &host), copy(&back, &local)]).unwrap();
        let mut read = vec![0; 8192];
        back.cpu().read(0, &mut read);
        assert_eq!(read, bytes);
        if gpus.device(0).node().has_large_bar() {
            local.cpu().read(0, &mut read);
            assert_eq!(read, bytes);
        }
    });
}

#[test]
fn mappings_are_device_mappings_that_no_userfaultfd_takes() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let host = gpus.host(4096).unwrap();
        let local = gpus.local(0, 4096).unwrap();
        let large = gpus.device(0).node().has_large_bar();
        for buffer in [Some(&host), large.then_some(&local)].into_iter().flatten() {
            let flags = vm_flags(buffer.address());
            for flag in ["pf", "io", "de", "dd"] {
                assert!(flags.iter().any(|found| found == flag), "{flag} in {flags:?}");
            }
            let uffd = rewake_uffd::Uffd::open(0).unwrap();
            let error = uffd.register_missing(buffer.address(), 4096).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
        }
    });
}

#[test]
fn debuggers_read_mapped_buffers() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let host = gpus.host(4096).unwrap();
        host.cpu().write(100, b"seen from outside");
        let mut memory = fs::File::open("/proc/self/mem").unwrap();
        memory.seek(SeekFrom::Start(host.address() + 100)).unwrap();
        let mut read = [0; 17];
        memory.read_exact(&mut read).unwrap();
        assert_eq!(&read, b"seen from outside");
    });
}

#[test]
fn a_buffer_is_mapped_through_its_own_render_node_only() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let host = gpus.host(4096).unwrap();
        let stranger = Render::open(gpus.device(0).node().render_minor()).unwrap();
        let error = Mapping::shared(stranger.as_fd(), host.offset(), 4096).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EACCES));
        assert!(Mapping::shared(gpus.device(0).render().as_fd(), host.offset(), 4096).is_ok());
    });
}

#[test]
fn vram_is_counted_and_does_not_grow() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let device = gpus.device(0);
        let before = device.available().unwrap();
        let buffer = gpus.local(0, 64 << 20).unwrap();
        let during = device.available().unwrap();
        assert!(before - during >= 64 << 20, "{before:#x} before, {during:#x} with 64 MiB");
        let all = gpus.local(0, device.node().vram()).unwrap_err();
        assert_eq!(all.downcast_ref::<Error>().and_then(Error::errno), Some(libc::ENOMEM), "{all:#}");
        drop(buffer);
        assert_eq!(device.available().unwrap(), before);
    });
}

#[test]
fn a_buffer_that_a_gpu_has_mapped_is_not_freed() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let buffer = gpus.host(4096).unwrap();
        let mut argument = kfd_ioctl_free_memory_of_gpu_args { handle: buffer.handle() };
        let error = call::free_memory(gpus.device(0).kfd().as_fd(), &mut argument).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBUSY));
        // The buffer still exists.
        buffer.cpu().store64(0, 7);
        assert_eq!(buffer.cpu().load64(0), 7);
    });
}

#[test]
fn memory_beyond_the_bar_is_for_gpus_alone() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let device = gpus.device(0);
        if device.node().has_large_bar() {
            skip!("CPUs can access all memory of this GPU");
        }
        let visible = Buffer::alloc(device, Spec::vram(4096)).unwrap_err();
        assert_eq!(visible.errno(), Some(libc::EINVAL), "PUBLIC on a small BAR");
        gpus.local(0, 4096).expect("hidden VRAM");
    });
}

#[test]
fn a_gpu_writes_the_memory_of_another() {
    isolated(2, |_| {
        let gpus = Gpus::open(2).unwrap();
        let mut theirs = gpus.local(0, 4096).unwrap();
        let second = gpus.device(1).gpu_id();
        if !gpus.reach_each_other() {
            assert_eq!(
                theirs.map(&[second]).unwrap_err().errno(),
                Some(libc::EINVAL),
                "no link between them"
            );
            skip!("these GPUs cannot access each other");
        }
        theirs.map(&[second]).unwrap();
        let back = gpus.host(4096).unwrap();
        let mut lane = Lane::new(&gpus, 2, 1).unwrap();
        let fill = Kernel::Fill { to: theirs.address(), words: 1024, value: 0xabcd_0123 };
        let copy = Kernel::Copy { to: back.address(), from: theirs.address(), bytes: 4096 };
        lane.run(&[Step { gpu: 1, queue: 0, kernel: fill }, on_first(copy)]).unwrap();
        assert_eq!((back.cpu().load32(0), back.cpu().load32(4092)), (0xabcd_0123, 0xabcd_0123));
    });
}

#[test]
fn a_copy_engine_fills_and_copies_across_pages() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let mut uploader = Uploader::new(&gpus, 0).unwrap();
        let (local, host) = (gpus.local(0, 1 << 16).unwrap(), gpus.host(1 << 16).unwrap());
        let packets = Sdma::new()
            .fill(local.address(), 0x0101_0101, 1 << 16)
            .fill(local.address() + 0x2ff8, 0x0202_0202, 16)
            .copy(host.address() + 3, local.address() + 0x2ff7, 18);
        uploader.run(packets).unwrap();
        let mut read = [0; 20];
        host.cpu().read(2, &mut read);
        assert_eq!(read, [0, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 0]);
    });
}

#[test]
fn doorbells_and_registers_have_their_own_places() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let device = gpus.device(0);
        let second =
            Buffer::alloc(device, Spec { size: 4096, kind: MemoryKind::Doorbell, flags: 0 }).unwrap_err();
        assert_eq!(second.errno(), Some(libc::EINVAL), "half a page of doorbells");
        let registers =
            Buffer::mapped(device, Spec { size: 4096, kind: MemoryKind::MmioRemap, flags: 0 }).unwrap();
        registers.cpu().store32(0, 1);
        assert_eq!(registers.offset() >> 62, 0, "the kind of offset of registers");
        assert_eq!(gpus.doorbells(0).offset() >> 62, 3, "the kind of offset of doorbells");
    });
}
