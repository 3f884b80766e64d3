// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares what threads have with kcmp(2), which CRIU needs too.

use std::io;
use std::os::fd::RawFd;

use crate::check;

/// `enum kcmp_type` (`include/uapi/linux/kcmp.h`).
const KCMP_FILE: libc::c_int = 0;
const KCMP_VM: libc::c_int = 1;

/// Returns whether descriptor `ours` of this process and descriptor `number` of thread `tid` are one open
/// file.
///
/// # Errors
/// EBADF: one of them is not open. EPERM: this process may not trace the other. ESRCH.
pub fn same_file(ours: RawFd, tid: i32, number: RawFd) -> io::Result<bool> {
    // SAFETY: nothing in, an integer out; always succeeds.
    let this_thread = unsafe { libc::gettid() };
    kcmp(this_thread, tid, KCMP_FILE, ours, number)
}

/// Returns whether two threads share an address space.
///
/// # Errors
/// EPERM: this process may not trace them. ESRCH.
pub fn same_memory(a: i32, b: i32) -> io::Result<bool> {
    kcmp(a, b, KCMP_VM, 0, 0)
}

fn kcmp(a: i32, b: i32, what: libc::c_int, first: RawFd, second: RawFd) -> io::Result<bool> {
    // SAFETY: integers only.
    check(unsafe { libc::syscall(libc::SYS_kcmp, a, b, what, first, second) }).map(|order| order == 0)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd as _;

    use super::*;

    #[test]
    fn copies_of_a_descriptor_are_one_file_and_two_opens_are_not() {
        let first = File::open("/dev/null").unwrap();
        let (copy, second) = (first.try_clone().unwrap(), File::open("/dev/null").unwrap());
        let own = std::process::id().cast_signed();
        let same = |file: &File| same_file(first.as_raw_fd(), own, file.as_raw_fd()).unwrap();
        assert!(same(&copy));
        assert!(!same(&second));
        assert_eq!(same_file(first.as_raw_fd(), own, -1).unwrap_err().raw_os_error(), Some(libc::EBADF));
    }

    #[test]
    fn a_child_has_an_address_space_of_its_own() {
        let own = std::process::id().cast_signed();
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        assert!(same_memory(own, own).unwrap());
        assert!(!same_memory(own, child.id().cast_signed()).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
