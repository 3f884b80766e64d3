// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs a program with placeholders, for tests of the fault server.

use std::io::Read as _;
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};

use rewake_plugin_protocol::proto;
use rewake_process::descriptors::memory_file;
use rewake_process::maps::Mapping;
use rewake_process::names::lines;
use rewake_uffd::PAGE_SIZE as PAGE;

use super::placeholder_range::PlaceholderBuffer;
use super::placeholders::ReceivedPlaceholders;
use crate::sys;

/// The name of its GPU.
const GPU: u32 = 4711;
const NOT_READ: u8 = 0xff;
/// Held while a program starts: another child would inherit its placeholders.
static STARTING: Mutex<()> = Mutex::new(());
/// The first byte of the last buffer.
pub(super) const LAST: u8 = 7;

/// A child of this process. Dropping it kills and collects it.
pub(super) struct Program {
    pid: i32,
    buffers: usize,
    /// The placeholders' file, their userfaultfd, and the file that plays the device.
    files: [OwnedFd; 3],
    /// The first placeholder.
    address: u64,
    /// Zero makes the child read the last placeholder; then it holds the byte read.
    shared: &'static AtomicU8,
}

/// A new mapping, never unmapped.
fn map(address: u64, length: u64, flags: i32, file: RawFd, offset: u64) -> u64 {
    let (length, offset) = (usize::try_from(length).unwrap(), i64::try_from(offset).unwrap());
    let address = std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap());
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, or in the place of one that this test has made and does not use.
    let mapped = unsafe { libc::mmap(address, length, protection, flags, file, offset) };
    assert_ne!(mapped, libc::MAP_FAILED);
    mapped.expose_provenance() as u64
}

fn byte(address: u64) -> *const AtomicU8 {
    std::ptr::with_exposed_provenance(usize::try_from(address).unwrap())
}

/// Returns a buffer's offset in the file and on the device: gaps keep mappings apart.
fn offset(buffer: usize) -> u64 {
    2 * buffer as u64 * PAGE
}

impl Program {
    /// Starts the child with a placeholder of one page for each buffer.
    pub(super) fn start(buffers: usize) -> Self {
        let _alone = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        let file = memory_file(c"placeholders", offset(buffers)).unwrap();
        let render = memory_file(c"device", offset(buffers)).unwrap();
        render.write_all_at(&[LAST], offset(buffers - 1)).unwrap();
        let anonymous = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        let address = map(0, buffers as u64 * PAGE, anonymous, -1, 0);
        for buffer in 0..buffers {
            let at = address + buffer as u64 * PAGE;
            map(at, PAGE, libc::MAP_SHARED | libc::MAP_FIXED, file.as_raw_fd(), offset(buffer));
        }
        // SAFETY: a mapping that is never unmapped, used as an atomic by both processes.
        let shared = unsafe { &*byte(map(0, PAGE, anonymous, -1, 0)) };
        shared.store(NOT_READ, Ordering::SeqCst);
        let (input, output) = nix::unistd::pipe().unwrap();
        // SAFETY: the child makes system calls and reads memory only.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0);
        if pid == 0 {
            run(output.as_raw_fd(), address + (buffers as u64 - 1) * PAGE, shared);
        }
        drop(output);
        let start = std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap());
        // SAFETY: only the child uses these mappings.
        assert_eq!(unsafe { libc::munmap(start, buffers * usize::try_from(PAGE).unwrap()) }, 0);
        let mut number = [0; 4];
        std::fs::File::from(input)
            .read_exact(&mut number)
            .expect("the child opens a userfaultfd: needs root");
        let pidfd = sys::pidfd_open(pid).unwrap();
        let number = i32::from_ne_bytes(number);
        // SAFETY: integers in, a descriptor out.
        let uffd = unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), number, 0) };
        // SAFETY: just opened, and nothing else owns it.
        let uffd = unsafe { OwnedFd::from_raw_fd(RawFd::try_from(uffd).unwrap()) };
        Self { pid, buffers, files: [file.into(), uffd, render.into()], address, shared }
    }

    /// Returns what the plugin would hand over for the program.
    pub(super) fn handed(&self) -> ReceivedPlaceholders {
        let files = self.files[..2].iter().map(|file| file.try_clone().unwrap());
        let mut handed = ReceivedPlaceholders::new(files.collect()).unwrap();
        let mapping = |buffer: usize| proto::Mapping {
            address: self.address + buffer as u64 * PAGE,
            length: PAGE,
            offset: offset(buffer),
            buffer: u32::try_from(buffer).unwrap(),
            device_offset: offset(buffer),
            within: 0,
        };
        handed.add(proto::Mappings { mappings: (0..self.buffers).map(mapping).collect() }).unwrap();
        handed
    }

    /// Returns its render node files.
    pub(super) fn renders(&self) -> Vec<(u32, OwnedFd)> {
        vec![(GPU, self.files[2].try_clone().unwrap())]
    }

    /// Returns its buffers. No test reads the dmabufs, so any file will do.
    pub(super) fn buffers(&self) -> Vec<PlaceholderBuffer<'_>> {
        let dmabuf = self.files[2].as_fd();
        let buffer = |number| PlaceholderBuffer { number, gpu: (GPU, 128), dmabuf, bytes: PAGE };
        (0..self.buffers).map(buffer).collect()
    }

    /// Makes the child read the last placeholder.
    pub(super) fn access(&self) {
        self.shared.store(0, Ordering::SeqCst);
    }

    /// Returns the byte that the child has read there.
    pub(super) fn read(&self) -> u8 {
        self.shared.load(Ordering::SeqCst)
    }

    pub(super) fn pidfd(&self) -> OwnedFd {
        sys::pidfd_open(self.pid).unwrap()
    }

    /// Returns the number of its mappings of placeholders, and of the device.
    pub(super) fn mappings(&self) -> (usize, usize) {
        (self.mappings_of(b"/memfd:placeholders"), self.mappings_of(b"/memfd:device"))
    }

    fn mappings_of(&self, name: &[u8]) -> usize {
        let maps = std::fs::read(format!("/proc/{}/maps", self.pid)).unwrap();
        lines(&maps).filter_map(Mapping::parse).filter(|mapping| mapping.name.starts_with(name)).count()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        crate::uffd_child::kill(self.pid);
        // SAFETY: waits for a child of this process; no status is asked for.
        unsafe { libc::waitpid(self.pid, std::ptr::null_mut(), 0) };
    }
}

/// Runs in the forked child: only system calls and resident memory.
fn run(tell: RawFd, last: u64, shared: &AtomicU8) -> ! {
    if let Ok(uffd) = rewake_uffd::open_unnegotiated() {
        let number = uffd.as_raw_fd().to_ne_bytes();
        // SAFETY: writes from a live buffer of that length, and closes what is not used again.
        unsafe {
            libc::write(tell, number.as_ptr().cast(), number.len());
            libc::close(tell);
        }
        while shared.load(Ordering::SeqCst) != 0 {
            std::thread::yield_now();
        }
        // SAFETY: a mapping that is never unmapped; it waits for the page.
        shared.store(unsafe { &*byte(last) }.load(Ordering::SeqCst), Ordering::SeqCst);
        loop {
            // SAFETY: no pointers.
            unsafe { libc::pause() };
        }
    }
    // SAFETY: ends the child without running the test process's destructors.
    unsafe { libc::_exit(1) }
}
