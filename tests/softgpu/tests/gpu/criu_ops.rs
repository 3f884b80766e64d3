// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checkpoint operations: what each does, which process may call it, in what order.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use gpu_app::chain::{Lane, Step};
use gpu_app::gpu::Gpus;
use gpu_app::kernel::Kernel;
use rewake_amdgpu_uapi::abi::call::{self, Argument as _};
use rewake_amdgpu_uapi::abi::{
    KFD_IOC_ALLOC_MEM_FLAGS_GTT, KFD_IOC_ALLOC_MEM_FLAGS_USERPTR, KFD_IOC_ALLOC_MEM_FLAGS_VRAM,
    kfd_ioctl_get_version_args,
};
use rewake_amdgpu_uapi::criu::{self, Counts};
use rewake_amdgpu_uapi::topology::Topology;
use rewake_amdgpu_uapi::{Error, Kfd};
use rewake_skip::need;
use softgpu_tests::criu::queues_can_be_restored;
use softgpu_tests::snapshot::Snapshot;
use softgpu_tests::{Judge, REAL_GPUS, Scene, isolated, sys};

const A_WHILE: Duration = Duration::from_millis(300);

fn errno<T>(result: Result<T, Error>) -> Option<i32> {
    result.err().and_then(|error| error.errno())
}

fn fill(to: u64, value: u32) -> Step {
    Step { gpu: 0, queue: 0, kernel: Kernel::Fill { to, words: 1, value } }
}

#[test]
fn a_process_is_counted_and_described_to_the_last_byte() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let lane = Lane::new(&gpus, 1, 2).unwrap();
        let local = gpus.local(0, 12288).unwrap();
        let host = gpus.registered(&[1; 8192]).unwrap();
        let kfd = gpus.device(0).kfd().as_fd();
        let counts = criu::process_info(kfd).unwrap();
        let image = criu::checkpoint(kfd, &counts).unwrap();
        criu::unpause(kfd).unwrap();

        let ids: Vec<u32> = Topology::read().unwrap().gpus().map(|node| node.gpu_id).collect();
        assert_eq!(image.devices.iter().map(|device| device.user_gpu_id).collect::<Vec<_>>(), ids);
        assert_eq!(image.devices.iter().map(|device| device.actual_gpu_id).collect::<Vec<_>>(), ids);
        // Reading to the last byte by the documented layout proves sizes and offsets.
        let private = image.private().unwrap();
        for dmabuf in image.dmabufs.iter().flatten() {
            let flags = nix::fcntl::fcntl(dmabuf, nix::fcntl::FcntlArg::F_GETFD).unwrap();
            assert_eq!(flags, libc::FD_CLOEXEC, "a dma-buf would outlive an exec");
        }
        let place = image.bos.iter().position(|bo| bo.addr == local.address()).expect("the VRAM buffer");
        let bo = image.bos[place];
        assert_eq!((bo.size, bo.offset, bo.gpu_id), (12288, local.offset(), ids[0]));
        assert_ne!(bo.alloc_flags & KFD_IOC_ALLOC_MEM_FLAGS_VRAM, 0);
        assert_eq!(u64::from(private.bos()[place].idr_handle), local.handle() & 0xffff_ffff);
        assert_eq!(private.bos()[place].mapped(), [ids[0]]);
        assert!(image.dmabufs[place].is_some());

        let place = image.bos.iter().position(|bo| bo.addr == host.address()).expect("the userptr buffer");
        assert_ne!(image.bos[place].alloc_flags & KFD_IOC_ALLOC_MEM_FLAGS_USERPTR, 0);
        assert_eq!(private.bos()[place].user_address, host.address());
        assert!(image.dmabufs[place].is_none());
        let own = KFD_IOC_ALLOC_MEM_FLAGS_VRAM | KFD_IOC_ALLOC_MEM_FLAGS_GTT;
        for (bo, dmabuf) in image.bos.iter().zip(&image.dmabufs) {
            assert_eq!(dmabuf.is_some(), bo.alloc_flags & own != 0, "{bo:?}");
        }

        let queues: Vec<_> = private.queues().collect();
        assert_eq!(queues.len(), 2);
        for (queue, own) in queues.iter().zip(lane.queues(0)) {
            assert_eq!(
                (queue.id, queue.ring, queue.ring_size),
                (own.id(), own.ring().address(), own.ring().size())
            );
            assert_eq!((queue.percent, queue.priority, queue.gpu), (100, 7, ids[0]));
            assert_eq!((queue.save_area, queue.write_pointer % 4096), (own.save_area().address(), 0));
            assert_eq!(queue.read_pointer - queue.write_pointer, 128);
            assert!(!queue.mqd().is_empty() && !queue.control_stack().is_empty());
        }
        // Events of the process: one for the end of a lane, one for faults. The first has the page.
        let events: Vec<_> = private.events().collect();
        assert_eq!(events.len(), 2);
        assert_eq!(events.iter().filter(|event| event.page != 0).count(), 1, "{events:?}");
        let ranges = private.ranges().count();
        assert_eq!(
            ranges > 0,
            gpus.device(0).node().has_svm(),
            "save areas are SVM ranges where the kernel has SVM"
        );
    });
}

#[test]
fn private_data_is_restored_byte_for_byte() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let _lane = Lane::new(&gpus, 1, 2).unwrap();
        let _local = gpus.local(0, 12288).unwrap();
        let _host = gpus.registered(&[1; 8192]).unwrap();
        let kfd = gpus.device(0).kfd().as_fd();
        let counts = criu::process_info(kfd).unwrap();
        let image = criu::checkpoint(kfd, &counts).unwrap();
        criu::unpause(kfd).unwrap();

        let mut private = image.private().unwrap();
        assert_eq!(private.write(), image.private);
        private.queues_mut().for_each(|queue| queue.percent = 0);
        let gated = private.write();
        let changed = gated.iter().zip(&image.private).filter(|(new, old)| new != old).count();
        assert_eq!((gated.len(), changed), (image.private.len(), 2), "100 % of two queues, one byte each");
    });
}

#[test]
fn queues_of_a_paused_process_do_not_run() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let mut lane = Lane::new(&gpus, 1, 1).unwrap();
        let word = gpus.host(4096).unwrap();
        let kfd = gpus.device(0).kfd().as_fd();
        for round in 1..4 {
            criu::process_info(kfd).unwrap();
            lane.launch(&[fill(word.address(), round)]).unwrap();
            thread::sleep(A_WHILE);
            assert_eq!(word.cpu().load32(0), round - 1);
            criu::unpause(kfd).unwrap();
            lane.wait(1).unwrap();
            assert_eq!(word.cpu().load32(0), round);
        }
    });
}

#[test]
fn work_in_the_middle_is_interrupted_and_continues() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let mut lane = Lane::new(&gpus, 1, 1).unwrap();
        let words = 1_u64 << 18;
        let ones = gpus.registered(&[1, 0, 0, 0].repeat(1 << 18)).unwrap();
        let sums = gpus.host(words * 4).unwrap();
        let sum = Kernel::Axpy { y: sums.address(), x: ones.address(), words, a: 1 };
        let steps = [Step { gpu: 0, queue: 0, kernel: sum }; 20];
        let kfd = gpus.device(0).kfd().as_fd();
        lane.launch(&steps).unwrap();
        for _ in 0..20 {
            criu::process_info(kfd).unwrap();
            let before = sums.cpu().load32(words * 4 - 4);
            thread::sleep(Duration::from_millis(3));
            assert_eq!(sums.cpu().load32(words * 4 - 4), before, "it writes while it is paused");
            criu::unpause(kfd).unwrap();
        }
        lane.wait(steps.len()).unwrap();
        for at in [0, words * 2, words * 4 - 4] {
            assert_eq!(sums.cpu().load32(at), 20, "lost or done twice at {at:#x}");
        }
    });
}

#[test]
fn calls_out_of_order_are_refused() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let kfd = gpus.device(0).kfd().as_fd();
        let counts = criu::process_info(kfd).unwrap();
        for wrong in [
            Counts { bos: counts.bos + 1, ..counts },
            Counts { objects: counts.objects.wrapping_sub(1), ..counts },
            Counts { devices: counts.devices + 1, ..counts },
            Counts { private: counts.private + 1, ..counts },
        ] {
            assert_eq!(errno(criu::checkpoint(kfd, &wrong)), Some(libc::EINVAL), "{wrong:?}");
        }
        criu::checkpoint(kfd, &counts).unwrap();
        criu::unpause(kfd).unwrap();
        assert_eq!(errno(criu::checkpoint(kfd, &counts)), Some(libc::EINVAL), "not paused");
        assert_eq!(errno(criu::unpause(kfd)), Some(libc::EINVAL), "not paused");
        if let Some(judge) = Judge::find() {
            judge.take("unpause-out-of-turn");
        }
    });
}

#[test]
fn pausing_twice_is_for_ever() {
    isolated(1, |_| {
        let judge = need!(Judge::find(), REAL_GPUS);
        let gpus = Gpus::open(1).unwrap();
        let mut lane = Lane::new(&gpus, 1, 1).unwrap();
        let word = gpus.host(4096).unwrap();
        let kfd = gpus.device(0).kfd().as_fd();
        criu::process_info(kfd).unwrap();
        criu::process_info(kfd).unwrap();
        judge.take("unpause-out-of-turn");
        criu::unpause(kfd).unwrap();
        lane.launch(&[fill(word.address(), 1)]).unwrap();
        thread::sleep(A_WHILE);
        assert_eq!(word.cpu().load32(0), 0, "one eviction is left over");
        assert_eq!(errno(criu::unpause(kfd)), Some(libc::EINVAL));
        judge.take("unpause-out-of-turn");
    });
}

#[test]
fn only_the_tracing_thread_may_ask_about_another_process() {
    isolated(1, |scene| {
        if scene.role().is_some() {
            let gpus = Gpus::open(1).unwrap();
            scene.say(&gpus.device(0).kfd().as_fd().as_raw_fd().to_string());
            let _ = scene.hear();
            return;
        }
        let mut target = scene.peer("target");
        let number = target.hear().parse().unwrap();
        let kfd = sys::descriptor_of(target.pid(), number).unwrap();
        assert_eq!(errno(criu::process_info(kfd.as_fd())), Some(libc::EBADF), "not traced");
        sys::seize(target.pid()).unwrap();
        let elsewhere =
            thread::scope(|scope| scope.spawn(|| errno(criu::process_info(kfd.as_fd()))).join().unwrap());
        assert_eq!(elsewhere, Some(libc::EBADF), "another thread of the tracer");
        let counts = criu::process_info(kfd.as_fd()).unwrap();
        assert_eq!(counts.pid, target.pid());
        let image = criu::checkpoint(kfd.as_fd(), &counts).unwrap();
        assert!(image.dmabufs.iter().any(Option::is_some), "they are installed here");
        criu::unpause(kfd.as_fd()).unwrap();
        let mut version = kfd_ioctl_get_version_args::zeroed();
        let error = call::get_version(kfd.as_fd(), &mut version).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF), "no other call");
        target.say("end");
        target.finish();
    });
}

#[test]
fn the_capability_is_asked_for() {
    isolated(1, |_| {
        let kfd = Kfd::open().unwrap();
        criu::process_info(kfd.as_fd()).unwrap();
        criu::unpause(kfd.as_fd()).unwrap();
        nix::unistd::setuid(nix::unistd::Uid::from_raw(65534)).unwrap();
        assert_eq!(errno(criu::process_info(kfd.as_fd())), Some(libc::EACCES));
        kfd.version().expect("other calls still succeed");
    });
}

/// Runs the body's first process as a donor, which leaves a snapshot, and a second process as its heir.
fn donor_and_successor(scene: &Scene, donor: fn(&Scene) -> (Snapshot, String), heir: fn(Snapshot, &str)) {
    match scene.role() {
        None => {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("snapshot").display().to_string();
            let mut first = scene.donor();
            first.say(&path);
            let message = first.hear();
            first.kill();
            let mut second = scene.peer("heir");
            second.say(&path);
            second.say(&message);
            second.finish();
        }
        Some("donor") => {
            let path = scene.hear();
            let (snapshot, message) = donor(scene);
            snapshot.write(path.as_ref()).unwrap();
            scene.say(&message);
            // The donor is killed here.
            let _ = scene.hear();
        }
        Some(_) => {
            let snapshot = Snapshot::read(scene.hear().as_ref()).unwrap();
            heir(snapshot, &scene.hear());
        }
    }
}

/// A process in the middle of twenty sums.
fn summing(_: &Scene) -> (Snapshot, String) {
    let gpus = Gpus::open(1).unwrap();
    let mut lane = Lane::new(&gpus, 1, 1).unwrap();
    let words = 1_u64 << 16;
    let ones = gpus.registered(&[1, 0, 0, 0].repeat(1 << 16)).unwrap();
    let sums = gpus.host(words * 4).unwrap();
    let sum = Kernel::Axpy { y: sums.address(), x: ones.address(), words, a: 1 };
    let kfd = gpus.device(0).kfd().as_fd();
    // A thread that the scheduler delays finds all of them done: the next ones take longer.
    let stopped = [20_000, 200_000, 1_000_000].into_iter().find_map(|microseconds| {
        sums.cpu().write(0, &vec![0; 1 << 18]);
        let busy = Kernel::Spin { microseconds };
        let steps = [sum, busy].map(|kernel| Step { gpu: 0, queue: 0, kernel }).repeat(20);
        lane.launch(&steps).unwrap();
        while sums.cpu().load32(0) < 5 {
            thread::sleep(Duration::from_micros(100));
        }
        let counts = criu::process_info(kfd).unwrap();
        if sums.cpu().load32(0) < 20 {
            return Some(counts);
        }
        criu::unpause(kfd).unwrap();
        lane.wait(steps.len()).unwrap();
        None
    });
    let counts = stopped.expect("some of the sums left to do at the checkpoint");
    let snapshot = Snapshot::of(criu::checkpoint(kfd, &counts).unwrap()).unwrap();
    (snapshot, sums.address().to_string())
}

#[test]
fn a_restored_process_continues_where_it_was() {
    isolated(1, |scene| {
        donor_and_successor(scene, summing, |mut snapshot, message| {
            let kfd = Arc::new(Kfd::open().unwrap());
            let _memory = snapshot.put_memory().unwrap();
            let restored = snapshot.restore(&kfd);
            if !queues_can_be_restored() {
                let error = restored.unwrap_err();
                let found = error.downcast_ref::<Error>().and_then(Error::errno);
                assert_eq!(found, Some(libc::EINVAL), "{error:#}");
                return;
            }
            let _devices = restored.unwrap();
            snapshot.load(|_| true).unwrap();
            let (sums, at) = snapshot.view(message.parse().unwrap()).unwrap();
            let before = sums.load32(at);
            thread::sleep(A_WHILE);
            assert_eq!(sums.load32(at), before, "it runs before RESUME");
            criu::resume(kfd.as_fd(), std::process::id()).unwrap();
            for _ in 0..600 {
                if sums.load32(at + (1 << 18) - 4) == 20 {
                    break;
                }
                thread::sleep(Duration::from_millis(100));
            }
            for word in [0, 1 << 17, (1 << 18) - 4] {
                assert_eq!(sums.load32(at + word), 20, "lost or done twice at {word:#x}");
            }
        });
    });
}

/// Buffers alone: no queue, no event.
fn buffers(_: &Scene) -> (Snapshot, String) {
    use gpu_app::kfd::{Buffer, Device, Spec};
    let topology = Topology::read().unwrap();
    let kfd = Arc::new(Kfd::open().unwrap());
    let device = Device::open(&kfd, topology.gpus().next().unwrap()).unwrap();
    let host = Buffer::mapped(&device, Spec::gtt(8192)).unwrap();
    host.cpu().write(0, &[0x77; 8192]);
    let counts = criu::process_info(kfd.as_fd()).unwrap();
    let snapshot = Snapshot::of(criu::checkpoint(kfd.as_fd(), &counts).unwrap()).unwrap();
    (snapshot, host.address().to_string())
}

#[test]
fn a_second_resume_is_refused_and_reported() {
    isolated(1, |scene| {
        donor_and_successor(scene, buffers, |mut snapshot, message| {
            let kfd = Arc::new(Kfd::open().unwrap());
            let _devices = snapshot.restore(&kfd).unwrap();
            snapshot.load(|_| true).unwrap();
            criu::resume(kfd.as_fd(), std::process::id()).unwrap();
            let (view, at) = snapshot.view(message.parse().unwrap()).unwrap();
            assert_eq!(view.load32(at + 8188), 0x7777_7777);
            let judge = need!(Judge::find(), REAL_GPUS);
            assert_eq!(judge.violations(), Vec::<String>::new());
            assert_eq!(errno(criu::resume(kfd.as_fd(), std::process::id())), Some(libc::EINVAL));
            judge.take("resume-repeated");
        });
    });
}

#[test]
fn an_image_that_does_not_fit_is_refused() {
    isolated(1, |scene| {
        donor_and_successor(scene, buffers, |mut snapshot, _| {
            let kfd = Arc::new(Kfd::open().unwrap());
            let device = snapshot.image.devices.pop().unwrap();
            assert!(snapshot.restore(&kfd).is_err(), "a GPU too few");
            snapshot.image.devices.push(device);
            snapshot.image.private[0] = 2;
            let error = snapshot.restore(&kfd).unwrap_err();
            let found = error.downcast_ref::<Error>().and_then(Error::errno);
            assert_eq!(found, Some(libc::EINVAL), "another version: {error:#}");
        });
    });
}

#[test]
fn a_process_that_does_not_exist_is_not_resumed() {
    isolated(1, |_| {
        let kfd = Kfd::open().unwrap();
        assert_eq!(errno(criu::resume(kfd.as_fd(), 0x3f_fff0)), Some(libc::ESRCH));
        assert_eq!(errno(criu::resume(kfd.as_fd(), 1)), Some(libc::ESRCH), "no process that uses GPUs");
    });
}
