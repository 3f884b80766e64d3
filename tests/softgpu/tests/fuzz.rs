// SPDX-License-Identifier: MIT OR Apache-2.0
//! Nonsense, a bounded amount from a known seed, from several processes at once. What it must not do is seen from
//! outside: an oops, a warning or a hang fails the machine's run, a leak fails the test.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;

use gpu_app::gpu::Gpus;
use rewake_kfd::abi::memory::Mapping;
use rewake_kfd::abi::*;
use rewake_kfd::render::Render;
use softgpu_tests::{Judge, Scene, isolated, sys};

/// Calls of each process.
const CALLS: u32 = 4000;
/// `SOFTGPU_FUZZ_SEED` chooses another.
const SEED: u64 = 0x5eed_0003;

/// Marsaglia's xorshift.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[usize::try_from(self.below(list.len() as u64)).unwrap()]
    }
}

/// Sizes of arguments of KFD's calls, by number; all others take 64 bytes.
fn kfd_number(random: &mut Random) -> u32 {
    const KNOWN: [u32; 25] = [
        IOC_GET_VERSION,
        IOC_CREATE_QUEUE,
        IOC_DESTROY_QUEUE,
        IOC_UPDATE_QUEUE,
        IOC_CREATE_EVENT,
        IOC_DESTROY_EVENT,
        IOC_SET_EVENT,
        IOC_RESET_EVENT,
        IOC_WAIT_EVENTS,
        IOC_GET_PROCESS_APERTURES_NEW,
        IOC_ACQUIRE_VM,
        IOC_ALLOC_MEMORY_OF_GPU,
        IOC_FREE_MEMORY_OF_GPU,
        IOC_MAP_MEMORY_TO_GPU,
        IOC_UNMAP_MEMORY_FROM_GPU,
        IOC_GET_DMABUF_INFO,
        IOC_IMPORT_DMABUF,
        IOC_EXPORT_DMABUF,
        IOC_SMI_EVENTS,
        IOC_SET_XNACK_MODE,
        IOC_CRIU_OP,
        IOC_AVAILABLE_MEMORY,
        IOC_RUNTIME_ENABLE,
        IOC_DBG_TRAP,
        IOC_SVM,
    ];
    match random.below(8) {
        0 => 0xc040_4b00 | u32::try_from(random.below(0x30)).unwrap(),
        1 => IOC_SVM + (u32::try_from(random.below(20)).unwrap() << 19),
        _ => random.of(&KNOWN),
    }
}

fn render_number(random: &mut Random) -> u32 {
    const KNOWN: [u32; 21] = [
        DRM_VERSION,
        DRM_GEM_CLOSE,
        DRM_PRIME_HANDLE_TO_FD,
        DRM_PRIME_FD_TO_HANDLE,
        DRM_SYNCOBJ_CREATE,
        DRM_SYNCOBJ_DESTROY,
        DRM_SYNCOBJ_WAIT,
        DRM_SYNCOBJ_TIMELINE_WAIT,
        DRM_SYNCOBJ_QUERY,
        DRM_AMD_GEM_CREATE,
        DRM_AMD_GEM_MMAP,
        DRM_AMD_CTX,
        DRM_AMD_BO_LIST,
        DRM_AMD_CS,
        DRM_AMD_INFO,
        DRM_AMD_GEM_VA,
        DRM_AMD_WAIT_CS,
        DRM_AMD_GEM_OP,
        DRM_AMD_GEM_USERPTR,
        DRM_AMD_USERQ,
        DRM_AMD_GEM_LIST_HANDLES,
    ];
    match random.below(8) {
        0 => 0xc040_6440 | u32::try_from(random.below(0x20)).unwrap(),
        _ => random.of(&KNOWN),
    }
}

/// A 64-bit word that a driver may take for something: often a real handle, address, size or descriptor.
fn word(random: &mut Random, pool: &[u64]) -> u64 {
    match random.below(6) {
        0 => random.next(),
        1 => random.below(16) | random.below(16) << 32,
        2 => 1 << random.below(64),
        3 => (1 << random.below(64)) - 1,
        _ => random.of(pool),
    }
}

/// No call waits for long, and no list of syncobjs is long: DRM's core, which is not what is tested, warns of them.
fn shorten(number: u32, argument: &mut [u8]) {
    let (times, counts): (&[usize], &[usize]) = match number & 0xffff {
        0x4b0c => (&[16], &[]),
        0x6447 | 0x6449 => (&[8], &[]),
        0x64c3 => (&[8], &[18]),
        0x64ca => (&[16], &[26]),
        0x64cb => (&[], &[18]),
        0x6452 => (&[16], &[]),
        _ => (&[], &[]),
    };
    for (places, length) in [(times, 8), (counts, 2)] {
        for place in places {
            for byte in argument.iter_mut().skip(*place).take(length) {
                *byte = 0;
            }
        }
    }
}

fn one_call(random: &mut Random, pool: &mut [u64], fds: &[(BorrowedFd<'_>, bool)], arena: &Mapping) {
    let (fd, kfd) = random.of(fds);
    let number = if kfd { kfd_number(random) } else { render_number(random) };
    let size = usize::try_from(number >> 16 & 0x3fff).unwrap();
    let mut argument = vec![0; size];
    for chunk in argument.chunks_mut(8) {
        let bytes = word(random, pool).to_le_bytes();
        let length = chunk.len();
        chunk.copy_from_slice(&bytes[..length]);
        if random.below(4) == 0 {
            chunk[..length / 2].fill(0);
        }
    }
    shorten(number, &mut argument);
    if sys::misuse(fd, number, &mut argument, arena) == 0 {
        // What the driver gave is what it may be given next.
        for chunk in argument.chunks_exact(8) {
            let place = usize::try_from(random.below(64)).unwrap();
            let given = u64::from_le_bytes(chunk.try_into().unwrap());
            if given != 0 && place < pool.len() {
                pool[place] = given;
            }
        }
    }
    if random.below(32) == 0 {
        let length = 4096 << random.below(3);
        drop(Mapping::shared(fd, word(random, pool) & !0xfff, length));
    }
}

fn calls(seed: u64) {
    let gpus = Gpus::open(1).unwrap();
    let device = gpus.device(0);
    let kfd = Arc::clone(device.kfd());
    let other = Render::open(device.node().render_minor()).unwrap();
    let arena = Mapping::anonymous(1 << 20).unwrap();
    let mut random = Random(seed | 1);
    let host = gpus.host(1 << 16).unwrap();
    let mut pool: Vec<u64> = vec![0; 64];
    for (index, slot) in pool.iter_mut().enumerate() {
        let gpu = u64::from(device.gpu_id());
        let address = arena.address() + (random.below(1 << 18) & !0xff);
        let known = [gpu, gpu << 32 | gpu, host.handle(), host.address(), address, 4096, 1 << 16];
        *slot = known[index % known.len()];
    }
    let fds = [(kfd.as_fd(), true), (device.render().as_fd(), false), (other.as_fd(), false)];
    for _ in 0..CALLS {
        for _ in 0..8 {
            let at = random.below((1 << 19) - 8) & !7;
            arena.store64(at, word(&mut random, &pool));
        }
        one_call(&mut random, &mut pool, &fds, &arena);
    }
}

fn seed() -> u64 {
    let chosen = std::env::var("SOFTGPU_FUZZ_SEED").ok();
    chosen.map_or(SEED, |seed| seed.parse().expect("SOFTGPU_FUZZ_SEED is a number"))
}

fn several(scene: &Scene) {
    if let Some(role) = scene.role() {
        scene.say("begun");
        calls(seed().wrapping_add(role.parse().unwrap()));
        return;
    }
    let mut peers: Vec<_> = ["1", "2", "3"].map(|role| scene.peer(role)).into();
    for peer in &mut peers {
        assert_eq!(peer.hear(), "begun");
    }
    // One ends as a crash does, in the middle.
    std::thread::sleep(std::time::Duration::from_millis(500));
    peers.remove(0).kill();
    for peer in peers {
        peer.finish();
    }
    // Nonsense breaks rules: that is no news. What is left alive is looked at afterwards.
    if let Some(judge) = Judge::find() {
        judge.clear();
    }
}

#[test]
fn nonsense_from_several_processes_harms_nobody() {
    isolated("nonsense_from_several_processes_harms_nobody", 1, several);
}
