// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which bytes arrive, and which copy method carries them.

use std::os::fd::AsFd as _;

use drm::control::Device as _;
use gpu_app::gpu::Gpus;
use gpu_app::kfd::{Buffer, Spec};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use rewake_amdgpu_uapi::abi::{AMDGPU_GEM_CREATE_NO_CPU_ACCESS, AMDGPU_GEM_DOMAIN_VRAM};
use rewake_sdma_copy::{Bo, COPIES, CopyEngine, CopyPath, Error, Shape, Staging, StagingMemory, Transfer};
use softgpu_tests::isolated;

use crate::copy_engine::{
    ALL, MIB, SMALL, Through, engine, import, pattern, place, read, render, rings, run, softgpu, soon,
};

#[test]
fn the_copy_method_is_the_best_that_the_gpu_offers() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let render = render(&gpus, 0);
        let staging = Staging::new(SMALL, &[&render]).unwrap();
        let engine = CopyEngine::open(render, &staging).unwrap();
        assert_eq!((staging.memory(), staging.reason()), (StagingMemory::Pages, None));
        let way = engine.path().to_string();
        if softgpu("sdma_rings") == Some(0) {
            assert_eq!(way, "copies by the CPU (the driver offers no copy ring)");
        } else {
            assert!(
                way.starts_with("2 copy rings (SDMA ") && way.ends_with("), staging in ordinary pages"),
                "{way}"
            );
        }
    });
}

#[test]
fn bytes_are_copied_to_and_from_odd_places_by_every_method() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        for through in ALL {
            let (staging, mut engine) = engine(&gpus, through, SMALL);
            let buffers = [gpus.local(0, 256 << 10).unwrap(), gpus.host(256 << 10).unwrap()];
            for buffer in &buffers {
                let bo = import(&mut engine, buffer);
                for (at, from, bytes) in
                    [(0, 0, 256 << 10), (3, 5, 1), (1, 4093, 4099), (4095, 2, 70001), (8, 8, 8)]
                {
                    let (from, to) = (place(&staging, 1, from), place(&staging, 2, 11));
                    let bytes = u64::min(bytes, (256 << 10) - 11);
                    let right = pattern(bytes, at);
                    staging.write(place(&staging, 1, 0), &vec![0xee; 256 << 10]);
                    staging.write(from, &right);
                    run(&mut engine, &[Transfer::Fill { bo, at: 0, bytes: 256 << 10, word: 0x0102_0304 }]);
                    run(&mut engine, &[Transfer::Load { bo, at, from, bytes }]);
                    run(&mut engine, &[Transfer::Save { bo, at, to, bytes }]);
                    assert!(read(&staging, to, bytes) == right, "{through:?}: {bytes} bytes at {at}");
                    let whole = place(&staging, 3, 0);
                    run(&mut engine, &[Transfer::Save { bo, at: 0, to: whole, bytes: 256 << 10 }]);
                    let mut all: Vec<u8> = 0x0102_0304_u32.to_le_bytes().repeat(64 << 10);
                    all[usize::try_from(at).unwrap()..][..right.len()].copy_from_slice(&right);
                    assert!(
                        read(&staging, whole, 256 << 10) == all,
                        "{through:?}: outside {bytes} bytes at {at}"
                    );
                }
                engine.release(bo).unwrap();
            }
        }
    });
}

#[test]
fn long_transfers_cross_packets_parts_of_staging_and_a_large_bo() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        // The second slot lies in two dma-bufs of 32 MiB.
        let shape = Shape { slots: 3, slot_bytes: 20 * MIB };
        let (staging, mut engine) = engine(&gpus, Through::Pages, shape);
        let buffer = gpus.host(300 * MIB).unwrap();
        let bo = import(&mut engine, &buffer);
        let at = 280 * MIB + 1;
        let bytes = 19 * MIB + 5;
        let right = pattern(bytes, 3);
        staging.write(place(&staging, 1, 2), &right);
        run(&mut engine, &[Transfer::Load { bo, at, from: place(&staging, 1, 2), bytes }]);
        let mut seen = vec![0; right.len()];
        buffer.cpu().read(at, &mut seen);
        assert!(seen == right);
        run(&mut engine, &[Transfer::Save { bo, at, to: place(&staging, 2, 7), bytes }]);
        assert!(read(&staging, place(&staging, 2, 7), bytes) == right);
        run(&mut engine, &[Transfer::Fill { bo, at: 4, bytes: 9 * MIB, word: 0xfeed_f00d }]);
        let words = [0, 4, 4 * MIB, 4 * MIB + 4, 9 * MIB, 9 * MIB + 4].map(|at| buffer.cpu().load32(at));
        assert_eq!(words, [0, 0xfeed_f00d, 0xfeed_f00d, 0xfeed_f00d, 0xfeed_f00d, 0]);
    });
}

#[test]
fn thousands_of_small_bos_are_one_submission() {
    isolated(1, |_| {
        const COUNT: usize = 2048;
        let gpus = Gpus::open(1).unwrap();
        let shape = Shape { slots: 2, slot_bytes: COUNT as u64 * 4096 };
        let (staging, mut engine) = engine(&gpus, Through::Pages, shape);
        let buffers: Vec<Buffer> =
            (0..COUNT).map(|_| Buffer::alloc(gpus.device(0), Spec::gtt(4096)).unwrap()).collect();
        let bos: Vec<Bo> = buffers.iter().map(|buffer| import(&mut engine, buffer)).collect();
        let bytes = pattern(shape.slot_bytes, 9);
        staging.write(place(&staging, 0, 0), &bytes);
        let each = |to_bo: bool| -> Vec<Transfer> {
            let slot = usize::from(!to_bo);
            let one = |(index, bo): (usize, &Bo)| {
                let (bo, place) = (*bo, place(&staging, slot, index as u64 * 4096));
                let (at, bytes) = (0, 4096);
                if to_bo {
                    Transfer::Load { bo, at, from: place, bytes }
                } else {
                    Transfer::Save { bo, at, to: place, bytes }
                }
            };
            bos.iter().enumerate().map(one).collect()
        };
        let load = engine.submit(&each(true)).unwrap();
        engine.wait(load, soon()).unwrap();
        let save = engine.submit(&each(false)).unwrap();
        engine.wait(save, soon()).unwrap();
        assert!(read(&staging, place(&staging, 1, 0), shape.slot_bytes) == bytes);
        let many: Vec<Transfer> = each(true).into_iter().cycle().take(COPIES + 1).collect();
        if rings().is_ok() {
            let error = engine.submit(&many).unwrap_err();
            assert!(matches!(error, Error::Long { packets: 2341, most: 2340, .. }), "{error}");
        }
        run(&mut engine, &many[..COPIES]);
        bos.into_iter().for_each(|bo| engine.release(bo).unwrap());
    });
}

#[test]
fn without_a_ring_and_a_cpu_view_the_error_says_what_to_do() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let owner = render(&gpus, 0);
        let hidden = u64::from(AMDGPU_GEM_CREATE_NO_CPU_ACCESS);
        let handle = owner.create(4096, AMDGPU_GEM_DOMAIN_VRAM, hidden).unwrap();
        let handle = drm::control::from_u32(handle).unwrap();
        let dmabuf = owner.buffer_to_prime_fd(handle, drm::RDWR | drm::CLOEXEC).unwrap();
        for through in [Through::Pages, Through::Cpu] {
            let (_staging, mut engine) = engine(&gpus, through, SMALL);
            let bo = engine.import(dmabuf.as_fd(), 4096).unwrap();
            let rings = matches!(engine.path(), CopyPath::Rings { .. });
            match engine.submit(&[Transfer::Fill { bo, at: 0, bytes: 4096, word: 0 }]) {
                Ok(ticket) => engine.wait(ticket, soon()).unwrap(),
                Err(error) => {
                    assert!(matches!(error, Error::Unreachable { bytes: 4096, .. }) && !rings, "{error}");
                }
            }
            engine.release(bo).unwrap();
        }
    });
}

#[test]
fn gtt_staging_is_no_memory_for_direct_reads_and_pages_are() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        for (through, right) in [(Through::Pages, Ok(64)), (Through::Gtt, Err(nix::Error::EFAULT))] {
            let (staging, _engine) = engine(&gpus, through, SMALL);
            let place = place(&staging, 2, 8);
            staging.write(place, &[3; 64]);
            // Takes the pages as O_DIRECT and io_uring do.
            let base = staging.pointer(place, 64).addr().get();
            let mut into = [0; 64];
            let taken = process_vm_readv(
                nix::unistd::getpid(),
                &mut [std::io::IoSliceMut::new(&mut into)],
                &[RemoteIoVec { base, len: 64 }],
            );
            assert_eq!(taken, right, "{through:?}");
            assert_eq!(staging.whole().is_some(), right.is_ok());
        }
    });
}
