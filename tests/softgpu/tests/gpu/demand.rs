// SPDX-License-Identifier: MIT OR Apache-2.0
//! Demand loads by another thread: a demanded buffer is loaded first, and reported as soon as it is resident.

use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use gpu_app::gpu::Gpus;
use gpu_app::kfd::Buffer;
use rewake_bo_contents::{
    BackgroundLoad, GpuPagesFile, LoadEvent, LoadHandle, ProcessBuffers, Progress, Report,
};
use rewake_criu_images::amdgpu::{KfdBuffer, KfdImage, pages_name};
use rewake_skip::need;
use softgpu_tests::{Machine, REAL_GPUS, Scene, isolated};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// The unit of reads and copies.
const CHUNK: u64 = 2 * MIB;
/// The header before the first byte of the first buffer.
const HEADER: u64 = 8;
/// N of `amdgpu-kfd-N.img`.
const ID: u32 = 3;
/// The byte that buffers hold before they are loaded.
const STALE: u8 = 0xaa;

/// CPUs can access all GPU memory.
const SEEN: (&str, &str) = ("small_bar", "0");
/// A chunk is copied in an eleventh of a second.
const SLOW: [(&str, &str); 3] = [("copy_mbps", "24"), ("sdma_rings", "1"), SEEN];
/// Chunks of one GPU that are read, or in flight, before they are copied.
const SLOTS: usize = 8;
/// Attempts, since the case needs reads that are faster than copies.
const ROUNDS: usize = 6;

/// A buffer of an image.
#[derive(Debug, Clone, Copy)]
struct Made {
    gpu: usize,
    bytes: u64,
    hole: bool,
    /// The load leaves it out.
    left: bool,
}

fn made(bytes: u64) -> Made {
    Made { gpu: 0, bytes, hole: false, left: false }
}

/// A process's buffers with stale bytes, and files for them.
struct Image {
    made: Vec<Made>,
    buffers: Vec<Buffer>,
    files: Vec<GpuPagesFile>,
    dmabufs: Vec<Option<OwnedFd>>,
    minors: Vec<u32>,
    _folder: tempfile::TempDir,
}

/// The byte that fills a buffer of this number: neither zero nor stale.
fn byte(buffer: usize) -> u8 {
    u8::try_from(buffer % 150).unwrap() + 1
}

impl Image {
    fn new(gpus: &Arc<Gpus>, made: &[Made]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let image = |made: &Made| KfdBuffer {
            size: made.bytes,
            gpu_id: gpus.device(made.gpu).gpu_id(),
            alloc_flags: 1,
            ..KfdBuffer::default()
        };
        let image = KfdImage { buffers: made.iter().map(image).collect(), ..KfdImage::default() };
        let buffer = |made: &Made| {
            let buffer = gpus.local(made.gpu, made.bytes).unwrap();
            buffer.cpu().write(0, &vec![STALE; usize::try_from(made.bytes).unwrap()]);
            buffer
        };
        let buffers: Vec<Buffer> = made.iter().map(buffer).collect();
        let export = |(made, buffer): (&Made, &Buffer)| (!made.left).then(|| buffer.export().unwrap());
        let dmabufs = made.iter().zip(&buffers).map(export).collect();
        let (mut files, mut minors) = (Vec::new(), Vec::new());
        for gpu in 0..gpus.count() {
            let gpu_id = gpus.device(gpu).gpu_id();
            let file = File::create(folder.path().join(pages_name(ID, gpu_id))).unwrap();
            let mut end = HEADER;
            for (number, made) in made.iter().enumerate().filter(|(_, made)| made.gpu == gpu) {
                if !made.hole {
                    let bytes = vec![byte(number); usize::try_from(made.bytes).unwrap()];
                    file.write_all_at(&bytes, end).unwrap();
                }
                end += made.bytes;
            }
            file.set_len(end).unwrap();
            file.write_all_at(&(end - HEADER).to_le_bytes(), 0).unwrap();
            let open = File::open(folder.path()).unwrap();
            minors.push(gpus.device(gpu).node().render_minor());
            files.push(GpuPagesFile::open(open.as_fd(), ID, &image, gpu_id, minors[gpu]).unwrap());
        }
        Self { made: made.to_vec(), buffers, files, dmabufs, minors, _folder: folder }
    }

    /// Loads the image in a thread of its own, while `act` receives the numbers of buffers as they become
    /// resident, and how many bytes were resident by then.
    fn load<T>(&self, act: impl FnOnce(&LoadHandle, &Receiver<(usize, u64)>) -> T) -> (Report, T) {
        self.load_with(|_| (), act)
    }

    /// As [`Image::load`]. `before` receives each number too, and the load waits until it has returned.
    fn load_with<T>(
        &self,
        before: impl Fn(usize) + Send,
        act: impl FnOnce(&LoadHandle, &Receiver<(usize, u64)>) -> T,
    ) -> (Report, T) {
        let processes = [ProcessBuffers { files: &self.files, dmabufs: &self.dmabufs }];
        let loading = BackgroundLoad::new(&processes, None).unwrap();
        let (desk, counted) = (loading.handle(), loading.handle());
        let (tell, reports) = channel();
        thread::scope(|scope| {
            let load = scope.spawn(move || {
                loading.run(move |whole| {
                    if let LoadEvent::Buffer { number: buffer, .. } = whole {
                        tell.send((buffer, resident(&counted))).unwrap();
                        before(buffer);
                    }
                })
            });
            let answer = act(&desk, &reports);
            (load.join().unwrap().unwrap().expect("the image has bytes to load"), answer)
        })
    }

    /// Whether all its bytes are right: the file's bytes, or stale bytes where the load leaves the buffer
    /// out.
    fn is_right(&self, buffer: usize) -> bool {
        let right = match self.made[buffer] {
            Made { left: true, .. } => STALE,
            Made { hole: true, .. } => 0,
            _ => byte(buffer),
        };
        let mut bytes = vec![!right; usize::try_from(self.made[buffer].bytes).unwrap()];
        self.buffers[buffer].cpu().read(0, &mut bytes);
        bytes.iter().all(|byte| *byte == right)
    }
}

/// Runs `body` where copies are slow. It runs in another process: the machine changes while no process uses
/// it.
fn slowly(scene: &Scene, body: fn()) {
    if scene.role().is_some() {
        return body();
    }
    let machine = need!(Machine::find(), REAL_GPUS);
    machine.becomes(&SLOW);
    assert!(scene.peer("loads").end().success());
}

/// Runs `body` where CPUs can access all GPU memory, in the same way; on real GPUs as they are.
fn seen(scene: &Scene, body: fn()) {
    if scene.role().is_some() {
        return body();
    }
    let Some(machine) = Machine::find() else { return body() };
    machine.becomes(&[SEEN]);
    assert!(scene.peer("loads").end().success());
}

fn resident(desk: &LoadHandle) -> u64 {
    desk.progress().iter().map(|progress| progress.resident).sum()
}

/// Demands the last of 24 buffers, and one before it, when the first is resident; until then the load waits.
/// Returns how many chunks came before both.
fn far_end(gpus: &Arc<Gpus>) -> u64 {
    let image = &Image::new(gpus, &[made(CHUNK); 24]);
    let (go, waits) = channel::<()>();
    let both_are_wanted = move |buffer| {
        if buffer == 0 {
            waits.recv().unwrap();
        }
    };
    let (_, (meanwhile, order)) = image.load_with(both_are_wanted, move |desk, reports| {
        let (first, before) = reports.recv().unwrap();
        assert_eq!(first, 0, "in file order before the first demand load");
        let mut order = vec![first];
        desk.demand(0, 23);
        desk.demand(0, 20);
        go.send(()).unwrap();
        let mut by_then = before;
        for wanted in [23, 20] {
            while order.last() != Some(&wanted) {
                let (buffer, bytes) = reports.recv().unwrap();
                order.push(buffer);
                by_then = bytes;
            }
            assert!(image.is_right(wanted), "{wanted} is reported before its bytes are resident");
        }
        let under_way = |buffer: &usize| *buffer < SLOTS || [23, 20].contains(buffer);
        assert!(order.iter().all(under_way), "before the wanted buffers, and not in flight: {order:?}");
        order.extend(reports.iter().map(|(buffer, _)| buffer));
        ((by_then - before) / CHUNK, order)
    });
    let mut sorted = order.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..24).collect::<Vec<_>>(), "each once: {order:?}");
    assert!((0..24).all(|buffer| image.is_right(buffer)));
    meanwhile
}

#[test]
fn a_demand_load_waits_only_for_reads_in_flight() {
    isolated(1, |scene| {
        slowly(scene, || {
            let gpus = Gpus::open(1).unwrap();
            // Their own four chunks of the file, two on the ring, and two that entered the ring while the
            // first was read.
            let overtakes = (0..ROUNDS).any(|_| far_end(&gpus) <= 8);
            assert!(overtakes, "no demand load overtook a chunk that was read already");
        });
    });
}

#[test]
fn small_buffers_are_loaded_before_large_ones() {
    isolated(1, |scene| {
        slowly(scene, || {
            let small = [made(4 * KIB); 300];
            let image = Image::new(&Gpus::open(1).unwrap(), &[&[made(5 * CHUNK); 2][..], &small].concat());
            let (_, order) =
                image.load(|_, reports| reports.iter().map(|(buffer, _)| buffer).collect::<Vec<usize>>());
            let large = order.iter().position(|buffer| *buffer < 2);
            assert_eq!(large, Some(300), "{order:?}");
        });
    });
}

#[test]
fn each_buffer_is_reported_once_and_progress_counts_bytes() {
    isolated(2, |scene| {
        seen(scene, || {
            let mut all = vec![made(64 * KIB); 40];
            all.extend([made(5 * MIB), made(3 * CHUNK), made(12 * KIB), made(3 * MIB)]);
            all[7].hole = true;
            all[8].left = true;
            all[41].hole = true;
            all[43].left = true;
            for gpu in [10, 11, 40] {
                all[gpu].gpu = 1;
            }
            let image = Image::new(&Gpus::open(2).unwrap(), &all);
            let sum = |gpu: usize| {
                all.iter().filter(|made| made.gpu == gpu && !made.left).map(|made| made.bytes).sum::<u64>()
            };
            let progress = |resident: fn(u64) -> u64| {
                let of = |gpu: usize| Progress {
                    process: 0,
                    minor: image.minors[gpu],
                    resident: resident(sum(gpu)),
                    all: sum(gpu),
                };
                vec![of(0), of(1)]
            };
            let processes = [ProcessBuffers { files: &image.files, dmabufs: &image.dmabufs }];
            assert_eq!(BackgroundLoad::new(&processes, None).unwrap().handle().progress(), progress(|_| 0));
            let (report, mut order) = image.load(|desk, reports| {
                // Left out, unknown, of no process; a hole, twice; and a resident one.
                for (process, buffer) in [(0, 8), (0, 43), (0, 44), (1, 0), (0, 41), (0, 41)] {
                    desk.demand(process, buffer);
                }
                let (first, _) = reports.recv().unwrap();
                desk.demand(0, first);
                let others = reports.iter().map(|(buffer, _)| buffer);
                let order: Vec<usize> = std::iter::once(first).chain(others).collect();
                assert_eq!(desk.progress(), progress(|all| all));
                desk.demand(0, 0);
                order
            });
            assert_eq!(report.moved.buffers, 42);
            order.sort_unstable();
            assert_eq!(order, (0..44).filter(|buffer| !all[*buffer].left).collect::<Vec<_>>());
            for (buffer, made) in all.iter().enumerate() {
                assert!(image.is_right(buffer), "{buffer}: {made:?}");
            }
        });
    });
}
