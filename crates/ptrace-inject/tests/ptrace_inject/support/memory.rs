// SPDX-License-Identifier: MIT OR Apache-2.0
//! A placeholder in a target, and a file in the place of the device.

use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering};

use rewake_ptrace_inject::{Error, PlaceholderMapping, Stopped, Swap, with_stopped};
use rewake_uffd::{FillPort as _, Message, RawMessage, Uffd};

use super::{STOP_TIMEOUT, Shared, Target, sys, within};

pub const PAGE: usize = 4096;
/// The offset of the buffer in the device, which differs from that in the placeholder.
pub const DEVICE_OFFSET: u64 = 3 * 4096;
/// The words of the shared page that scenes use. Tests use those from [`FREE`].
const ADDRESS: usize = 0;
const UFFD: usize = 1;
pub const FREE: usize = 8;
/// `UFFD_FEATURE_EVENT_REMAP`
const EVENT_REMAP: u64 = 0x4;

/// A target with a placeholder, whose userfaultfd this process has.
#[derive(Debug)]
pub struct Scene {
    pub target: Target,
    pub placeholder: File,
    pub device: File,
    pub uffd: Uffd,
    pub address: usize,
    pub length: usize,
}

/// The memory that the target's body uses.
#[derive(Debug, Clone, Copy)]
pub struct Hand {
    pub shared: Shared,
    pub address: usize,
}

impl Hand {
    /// Returns the word at `offset` bytes.
    pub fn word(&self, offset: usize) -> &'static AtomicU64 {
        word_at(self.address + offset)
    }
}

/// Returns a word of memory that is mapped or missing.
pub fn word_at(address: usize) -> &'static AtomicU64 {
    let word: *const AtomicU64 = std::ptr::with_exposed_provenance(address);
    // SAFETY: aligned, inside a mapping that outlives the target's use of it, and only used as an atomic.
    unsafe { &*word }
}

/// Returns the word of the device's buffer at `offset`.
pub fn content(offset: usize) -> u64 {
    (offset as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl Scene {
    /// Starts a target with a placeholder of `pages` pages, which runs `body`.
    ///
    /// Its userfaultfd reports mremap, as it must: see `placeholder.rs`.
    pub fn start(pages: usize, body: impl FnOnce(Hand) -> i32) -> Self {
        Self::start_with(EVENT_REMAP, pages, body)
    }

    /// As [`Scene::start`], with these userfaultfd features.
    pub fn start_with(features: u64, pages: usize, body: impl FnOnce(Hand) -> i32) -> Self {
        let length = pages * PAGE;
        let placeholder = sys::memory_file(length as u64);
        let device = sys::memory_file(DEVICE_OFFSET + length as u64);
        let bytes: Vec<u8> = (0..length).step_by(8).flat_map(|at| content(at).to_ne_bytes()).collect();
        device.write_all_at(&bytes, DEVICE_OFFSET).unwrap();
        let file = placeholder.as_raw_fd();
        let target = Target::start(|shared| {
            let uffd = Uffd::open(features).unwrap();
            let address = sys::map(0, length, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, file, 0);
            uffd.register_missing(address as u64, length as u64).unwrap();
            shared.set(ADDRESS, address as u64);
            shared.set(UFFD, u64::try_from(uffd.as_raw_fd()).unwrap());
            // Only the test process keeps the userfaultfd.
            std::mem::forget(uffd);
            body(Hand { shared, address })
        });
        let number = i32::try_from(target.shared.wait(UFFD, |number| number != 0)).unwrap();
        let uffd = Uffd::adopt(sys::take_descriptor(target.pid, number)).unwrap();
        let address = usize::try_from(target.shared.get(ADDRESS)).unwrap();
        Self { target, placeholder, device, uffd, address, length }
    }

    pub fn shared(&self) -> Shared {
        self.target.shared
    }

    /// Waits for a page fault. Returns its page, as an offset in the original placeholder.
    #[track_caller]
    pub fn fault(&self) -> usize {
        within(
            || {
                let mut slot = [RawMessage::default()];
                (self.uffd.read(&mut slot).unwrap() == 1).then_some(())?;
                let Some(Message::Fault { address }) = slot[0].decode() else { return None };
                Some(usize::try_from(address).unwrap() - self.address)
            },
            || format!("no page fault in process {}", self.target.pid),
        )
    }

    /// Reads pending events, which lets the program's mremap return.
    pub fn read_events(&self) {
        self.uffd.read(&mut [RawMessage::default(); 16]).unwrap();
    }

    /// Reads events until `end`.
    pub fn read_until(&self, end: &std::sync::atomic::AtomicBool) {
        while !end.load(Ordering::SeqCst) {
            self.read_events();
            std::thread::sleep(std::time::Duration::from_micros(100));
        }
    }

    /// Returns the swap of `length` bytes at `offset`.
    pub fn request(&self, offset: usize, length: usize) -> Swap<'_> {
        Swap {
            offset: offset as u64,
            length: length as u64,
            device: self.device.as_fd(),
            device_offset: DEVICE_OFFSET + offset as u64,
        }
    }

    /// Swaps the whole placeholder, and wakes its threads.
    #[track_caller]
    pub fn swap(&self) -> Vec<PlaceholderMapping> {
        self.swap_part(0, self.length).unwrap()
    }

    /// Swaps a part, and wakes its threads.
    pub fn swap_part(&self, offset: usize, length: usize) -> Result<Vec<PlaceholderMapping>, Error> {
        let swapped = self.stopped(|stopped| self.swap_in(stopped, &[self.request(offset, length)]))??;
        for piece in &swapped {
            self.uffd.wake(piece.address, piece.length).unwrap();
        }
        Ok(swapped)
    }

    /// Makes swaps in an existing stop.
    pub fn swap_in(
        &self,
        stopped: &mut Stopped<'_>,
        swaps: &[Swap<'_>],
    ) -> Result<Vec<PlaceholderMapping>, Error> {
        let mut swapping = stopped.prepare_swaps(self.placeholder.as_fd(), swaps)?;
        let swapped: Result<Vec<_>, _> = (0..swaps.len()).map(|place| swapping.swap(place)).collect();
        Ok(swapped?.concat())
    }

    pub fn stopped<T: Send>(&self, act: impl FnOnce(&mut Stopped<'_>) -> T + Send) -> Result<T, Error> {
        with_stopped(self.target.pid, STOP_TIMEOUT, act)
    }

    /// Returns the word of the device's buffer at `offset`.
    pub fn device_word(&self, offset: usize) -> u64 {
        let mut bytes = [0; 8];
        self.device.read_exact_at(&mut bytes, DEVICE_OFFSET + offset as u64).unwrap();
        u64::from_ne_bytes(bytes)
    }
}

/// Adds one to each word of a range, again and again, until END is set. A lost or torn word would show.
pub fn count_in(hand: Hand, words: std::ops::Range<usize>, stride: usize, end: usize) -> u64 {
    let mut rounds = 0;
    while hand.shared.get(end) == 0 {
        for word in words.clone().step_by(stride) {
            hand.word(word * 8).fetch_add(1, Ordering::SeqCst);
        }
        rounds += 1;
    }
    rounds
}
