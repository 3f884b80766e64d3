// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests an engine for memory in the place of a GPU, which copies by the CPU.

use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use nix::sys::memfd::{MFdFlags, memfd_create};
use rewake_sdma_copy::{
    Bo, CopyEngine, Error, IN_FLIGHT, MemoryDevice, Shape, Slot, Staging, StagingOffset, Transfer,
};

const SLOT: u64 = 1 << 20;

fn memfd(bytes: u64) -> OwnedFd {
    let memfd = memfd_create(c"bo", MFdFlags::MFD_CLOEXEC).unwrap();
    File::from(memfd.try_clone().unwrap()).set_len(bytes).unwrap();
    memfd
}

fn byte(index: u64) -> u8 {
    u8::try_from(index * 31 % 251).unwrap() + 1
}

/// Two slots, and an engine with a BO of a slot's size.
struct Scene {
    buffer: File,
    staging: Staging,
    engine: CopyEngine,
    bo: Bo,
}

impl Scene {
    fn new() -> Self {
        let buffer = memfd(SLOT);
        let memory = MemoryDevice::new([buffer.as_fd()]).unwrap();
        let staging = Staging::pages(Shape { slots: 2, slot_bytes: SLOT }).unwrap();
        let mut engine = CopyEngine::in_memory(128, &memory, &staging).unwrap();
        let bo = engine.import(buffer.as_fd(), SLOT).unwrap();
        Self { buffer: buffer.into(), staging, engine, bo }
    }

    fn slot(&self, index: usize) -> Slot {
        self.staging.slots().nth(index).unwrap()
    }

    fn load(&self, at: u64, bytes: u64) -> Transfer {
        Transfer::Load { bo: self.bo, at, from: StagingOffset { slot: self.slot(0), at: 0 }, bytes }
    }

    fn read(&self, at: u64, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        self.buffer.read_exact_at(&mut read, at).unwrap();
        read
    }

    fn wait(&mut self, ticket: rewake_sdma_copy::Ticket) {
        self.engine.wait(ticket, Instant::now() + Duration::from_secs(60)).unwrap();
    }
}

#[test]
fn bytes_are_loaded_filled_and_saved() {
    let mut scene = Scene::new();
    let bytes: Vec<u8> = (0..9000).map(byte).collect();
    scene.staging.write(StagingOffset { slot: scene.slot(0), at: 0 }, &bytes);
    let loads =
        [scene.load(5, 9000), Transfer::Fill { bo: scene.bo, at: 20000, bytes: 8, word: 0x0403_0201 }];
    let ticket = scene.engine.submit(&loads).unwrap();
    scene.wait(ticket);
    assert_eq!(scene.read(5, 9000), bytes);
    assert_eq!(scene.read(20000, 9), [1, 2, 3, 4, 1, 2, 3, 4, 0]);
    let to = StagingOffset { slot: scene.slot(1), at: 100 };
    let ticket = scene.engine.submit(&[Transfer::Save { bo: scene.bo, at: 6, to, bytes: 50 }]).unwrap();
    scene.wait(ticket);
    let mut saved = [0; 50];
    scene.staging.read(to, &mut saved);
    assert_eq!(saved, bytes[1..51]);
}

#[test]
fn submissions_end_in_order_and_are_reported_once() {
    let mut scene = Scene::new();
    let tickets: Vec<_> = (0..IN_FLIGHT as u64)
        .map(|number| scene.engine.submit(&[scene.load(number * 4096, 4096)]).unwrap())
        .collect();
    assert_eq!((scene.engine.in_flight(), scene.engine.room()), (IN_FLIGHT, 0));
    assert!(matches!(scene.engine.submit(&[scene.load(0, 1)]), Err(Error::Full { minor: 128 })));
    let last = tickets[IN_FLIGHT - 1];
    scene.wait(last);
    let on_end: Vec<_> = scene.engine.finished().unwrap().map(|done| done.ticket).collect();
    assert_eq!(on_end, tickets[..IN_FLIGHT - 1], "all except the one that was waited for");
    assert_eq!((scene.engine.in_flight(), scene.engine.room()), (0, IN_FLIGHT));
    assert!(matches!(scene.engine.wait(last, Instant::now()), Err(Error::Ticket { .. })));
}

#[test]
fn the_descriptor_is_readable_after_a_submission_ended() {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    let mut scene = Scene::new();
    let ends = |scene: &Scene, wait: u16| {
        let event = scene.engine.event_fd().expect("the CPU path has a descriptor");
        poll(&mut [PollFd::new(event, PollFlags::POLLIN)], PollTimeout::from(wait)).unwrap() == 1
    };
    assert!(!ends(&scene, 0));
    scene.engine.submit(&[scene.load(0, SLOT)]).unwrap();
    assert!(ends(&scene, 10_000));
    assert_eq!(scene.engine.finished().unwrap().count(), 1);
    assert!(!ends(&scene, 0));
}

#[test]
fn released_and_unknown_bos_are_refused() {
    let mut scene = Scene::new();
    let error = scene.engine.import(memfd(SLOT).as_fd(), SLOT).unwrap_err().to_string();
    assert!(error.contains("not one of the device's memfds"), "{error}");
    let error = scene.engine.import(scene.buffer.as_fd(), SLOT + 1).unwrap_err();
    assert!(matches!(error, Error::Size { size: SLOT, .. }), "{error}");
    scene.engine.release(scene.bo).unwrap();
    assert!(matches!(scene.engine.submit(&[scene.load(0, 1)]), Err(Error::Bo { .. })));
}

#[test]
fn a_drop_waits_for_submissions() {
    let mut scene = Scene::new();
    scene.staging.write(StagingOffset { slot: scene.slot(0), at: 0 }, &[7]);
    for _ in 0..IN_FLIGHT - 1 {
        scene.engine.submit(&[scene.load(0, SLOT)]).unwrap();
    }
    scene.engine.submit(&[scene.load(SLOT - 1, 1)]).unwrap();
    let Scene { buffer, engine, .. } = scene;
    drop(engine);
    let mut last = [0];
    buffer.read_exact_at(&mut last, SLOT - 1).unwrap();
    assert_eq!(last, [7]);
}
