// SPDX-License-Identifier: MIT OR Apache-2.0
//! Submissions to copy engines through a render node, as a restore uses them.

use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::thread::sleep;
use std::time::{Duration, Instant};

use drm::control::Device as _;
use gpu_app::gpu::Gpus;
use rewake_amdgpu_uapi::abi::drm::SubmissionChunk;
use rewake_amdgpu_uapi::abi::memory::Mapping;
use rewake_amdgpu_uapi::abi::{
    AMDGPU_GEM_CREATE_CPU_ACCESS_REQUIRED, AMDGPU_GEM_DOMAIN_GTT, AMDGPU_GEM_DOMAIN_VRAM, AMDGPU_HW_IP_DMA,
    drm_amdgpu_bo_list_entry, drm_amdgpu_cs_chunk_dep, drm_amdgpu_cs_chunk_syncobj,
};
use rewake_amdgpu_uapi::packet::Sdma;
use rewake_amdgpu_uapi::render::{Render, Submission};
use rewake_amdgpu_uapi::topology::Topology;
use rewake_skip::{need, skip};
use softgpu_tests::{DelayedCopies, Judge, Machine, Peer, REAL_GPUS, Scene, isolated, sys};

/// Addresses of buffers in the render node's address space.
const COMMANDS: u64 = 0x1_0000_0000;
const ONE: u64 = 0x1_0010_0000;
const TWO: u64 = 0x1_0020_0000;
const SIZE: u64 = 64 * 1024;
/// Far in the future, in nanoseconds of the monotonic clock.
const LATE: u64 = u64::MAX >> 1;

/// A render node with commands and two buffers.
struct Bench {
    render: Render,
    context: u32,
    commands: (u32, Mapping),
    one: (u32, Mapping),
    two: (u32, Mapping),
}

impl Bench {
    fn new() -> Self {
        let topology = Topology::read().unwrap();
        let render = Render::open(topology.gpus().next().unwrap().render_minor()).unwrap();
        let buffer = |address: u64| {
            let flags = u64::from(AMDGPU_GEM_CREATE_CPU_ACCESS_REQUIRED);
            let handle = render.create(SIZE, AMDGPU_GEM_DOMAIN_GTT, flags).unwrap();
            render.map_gpu(handle, address, SIZE).unwrap();
            (handle, render.map(handle, SIZE).unwrap())
        };
        let (commands, one, two) = (buffer(COMMANDS), buffer(ONE), buffer(TWO));
        Self { context: render.context().unwrap(), render, commands, one, two }
    }

    fn submit(
        &self,
        ring: u32,
        packets: &Sdma,
        more: &[SubmissionChunk<'_>],
    ) -> Result<Submission, rewake_amdgpu_uapi::Error> {
        // Engines read whole groups of eight words.
        let mut packets = packets.clone();
        while !packets.bytes().len().is_multiple_of(32) {
            packets = packets.nop();
        }
        let at = u64::from(ring) * 4096;
        self.commands.1.write(at, packets.bytes());
        let commands = (COMMANDS + at, u32::try_from(packets.bytes().len()).unwrap());
        let buffers = [self.commands.0, self.one.0, self.two.0];
        self.render.copy_engine(self.context, ring, commands, &buffers, more)
    }

    fn run(&self, packets: &Sdma) {
        let submission = self.submit(0, packets, &[]).unwrap();
        assert!(self.render.wait(submission, LATE).unwrap());
    }
}

#[test]
fn packets_copy_fill_and_write_fences() {
    isolated(1, |_| {
        let bench = Bench::new();
        let bytes: Vec<u8> = (0..SIZE).map(|byte| u8::try_from(byte % 253).unwrap()).collect();
        bench.one.1.write(0, &bytes);
        bench.run(
            &Sdma::new().copy(TWO, ONE, SIZE).fill(TWO + 4096, 0x5555_5555, 8).fence(TWO + 8192, 77).trap(),
        );
        let mut right = bytes;
        right[4096..4104].fill(0x55);
        right[8192..8196].copy_from_slice(&77_u32.to_le_bytes());
        let mut read = vec![0; usize::try_from(SIZE).unwrap()];
        bench.two.1.read(0, &mut read);
        assert!(read == right);
    });
}

#[test]
fn the_count_is_one_less_than_the_bytes() {
    isolated(1, |_| {
        let bench = Bench::new();
        bench.one.1.write(0, &[9; 64]);
        bench.run(&Sdma::new().copy_with_count(TWO, ONE, 15));
        let mut read = [0; 20];
        bench.two.1.read(0, &mut read);
        assert_eq!((&read[..16], &read[16..]), (&[9; 16][..], &[0; 4][..]));
    });
}

#[test]
fn one_byte_too_many_beyond_the_buffer_is_reported() {
    isolated(1, |_| {
        let judge = need!(Judge::find(), REAL_GPUS);
        let bench = Bench::new();
        let count = u32::try_from(SIZE).unwrap();
        let submission = bench.submit(0, &Sdma::new().copy_with_count(TWO, ONE, count), &[]).unwrap();
        // Finished or failed: reported either way.
        let _ = bench.render.wait(submission, LATE);
        let lines = judge.take("sdma-overrun");
        assert!(lines[0].contains(&std::process::id().to_string()), "{lines:?}");
        // Inside the buffer it does no harm, and stock CRIU does it.
        let bench = Bench::new();
        bench.run(&Sdma::new().copy_with_count(TWO, ONE, 4096));
        assert_eq!(judge.violations(), Vec::<String>::new());
    });
}

#[test]
fn two_rings_work_and_wait_for_each_other() {
    isolated(1, |_| {
        let bench = Bench::new();
        if bench.render.engine_info(AMDGPU_HW_IP_DMA).unwrap().available_rings & 0b10 == 0 {
            skip!("a render node of this machine has less than two copy rings");
        }
        for round in 0..32_u32 {
            let first = bench.submit(0, &Sdma::new().fill(ONE, round, SIZE), &[]).unwrap();
            let after = [drm_amdgpu_cs_chunk_dep {
                ip_type: AMDGPU_HW_IP_DMA,
                ip_instance: 0,
                ring: 0,
                ctx_id: bench.context,
                handle: first.number,
            }];
            let chunk = [SubmissionChunk::Dependencies(&after)];
            let second = bench.submit(1, &Sdma::new().copy(TWO, ONE, SIZE), &chunk).unwrap();
            assert!(bench.render.wait(second, LATE).unwrap());
            assert_eq!((bench.two.1.load32(0), bench.two.1.load32(SIZE - 4)), (round, round));
        }
    });
}

#[test]
fn timelines_are_waited_for_and_signalled() {
    isolated(1, |_| {
        let bench = Bench::new();
        let timeline = bench.render.create_syncobj(false).unwrap();
        let point = |point| [drm_amdgpu_cs_chunk_syncobj { handle: u32::from(timeline), flags: 0, point }];
        for step in 1..=8 {
            let (before, after) = (point(step - 1), point(step));
            let mut chunks = vec![SubmissionChunk::TimelineSignal(&after)];
            if step > 1 {
                chunks.push(SubmissionChunk::TimelineWait(&before));
            }
            let fill = Sdma::new().fill(ONE, u32::try_from(step).unwrap(), 64);
            bench.submit(u32::try_from(step % 2).unwrap(), &fill, &chunks).unwrap();
        }
        let waited = bench.render.syncobj_timeline_wait(&[timeline], &[8], i64::MAX, false, true, false);
        waited.unwrap();
        let mut points = [0];
        bench.render.syncobj_timeline_query(&[timeline], &mut points, false).unwrap();
        assert_eq!((points[0], bench.one.1.load32(0)), (8, 8));
        bench.render.destroy_syncobj(timeline).unwrap();
    });
}

#[test]
fn nonsense_in_a_ring_is_a_lost_submission_not_a_lost_machine() {
    isolated(1, |_| {
        let bench = Bench::new();
        let submission = bench.submit(0, &Sdma::new().word(0xff), &[]).unwrap();
        let error = bench.render.wait(submission, LATE).unwrap_err();
        // A cancelled submission in Linux 6.12, one that timed out since.
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let right = if release.starts_with("6.12") { libc::ECANCELED } else { libc::ETIME };
        assert_eq!(error.errno(), Some(right), "{error}");
        let other = Bench::new();
        other.run(&Sdma::new().fill(ONE, 5, 64));
        assert_eq!(other.one.1.load32(0), 5);
    });
}

#[test]
fn host_memory_is_copied_from_in_place() {
    isolated(1, |_| {
        let bench = Bench::new();
        let memory = Mapping::anonymous(SIZE).unwrap();
        memory.write(0, &[6; 4096]);
        let handle = bench.render.userptr(&memory).unwrap();
        let address = 0x1_0030_0000;
        bench.render.map_gpu(handle, address, SIZE).unwrap();
        let packets = Sdma::new().copy(ONE, address, 4096);
        bench.commands.1.write(0, packets.nop().bytes());
        let buffers = [bench.commands.0, bench.one.0, handle];
        let submission = bench.render.copy_engine(bench.context, 0, (COMMANDS, 32), &buffers, &[]).unwrap();
        assert!(bench.render.wait(submission, LATE).unwrap());
        assert_eq!(bench.one.1.load64(4088), 0x0606_0606_0606_0606);
    });
}

#[test]
fn a_list_of_buffers_serves_for_many_submissions() {
    isolated(1, |_| {
        use rewake_amdgpu_uapi::abi::{drm, drm_amdgpu_cs_chunk_ib};
        let bench = Bench::new();
        let entry = |handle| drm_amdgpu_bo_list_entry { bo_handle: handle, bo_priority: 0 };
        let fd = bench.render.as_fd();
        let list = drm::bo_list_create(fd, &[entry(bench.commands.0), entry(bench.one.0)]).unwrap();
        let packets = Sdma::new().fill(ONE, 3, 64).nop().nop().nop();
        bench.commands.1.write(0, packets.bytes());
        let commands = drm_amdgpu_cs_chunk_ib {
            _pad: 0,
            flags: 0,
            va_start: COMMANDS,
            ib_bytes: 32,
            ip_type: AMDGPU_HW_IP_DMA,
            ip_instance: 0,
            ring: 0,
        };
        for _ in 0..3 {
            let number =
                drm::submit(fd, bench.context, list, &[SubmissionChunk::Commands(&commands)]).unwrap();
            let submission = Submission { context: bench.context, ring: 0, number };
            assert!(bench.render.wait(submission, LATE).unwrap());
        }
        assert_eq!(bench.one.1.load32(60), 3);
        drm::bo_list_destroy(fd, list).unwrap();
        let gone = drm::submit(fd, bench.context, list, &[SubmissionChunk::Commands(&commands)]).unwrap_err();
        assert_eq!(gone.raw_os_error(), Some(libc::ENOENT));
    });
}

#[test]
fn vram_without_a_cpu_mapping_is_filled_by_copies() {
    isolated(1, |_| {
        let bench = Bench::new();
        let handle = bench.render.create(SIZE, AMDGPU_GEM_DOMAIN_VRAM, 0).unwrap();
        let address = 0x1_0040_0000;
        bench.render.map_gpu(handle, address, SIZE).unwrap();
        bench.one.1.write(0, &[8; 128]);
        let packets = Sdma::new().copy(address, ONE, 128).copy(TWO, address, 128).nop().nop();
        bench.commands.1.write(0, packets.bytes());
        let buffers = [bench.commands.0, bench.one.0, bench.two.0, handle];
        let submission = bench.render.copy_engine(bench.context, 0, (COMMANDS, 64), &buffers, &[]).unwrap();
        assert!(bench.render.wait(submission, LATE).unwrap());
        assert_eq!(bench.two.1.load64(120), 0x0808_0808_0808_0808);
        bench.render.unmap_gpu(handle, address, SIZE).unwrap();
        let again = bench.render.unmap_gpu(handle, address, SIZE).unwrap_err();
        assert_eq!(again.errno(), Some(libc::ENOENT));
    });
}

/// In MB/s: so low that rings wait instead of computing, for which they share one CPU.
const BANDWIDTH: u64 = 2;

const A_MINUTE: Duration = Duration::from_secs(60);

#[test]
fn every_ring_has_the_bandwidth_that_was_asked_for() {
    isolated(1, |_| {
        let machine = need!(Machine::find(), REAL_GPUS);
        machine.becomes(&[("copy_mbps", &BANDWIDTH.to_string())]);
        let bench = Bench::new();
        let packets = (0..32).fold(Sdma::new(), |packets, _| packets.copy(TWO, ONE, SIZE));
        let elapsed = |rings: std::ops::Range<u32>| {
            let start = Instant::now();
            let submissions: Vec<_> = rings.map(|ring| bench.submit(ring, &packets, &[]).unwrap()).collect();
            assert!(submissions.into_iter().all(|submission| bench.render.wait(submission, LATE).unwrap()));
            start.elapsed()
        };
        let right = Duration::from_micros(32 * SIZE / BANDWIDTH);
        let (mut one, mut two) = (Duration::MAX, Duration::MAX);
        let start = Instant::now();
        // Other processes may use this machine's CPUs for a while.
        while (one >= right * 2 || two >= right * 3 / 2) && start.elapsed() < A_MINUTE {
            one = one.min(elapsed(0..1));
            two = two.min(elapsed(0..2));
            assert!(one >= right && two >= right, "{one:?} and {two:?}, the bytes make {right:?}");
        }
        assert!(one < right * 2, "one ring took {one:?}, its bytes make {right:?}");
        assert!(two < right * 3 / 2, "two rings took {two:?}: they overlap, so {right:?} is right");
    });
}

#[test]
fn held_copies_wait_and_others_and_their_process_s_end_do_not() {
    isolated(1, |scene| {
        let copy = Sdma::new().copy(TWO, ONE, SIZE);
        match scene.role() {
            Some("other") => {
                std::fs::write("/proc/self/comm", "other").unwrap();
                return Bench::new().run(&copy);
            }
            Some(_) => {
                let bench = Bench::new();
                bench.submit(0, &copy, &[]).unwrap();
                scene.say("submitted");
                drop(scene.hear());
                return;
            }
            None => {}
        }
        let machine = need!(Machine::find(), REAL_GPUS);
        let name = std::fs::read_to_string("/proc/self/comm").unwrap();
        machine.becomes(&[("sdma_rings", "1")]);
        {
            let bench = Bench::new();
            bench.one.1.write(0, &[9; 64]);
            let delayed = DelayedCopies::of(name.trim()).unwrap();
            let submission = bench.submit(0, &copy, &[]).unwrap();
            scene.peer("other").finish();
            let mut read = [0; 64];
            bench.two.1.read(0, &mut read);
            assert!(!bench.render.wait(submission, 0).unwrap() && read == [0; 64], "it was done");
            let next = bench.submit(0, &copy, &[]).unwrap();
            delayed.release(1);
            assert!(bench.render.wait(submission, LATE).unwrap());
            assert!(!bench.render.wait(next, 0).unwrap(), "one was not held");
            drop(delayed);
            assert!(bench.render.wait(next, LATE).unwrap());
            bench.two.1.read(0, &mut read);
            assert_eq!(read, [9; 64]);
        }
        let delayed = DelayedCopies::of(name.trim()).unwrap();
        let mut killed = scene.peer("held");
        assert_eq!(killed.hear(), "submitted");
        killed.kill();
        // The module is unloaded when nothing of it is left, and belongs to another test afterwards.
        machine.becomes(&[("sdma_rings", "1")]);
        Bench::new().run(&copy);
        drop(delayed);
    });
}

/// The process with the buffer, until it is killed.
fn owns(scene: &Scene) {
    let gpus = Gpus::open(1).unwrap();
    let own = gpus.local(0, SIZE).unwrap();
    let dmabuf = own.export().unwrap();
    scene.say(&dmabuf.as_raw_fd().to_string());
    drop(scene.hear());
}

/// A process with a buffer, and its exported descriptor.
fn owner(scene: &Scene) -> (Peer, OwnedFd) {
    let mut owner = scene.peer("owner");
    let dmabuf = sys::descriptor_of(owner.pid(), owner.hear().parse().unwrap()).unwrap();
    (owner, dmabuf)
}

/// Until the driver has released it.
fn ends(owner: Peer, judge: &Judge) {
    let processes = judge.alive()["processes"];
    owner.kill();
    while judge.alive()["processes"] == processes {
        sleep(Duration::from_millis(10));
    }
}

/// Closes files one after the other, as the end of a process does.
#[test]
fn a_descriptor_that_closes_while_jobs_run_is_released() {
    isolated(1, |scene| {
        if scene.role().is_some() {
            return owns(scene);
        }
        let judge = need!(Judge::find(), REAL_GPUS);
        let (owner, dmabuf) = owner(scene);
        let name = std::fs::read_to_string("/proc/self/comm").unwrap();
        let (bench, delayed) = (Bench::new(), DelayedCopies::of(name.trim()));
        bench.submit(0, &Sdma::new().copy(TWO, ONE, SIZE), &[]).unwrap();
        ends(owner, &judge);
        sleep(Duration::from_millis(200));
        let start = Instant::now();
        drop(bench);
        assert!(start.elapsed() > Duration::from_millis(900), "the close did not wait");
        drop((dmabuf, delayed));
        assert_eq!(judge.violations(), Vec::<String>::new());
    });
}

#[test]
fn memory_that_only_a_job_has_is_no_descriptor_s() {
    isolated(1, |scene| {
        if scene.role().is_some() {
            return owns(scene);
        }
        let judge = need!(Judge::find(), REAL_GPUS);
        let (owner, dmabuf) = owner(scene);
        let name = std::fs::read_to_string("/proc/self/comm").unwrap();
        let (mut bench, delayed) = (Bench::new(), DelayedCopies::of(name.trim()));
        let taken = bench.render.prime_fd_to_buffer(dmabuf.as_fd()).unwrap();
        bench.one.0 = taken.into();
        let submission = bench.submit(0, &Sdma::new().copy(TWO, ONE, SIZE), &[]).unwrap();
        bench.render.close_buffer(taken).unwrap();
        drop(dmabuf);
        ends(owner, &judge);
        // Longer than the judge lets a descriptor be in transit.
        sleep(Duration::from_millis(4500));
        assert_eq!(judge.violations(), Vec::<String>::new());
        drop(delayed);
        assert!(bench.render.wait(submission, LATE).unwrap());
    });
}
