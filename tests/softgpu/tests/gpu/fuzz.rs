// SPDX-License-Identifier: MIT OR Apache-2.0
//! Random calls, a bounded number from a known seed, from several processes at once. An oops, a warning or a
//! hang fails the machine's run. A leak fails the test.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;

use gpu_app::gpu::Gpus;
use rewake_amdgpu_uapi::abi::memory::Mapping;
use rewake_amdgpu_uapi::abi::*;
use rewake_amdgpu_uapi::render::Render;
use softgpu_tests::random::{Random, count};
use softgpu_tests::{Judge, isolated, sys};

/// Calls of each process.
const CALLS: u32 = 4000;
/// `SOFTGPU_FUZZ_SEED` chooses another seed.
const SEED: u64 = 0x5eed_0003;

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
        0 => 0xc040_4b00 | random.below(0x30_u32),
        1 => IOC_SVM + (random.below(20_u32) << 19),
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
        0 => 0xc040_6440 | random.below(0x20_u32),
        _ => random.of(&KNOWN),
    }
}

/// What a field of a well-formed call holds.
#[derive(Clone, Copy)]
enum Field {
    Is(u64),
    OneOf(&'static [u64]),
    /// The id of the process's GPU.
    Gpu,
    /// A buffer of KFD, a GEM handle, or a queue, event, context or syncobj that an earlier call returned.
    Given,
    /// A GPU address where a buffer may be.
    Place,
    /// An address in the mapped ring, or in the page of pointers.
    Ring,
    Pointers,
    /// An address in the arena; its first word is the GPU's id.
    Arena,
}

use Field::{Arena, Given, Gpu, Is, OneOf, Place, Pointers, Ring};

/// Memory kinds of KFD, writable and executable; also two at once.
const KINDS: &[u64] =
    &[0x8000_0001, 0x8000_0002, 0xc000_0001, 0x8000_0004, 0x8000_0008, 0x8000_0010, 0x8000_0003];
const SIZES: &[u64] = &[4096, 8192, 1 << 16, 1 << 20];
const SMALL: &[u64] = &[0, 1, 2, 3];

/// A number, and for each field its place, its bytes and its content.
type Call = (u32, &'static [(usize, usize, Field)]);
/// Calls with an effect.
const CALLS_THAT_WORK: &[Call] = &[
    (
        IOC_ALLOC_MEMORY_OF_GPU,
        &[(0, 8, Place), (8, 8, OneOf(SIZES)), (24, 8, Arena), (32, 4, Gpu), (36, 4, OneOf(KINDS))],
    ),
    (IOC_FREE_MEMORY_OF_GPU, &[(0, 8, Given)]),
    (IOC_MAP_MEMORY_TO_GPU, &[(0, 8, Given), (8, 8, Arena), (16, 4, Is(1))]),
    (IOC_UNMAP_MEMORY_FROM_GPU, &[(0, 8, Given), (8, 8, Arena), (16, 4, Is(1))]),
    (IOC_EXPORT_DMABUF, &[(0, 8, Given), (8, 4, OneOf(&[2, 0o2000002]))]),
    (IOC_IMPORT_DMABUF, &[(0, 8, Place), (16, 4, Gpu), (20, 4, Given)]),
    (
        IOC_CREATE_QUEUE,
        &[
            (0, 8, Ring),
            (8, 8, Pointers),
            (16, 8, Pointers),
            (32, 4, Is(1 << 16)),
            (36, 4, Gpu),
            (40, 4, OneOf(&[1, 2, 3, 4])),
            (44, 4, OneOf(&[0, 50, 100])),
            (48, 4, OneOf(&[0, 15])),
        ],
    ),
    (
        IOC_UPDATE_QUEUE,
        &[(0, 8, Ring), (8, 4, OneOf(SMALL)), (12, 4, Is(1 << 16)), (16, 4, OneOf(&[0, 100]))],
    ),
    (IOC_DESTROY_QUEUE, &[(0, 4, OneOf(SMALL))]),
    (IOC_CREATE_EVENT, &[(12, 4, OneOf(&[0, 3, 8])), (16, 4, OneOf(&[0, 1]))]),
    (IOC_SET_EVENT, &[(0, 4, OneOf(SMALL))]),
    (IOC_DESTROY_EVENT, &[(0, 4, OneOf(SMALL))]),
    (
        IOC_CRIU_OP,
        &[
            (48, 4, OneOf(SMALL)),
            (0, 8, Arena),
            (8, 8, Arena),
            (16, 8, Arena),
            (32, 4, OneOf(SMALL)),
            (24, 8, Is(4096)),
        ],
    ),
    (
        IOC_SVM + (16 << 16),
        &[
            (0, 8, Arena),
            (8, 8, OneOf(SIZES)),
            (16, 4, OneOf(&[0, 1])),
            (20, 4, Is(2)),
            (24, 4, Is(2)),
            (28, 4, Gpu),
            (32, 4, OneOf(&[5, 6, 7])),
            (36, 4, OneOf(&[1, 0x40, 9])),
        ],
    ),
    (DRM_AMD_GEM_CREATE, &[(0, 8, OneOf(SIZES)), (16, 8, OneOf(&[2, 4, 6])), (24, 8, OneOf(&[0, 1]))]),
    (DRM_AMD_GEM_USERPTR, &[(0, 8, Arena), (8, 8, OneOf(SIZES)), (16, 4, Is(14))]),
    (
        DRM_AMD_GEM_VA,
        &[
            (0, 4, Given),
            (8, 4, OneOf(&[1, 2, 3, 4])),
            (12, 4, OneOf(&[2, 6, 14, 16])),
            (16, 8, Place),
            (32, 8, OneOf(SIZES)),
        ],
    ),
    (DRM_AMD_CTX, &[(0, 4, OneOf(&[1, 2, 3, 4])), (8, 4, OneOf(SMALL))]),
    (DRM_AMD_CS, &[(0, 4, OneOf(SMALL)), (8, 4, Is(1)), (16, 8, Arena)]),
    (DRM_GEM_CLOSE, &[(0, 4, Given)]),
    (DRM_PRIME_HANDLE_TO_FD, &[(0, 4, Given), (4, 4, OneOf(&[0, 2]))]),
    (DRM_PRIME_FD_TO_HANDLE, &[(8, 4, Given)]),
];

/// A 64-bit word that a driver may accept: often a real handle, address, size or descriptor.
fn word(random: &mut Random, pool: &[u64]) -> u64 {
    match random.below(6) {
        0 => random.number(),
        1 => random.below(16) | random.below(16) << 32,
        2 => 1 << random.below(64),
        3 => (1 << random.below(64)) - 1,
        _ => random.of(pool),
    }
}

/// No call waits for long, and no list of syncobjs is long: the DRM core warns of them, and it is not under
/// test.
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

/// An argument of random bytes alone.
fn noise(random: &mut Random, pool: &[u64], number: u32) -> Vec<u8> {
    let mut argument = vec![0; usize::try_from(number >> 16 & 0x3fff).unwrap()];
    for chunk in argument.chunks_mut(8) {
        let bytes = word(random, pool).to_le_bytes();
        let length = chunk.len();
        chunk.copy_from_slice(&bytes[..length]);
        if random.below(4) == 0 {
            chunk[..length / 2].fill(0);
        }
    }
    argument
}

/// Addresses and names of which valid calls are made.
struct World {
    gpu: u64,
    ring: u64,
    pointers: u64,
    arena: u64,
}

/// A valid argument, or one that is wrong in one field.
fn nearly_right(
    random: &mut Random,
    pool: &[u64],
    world: &World,
    fields: &[(usize, usize, Field)],
    number: u32,
) -> Vec<u8> {
    let mut argument = vec![0; usize::try_from(number >> 16 & 0x3fff).unwrap()];
    let wrong = random.below(fields.len() * 3);
    for (index, (at, length, field)) in fields.iter().enumerate() {
        let value = match *field {
            _ if index == wrong => word(random, pool),
            Is(value) => value,
            OneOf(values) => random.of(values),
            Gpu => world.gpu,
            Given => random.of(pool),
            Place => 0x10_0000 + random.below(16) * 0x1_0000,
            Ring => world.ring,
            Pointers => world.pointers,
            Arena => world.arena + random.below(8) * 0x1_0000,
        };
        argument[*at..*at + *length].copy_from_slice(&value.to_le_bytes()[..*length]);
    }
    argument
}

fn one_call(
    random: &mut Random,
    pool: &mut [u64],
    fds: &[(BorrowedFd<'_>, bool)],
    (world, arena): (&World, &[&Mapping]),
) {
    let (mut fd, kfd) = random.of(fds);
    let (number, mut argument) = if random.below(3) == 0 {
        let number = if kfd { kfd_number(random) } else { render_number(random) };
        (number, noise(random, pool, number))
    } else {
        let (number, fields) = random.of(CALLS_THAT_WORK);
        if (number >> 8 & 0xff == 0x4b) != kfd {
            fd = fds[if kfd { 1 } else { 0 }].0;
        }
        (number, nearly_right(random, pool, world, fields, number))
    };
    shorten(number, &mut argument);
    if sys::misuse(fd, number, &mut argument, arena) == 0 {
        // Passes the driver's results to later calls.
        let given = match number & 0xffff {
            0x4b16 => &argument[16..24],
            0x4b1d => &argument[8..16],
            0x4b24 => &argument[12..16],
            0x6440 | 0x642e => &argument[0..4],
            0x642d => &argument[8..12],
            0x6451 => &argument[20..24],
            _ => &[],
        };
        if !given.is_empty() {
            let mut whole = [0; 8];
            whole[..given.len()].copy_from_slice(given);
            let place = random.below(pool.len());
            pool[place] = u64::from_le_bytes(whole);
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
    let mut random = Random::new(seed);
    let (host, pointers) = (gpus.host(1 << 16).unwrap(), gpus.host(4096).unwrap());
    let mut pool: Vec<u64> = vec![0; 64];
    for (index, slot) in pool.iter_mut().enumerate() {
        let gpu = u64::from(device.gpu_id());
        let address = arena.address() + (random.below(1 << 18) & !0xff);
        let known = [gpu, gpu << 32 | gpu, host.handle(), host.address(), address, 4096, 1 << 16];
        *slot = known[index % known.len()];
    }
    let world = World {
        gpu: u64::from(device.gpu_id()),
        ring: host.address(),
        pointers: pointers.address(),
        arena: arena.address(),
    };
    let fds = [(kfd.as_fd(), true), (device.render().as_fd(), false), (other.as_fd(), false)];
    for _ in 0..CALLS {
        for _ in 0..8 {
            let at = random.below((1 << 19) - 8) & !7;
            arena.store64(at, word(&mut random, &pool));
        }
        for list in 0..8 {
            arena.store64(list * 0x1_0000, world.gpu);
        }
        one_call(&mut random, &mut pool, &fds, (&world, &[&arena, host.cpu(), pointers.cpu()]));
    }
}

fn seed() -> u64 {
    count("SOFTGPU_FUZZ_SEED", SEED)
}

#[test]
fn nonsense_from_several_processes_does_no_harm() {
    isolated(1, |scene| {
        if let Some(role) = scene.role() {
            scene.say("begun");
            calls(seed().wrapping_add(role.parse().unwrap()));
            return;
        }
        let mut peers: Vec<_> = ["1", "2", "3"].map(|role| scene.peer(role)).into();
        for peer in &mut peers {
            assert_eq!(peer.hear(), "begun");
        }
        // One process ends in the middle, as in a crash.
        std::thread::sleep(std::time::Duration::from_millis(500));
        peers.remove(0).kill();
        for peer in peers {
            peer.finish();
        }
        // Random calls break rules, so violations are not failures. The test then checks what is still alive.
        if let Some(judge) = Judge::find() {
            judge.clear();
        }
    });
}
