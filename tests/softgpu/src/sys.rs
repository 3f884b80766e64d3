// SPDX-License-Identifier: MIT OR Apache-2.0
//! System calls that no dependency wraps.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use rewake_amdgpu_uapi::abi::call;
use rewake_amdgpu_uapi::abi::memory::Mapping;

/// A copy of descriptor `number` of process `pid`: the same open file.
///
/// # Errors
/// The kernel's errno.
pub fn descriptor_of(pid: u32, number: i32) -> io::Result<OwnedFd> {
    // SAFETY: integers only.
    let pidfd = check(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    // SAFETY: a fresh descriptor that nothing else owns.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    // SAFETY: integers only.
    let fd = check(unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), number, 0) })?;
    // SAFETY: a fresh descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Begins to trace a process, from this thread, without stopping it.
///
/// # Errors
/// The kernel's errno.
pub fn seize(pid: u32) -> io::Result<()> {
    trace(libc::PTRACE_SEIZE, pid)
}

/// Sets the access rights of a mapping; returns the kernel's errno, 0 for none. Access beyond the new rights
/// ends the process.
#[must_use]
pub fn protect(mapping: &Mapping, rights: i32) -> i32 {
    let start = std::ptr::with_exposed_provenance_mut(usize::try_from(mapping.address()).unwrap_or(0));
    let length = usize::try_from(mapping.len()).unwrap_or(0);
    // SAFETY: no byte changes.
    match unsafe { libc::mprotect(start, length, rights) } {
        0 => 0,
        _ => io::Error::last_os_error().raw_os_error().unwrap_or(0),
    }
}

/// Makes an ioctl with any number and argument; returns the kernel's errno, 0 for none. It zeroes 64-bit
/// words of the argument that are addresses of this process's memory, except in the first half of each
/// mapping of `arena`.
///
/// # Panics
/// This process's memory map cannot be read.
pub fn misuse(fd: BorrowedFd<'_>, number: u32, argument: &mut [u8], arena: &[&Mapping]) -> i32 {
    /// No struct of these drivers is longer than an ioctl's number can encode.
    const ROOM: usize = 1 << 14;
    let mut room = vec![0_u64; ROOM / 8];
    for (word, bytes) in room.iter_mut().zip(argument.chunks(8)) {
        let mut whole = [0; 8];
        whole[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_le_bytes(whole);
        let half = |own: &&Mapping| own.address()..own.address() + own.len() / 2;
        if !arena.iter().any(|own| half(own).contains(word)) && is_memory(*word) {
            *word = 0;
        }
    }
    // SAFETY: the argument has space for any size that the number encodes. Addresses in it are not this
    // process's, or lie in the first half of a mapping whose bytes nothing borrows.
    let result = unsafe { call::raw(fd, number, room.as_mut_ptr().cast()) };
    for (bytes, word) in argument.chunks_mut(8).zip(&room) {
        bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
    }
    result.err().and_then(|error| error.raw_os_error()).unwrap_or(0)
}

/// Whether this process has memory at an address, or within a gigabyte above it.
fn is_memory(address: u64) -> bool {
    /// Below, no memory is placed at random.
    const LOWEST: u64 = 2 << 32;
    if !(LOWEST..1 << 47).contains(&address) {
        return false;
    }
    let maps = std::fs::read_to_string("/proc/self/maps").expect("this process's memory map");
    maps.lines().any(|line| {
        let (start, end) =
            line.split(' ').next().and_then(|range| range.split_once('-')).unwrap_or(("0", "0"));
        let hex = |digits| u64::from_str_radix(digits, 16).unwrap_or(0);
        (hex(start).saturating_sub(1 << 30)..hex(end)).contains(&address)
    })
}

/// The same with an address instead of an argument, where no program has memory.
///
/// # Panics
/// A program may have memory there.
#[must_use]
pub fn misuse_at(fd: BorrowedFd<'_>, number: u32, address: u64) -> i32 {
    assert!(!(1 << 16..1 << 47).contains(&address), "{address:#x} may be memory");
    let pointer = std::ptr::without_provenance_mut(usize::try_from(address).unwrap_or(0));
    // SAFETY: no memory is mapped at that address, so the kernel writes to none.
    let result = unsafe { call::raw(fd, number, pointer) };
    result.err().and_then(|error| error.raw_os_error()).unwrap_or(0)
}

fn trace(request: libc::c_uint, pid: u32) -> io::Result<()> {
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: neither address nor data is used by this request.
    let result = unsafe { libc::ptrace(request, pid.cast_signed(), none, none) };
    check(result).map(drop)
}

fn check(result: i64) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(i32::try_from(result).unwrap_or(i32::MAX)) }
}
