// SPDX-License-Identifier: MIT OR Apache-2.0
//! The judge reports every violation, and nothing else: each test breaks one rule.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use gpu_app::chain::{Lane, Step};
use gpu_app::gpu::Gpus;
use gpu_app::kernel::Kernel;
use gpu_app::kfd::{Buffer, Device, Spec};
use rewake_amdgpu_uapi::Kfd;
use rewake_amdgpu_uapi::criu;
use rewake_amdgpu_uapi::topology::Topology;
use rewake_skip::need;
use softgpu_tests::snapshot::Snapshot;
use softgpu_tests::{Judge, REAL_GPUS, Scene, isolated};

const BUFFER: u64 = 64 * 1024;

fn on_first(kernel: Kernel) -> Step {
    Step { gpu: 0, queue: 0, kernel }
}

/// A restored process with one buffer of host memory, which is not loaded; it has queues and runs.
struct Restored {
    gpus: Arc<Gpus>,
    lane: Lane,
    out: Buffer,
    snapshot: Snapshot,
    address: u64,
    judge: Judge,
}

impl Restored {
    fn hash(&mut self, at: u64, bytes: u64) -> u64 {
        let hash = Kernel::Hash { out: self.out.address(), from: self.address + at, bytes, seed: 0 };
        self.lane.run(&[on_first(hash)]).unwrap();
        self.out.cpu().load64(0)
    }

    fn gpu(&self) -> u32 {
        self.gpus.device(0).gpu_id()
    }

    /// The violations of this kind, each of this process and GPU, in the buffer from byte `at`.
    fn assert_reported(&self, kind: &str, at: u64, end: u64) {
        for line in self.judge.take(kind) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let number = |word: &str| {
                let digits = word.strip_prefix("0x");
                digits.map_or_else(|| word.parse().ok(), |digits| u64::from_str_radix(digits, 16).ok())
            };
            assert_eq!(number(words[1]), Some(u64::from(std::process::id())), "{line}");
            assert_eq!(number(words[2]), Some(u64::from(self.gpu())), "{line}");
            let va = number(words[3]).expect("an address");
            assert!((self.address + at..self.address + end).contains(&va), "{line}");
        }
    }
}

/// Runs `heir` in a process restored from a donor's one buffer.
fn restored(scene: &Scene, heir: fn(Restored)) {
    let judge = need!(Judge::find(), REAL_GPUS);
    match scene.role() {
        None => {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("snapshot").display().to_string();
            let mut donor = scene.donor();
            donor.say(&path);
            let address = donor.hear();
            donor.kill();
            let mut second = scene.peer("heir");
            second.say(&path);
            second.say(&address);
            second.finish();
        }
        Some("donor") => {
            let kfd = Arc::new(Kfd::open().unwrap());
            let device = Device::open(&kfd, Topology::read().unwrap().gpus().next().unwrap()).unwrap();
            let host = Buffer::mapped(&device, Spec::gtt(BUFFER)).unwrap();
            host.cpu().write(0, &[1; 4096]);
            let counts = criu::process_info(kfd.as_fd()).unwrap();
            let image = criu::checkpoint(kfd.as_fd(), &counts).unwrap();
            let path = scene.hear();
            Snapshot::of(image).unwrap().write(path.as_ref()).unwrap();
            scene.say(&host.address().to_string());
            // The donor is killed here.
            let _ = scene.hear();
        }
        Some(_) => {
            let mut snapshot = Snapshot::read(scene.hear().as_ref()).unwrap();
            let address = scene.hear().parse().unwrap();
            let kfd = Arc::new(Kfd::open().unwrap());
            let mut devices = snapshot.restore(&kfd).unwrap();
            devices.truncate(1);
            let gpus = Gpus::on(devices).unwrap();
            let lane = Lane::new(&gpus, 1, 1).unwrap();
            let out = gpus.host(4096).unwrap();
            criu::resume(kfd.as_fd(), std::process::id()).unwrap();
            heir(Restored { gpus, lane, out, snapshot, address, judge });
        }
    }
}

#[test]
fn a_gpu_that_reads_missing_memory_is_reported() {
    isolated(1, |scene| {
        restored(scene, |mut restored| {
            restored.hash(8192, 4096);
            restored.assert_reported("gpu-read-not-restored", 8192, 12288);
        });
    });
}

#[test]
fn reads_of_loaded_memory_are_no_violation() {
    isolated(1, |scene| {
        restored(scene, |mut restored| {
            restored.snapshot.load(|_| true).unwrap();
            restored.hash(0, BUFFER);
        });
    });
}

#[test]
fn reads_of_declared_zeros_only_are_no_violation() {
    isolated(1, |scene| {
        restored(scene, |mut restored| {
            restored.judge.declare_zero(std::process::id(), restored.gpu(), restored.address + 4096, 8192);
            let zeros = restored.hash(4096, 8192);
            assert_eq!(zeros, gpu_app::kernel::hash(std::iter::repeat_n(0, 1024), 0));
            assert_eq!(restored.judge.violations(), Vec::<String>::new());
            restored.hash(4096, 12288);
            restored.assert_reported("gpu-read-not-restored", 12288, 16384);
        });
    });
}

#[test]
fn bytes_that_a_gpu_has_written_count_as_loaded() {
    isolated(1, |scene| {
        restored(scene, |mut restored| {
            let fill = Kernel::Fill { to: restored.address, words: 512, value: 3 };
            restored.lane.run(&[on_first(fill)]).unwrap();
            restored.hash(0, 2048);
            assert_eq!(restored.judge.violations(), Vec::<String>::new());
            restored.hash(0, 2056);
            restored.assert_reported("gpu-read-not-restored", 0, 4096);
        });
    });
}

#[test]
fn a_cpu_that_reads_missing_memory_is_reported() {
    isolated(1, |scene| {
        restored(scene, |restored| {
            let (view, at) = restored.snapshot.view(restored.address).unwrap();
            let _ = view.load64(at + 4096);
            restored.judge.take("cpu-read-not-restored");
        });
    });
}

#[test]
fn the_damage_of_a_second_resume_stale_memory() {
    isolated(1, |scene| {
        restored(scene, |mut restored| {
            let kfd = Arc::clone(restored.gpus.device(0).kfd());
            // Queues run, so the first RESUME's work is done: only now does a second one do damage.
            let fill = Kernel::Fill { to: restored.out.address(), words: 2, value: 0 };
            restored.lane.run(&[on_first(fill)]).unwrap();
            assert!(criu::resume(kfd.as_fd(), std::process::id()).is_err());
            restored.judge.take("resume-repeated");
            let memory = restored.gpus.registered(&vec![1; 1 << 20]).unwrap();
            let hash =
                Kernel::Hash { out: restored.out.address(), from: memory.address(), bytes: 1 << 20, seed: 0 };
            // No queue is evicted for the page that is unmapped, and no lookup finds the new page: the next
            // access is stale.
            for _ in 0..2 {
                restored.lane.run(&[on_first(hash)]).unwrap();
                memory.cpu().discard().unwrap();
            }
            restored.judge.take("stale-userptr");
        });
    });
}

#[test]
fn a_save_area_of_another_save_is_reported() {
    isolated(1, |_| {
        let judge = need!(Judge::find(), REAL_GPUS);
        let gpus = Gpus::open(1).unwrap();
        let mut lane = Lane::new(&gpus, 1, 1).unwrap();
        let kfd = Arc::clone(gpus.device(0).kfd());
        // Long, so that it runs when the queue is stopped, on a slow machine too; there it may not have begun
        // at first.
        lane.launch(&[on_first(Kernel::Spin { microseconds: 60_000_000 })]).unwrap();
        let waves = judge.paused().waves;
        let under_way = (0..60).any(|_| {
            thread::sleep(Duration::from_millis(500));
            criu::process_info(kfd.as_fd()).unwrap();
            let found = judge.paused().waves > waves;
            if !found {
                criu::unpause(kfd.as_fd()).unwrap();
            }
            found
        });
        assert!(under_way, "the dispatch was never seen running");
        lane.queues(0)[0].save_area().discard().unwrap();
        criu::unpause(kfd.as_fd()).unwrap();
        // The queue is resumed when the area's new pages have been looked up.
        for _ in 0..600 {
            if !judge.violations().is_empty() {
                break;
            }
            thread::sleep(Duration::from_millis(100));
        }
        judge.take("save-area-stale");
    });
}
