// SPDX-License-Identifier: MIT OR Apache-2.0
//! Buffers that processes and drivers share as dma-bufs.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::fd::AsRawFd as _;

use drm::control::Device as _;
use gpu_app::chain::{Lane, Step};
use gpu_app::gpu::Gpus;
use gpu_app::kernel::Kernel;
use gpu_app::kfd::Buffer;
use rewake_amdgpu_uapi::abi::memory::Mapping;
use rewake_amdgpu_uapi::abi::{KFD_IOC_ALLOC_MEM_FLAGS_VRAM, call};
use rewake_amdgpu_uapi::render::Render;
use softgpu_tests::{isolated, sys};

fn fill(to: u64, value: u32) -> Step {
    Step { gpu: 0, queue: 0, kernel: Kernel::Fill { to, words: 1024, value } }
}

#[test]
fn an_import_is_the_same_memory_elsewhere() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let mut lane = Lane::new(&gpus, 1, 1).unwrap();
        let own = gpus.local(0, 8192).unwrap();
        let dmabuf = own.export().unwrap();
        let link = std::fs::read_link(format!("/proc/self/fd/{}", dmabuf.as_raw_fd())).unwrap();
        assert!(link.to_string_lossy().starts_with("/dmabuf"), "CRIU knows it by {link:?}");
        let info = call::dmabuf_info(gpus.device(0).kfd().as_fd(), dmabuf.as_fd()).unwrap();
        assert_eq!((info.size, info.gpu_id), (8192, gpus.device(0).gpu_id()));
        assert_ne!(info.flags & KFD_IOC_ALLOC_MEM_FLAGS_VRAM, 0);
        let other = gpus.import(dmabuf.as_fd()).unwrap();
        assert_ne!(other.address(), own.address());
        lane.run(&[fill(own.address(), 0), fill(other.address() + 4096, 0x1234_5678)]).unwrap();
        let seen = Mapping::shared(dmabuf.as_fd(), 0, 8192).unwrap();
        assert_eq!(
            (seen.load32(4092), seen.load32(4096)),
            (0, 0x1234_5678),
            "through the dma-buf's own mapping"
        );
        drop(own);
        assert_eq!(seen.load32(8188), 0x1234_5678, "it lives as long as one descriptor of it");
    });
}

#[test]
fn two_processes_share_a_buffer() {
    isolated(1, |scene| {
        let gpus = Gpus::open(1).unwrap();
        let mut lane = Lane::new(&gpus, 1, 1).unwrap();
        if scene.role().is_some() {
            let own = gpus.local(0, 4096).unwrap();
            let dmabuf = own.export().unwrap();
            scene.say(&dmabuf.as_raw_fd().to_string());
            let _ = scene.hear();
            let back = gpus.host(4096).unwrap();
            let copy = Kernel::Copy { to: back.address(), from: own.address(), bytes: 4096 };
            lane.run(&[Step { gpu: 0, queue: 0, kernel: copy }]).unwrap();
            assert_eq!(back.cpu().load32(4092), 0x600d_600d);
            return;
        }
        let mut peer = scene.peer("owner");
        let number = peer.hear().parse().unwrap();
        let dmabuf = sys::descriptor_of(peer.pid(), number).unwrap();
        let theirs = gpus.import(dmabuf.as_fd()).unwrap();
        lane.run(&[fill(theirs.address(), 0x600d_600d)]).unwrap();
        peer.say("filled");
        peer.finish();
    });
}

#[test]
fn a_render_node_and_compute_share_a_buffer() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let own = gpus.host(4096).unwrap();
        own.cpu().store64(8, 0xfeed);
        let render = Render::open(gpus.device(0).node().render_minor()).unwrap();
        let dmabuf = own.export().unwrap();
        let handle = render.prime_fd_to_buffer(dmabuf.as_fd()).unwrap();
        let again = render.prime_fd_to_buffer(dmabuf.as_fd()).unwrap();
        assert_eq!(handle, again, "one handle for one buffer");
        assert_eq!(render.map(handle.into(), 4096).unwrap().load64(8), 0xfeed);
        let back = render.buffer_to_prime_fd(handle, drm::RDWR | drm::CLOEXEC).unwrap();
        let import = Buffer::import(gpus.device(0), back.as_fd()).unwrap();
        assert_eq!(import.size(), 4096);
        render.close_buffer(handle).unwrap();
        assert!(render.close_buffer(handle).is_err(), "closed once");
    });
}

#[test]
fn a_foreign_buffer_is_refused() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let file = File::open("/proc/self/exe").unwrap();
        let error = Buffer::import(gpus.device(0), file.as_fd()).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EINVAL), "{error}");
    });
}
