// SPDX-License-Identifier: MIT OR Apache-2.0
//! A placeholder in a target, and the file that plays the device.

use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering};

use rewake_ptrace_inject::{Error, Shown, Stopped, Swap, with_stopped};
use rewake_uffd::{FillPort as _, Message, RawMessage, Uffd};

use super::{PATIENCE, Shared, Target, sys, within};

pub const PAGE: usize = 4096;
/// Where in the device the buffer begins: not where it does in the placeholder.
pub const DEVICE_OFFSET: u64 = 3 * 4096;
/// Words of the shared page that scenes use; tests begin at [`FREE`].
const ADDRESS: usize = 0;
const UFFD: usize = 1;
pub const FREE: usize = 8;
/// `UFFD_FEATURE_EVENT_REMAP`
const EVENT_REMAP: u64 = 0x4;

/// A target whose placeholder is watched by this process.
#[derive(Debug)]
pub struct Scene {
    pub target: Target,
    pub placeholder: File,
    pub device: File,
    pub uffd: Uffd,
    pub address: usize,
    pub length: usize,
}

/// What the target has in hand.
#[derive(Debug, Clone, Copy)]
pub struct Hand {
    pub shared: Shared,
    pub address: usize,
}

impl Hand {
    /// The word at `offset` bytes.
    pub fn word(&self, offset: usize) -> &'static AtomicU64 {
        word_at(self.address + offset)
    }
}

/// A word of memory that is mapped, or is to fault.
pub fn word_at(address: usize) -> &'static AtomicU64 {
    let word: *const AtomicU64 = std::ptr::with_exposed_provenance(address);
    // SAFETY: aligned, inside a mapping that outlives the target's use of it, and only used as an atomic.
    unsafe { &*word }
}

/// What the device's buffer has at `offset`.
pub fn content(offset: usize) -> u64 {
    (offset as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl Scene {
    /// A target with `pages` pages of placeholder that runs `body`.
    ///
    /// Its userfaultfd tells of mremap, as it must: see `placeholder.rs`.
    pub fn start(pages: usize, body: impl FnOnce(Hand) -> i32) -> Self {
        Self::start_with(EVENT_REMAP, pages, body)
    }

    /// The same, with these features of userfaultfd.
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
            // Only this process is to hold it.
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

    /// Waits for a fault; its page, as an offset of the placeholder as it was first.
    #[track_caller]
    pub fn fault(&self) -> usize {
        within(
            || {
                let mut slot = [RawMessage::default()];
                (self.uffd.read(&mut slot).unwrap() == 1).then_some(())?;
                let Some(Message::Fault { address }) = slot[0].decode() else { return None };
                Some(usize::try_from(address).unwrap() - self.address)
            },
            || format!("no fault in process {}", self.target.pid),
        )
    }

    /// Reads what events there are: a program's mremap goes on then.
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

    /// What a swap of `length` bytes at `offset` is.
    pub fn request(&self, offset: usize, length: usize) -> Swap<'_> {
        Swap {
            offset: offset as u64,
            length: length as u64,
            device: self.device.as_fd(),
            device_offset: DEVICE_OFFSET + offset as u64,
        }
    }

    /// Swaps all, and wakes.
    #[track_caller]
    pub fn swap(&self) -> Vec<Shown> {
        self.swap_part(0, self.length).unwrap()
    }

    /// Swaps a part, and wakes.
    pub fn swap_part(&self, offset: usize, length: usize) -> Result<Vec<Shown>, Error> {
        let swapped = self.stopped(|stopped| self.swap_in(stopped, &[self.request(offset, length)]))??;
        for piece in &swapped {
            self.uffd.wake(piece.address, piece.length).unwrap();
        }
        Ok(swapped)
    }

    /// Swaps in a stop that is under way.
    pub fn swap_in(&self, stopped: &mut Stopped<'_>, swaps: &[Swap<'_>]) -> Result<Vec<Shown>, Error> {
        let mut swapping = stopped.swapping(self.placeholder.as_fd(), swaps)?;
        let swapped: Result<Vec<_>, _> = (0..swaps.len()).map(|place| swapping.swap(place)).collect();
        Ok(swapped?.concat())
    }

    pub fn stopped<T: Send>(&self, act: impl FnOnce(&mut Stopped<'_>) -> T + Send) -> Result<T, Error> {
        with_stopped(self.target.pid, PATIENCE, act)
    }

    /// The word of the device's buffer at `offset`.
    pub fn device_word(&self, offset: usize) -> u64 {
        let mut bytes = [0; 8];
        self.device.read_exact_at(&mut bytes, DEVICE_OFFSET + offset as u64).unwrap();
        u64::from_ne_bytes(bytes)
    }
}

/// Adds one to each word of a range, round and round, until told to end: any lost or torn word shows.
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
