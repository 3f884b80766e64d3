// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares open files of two processes with `kcmp(2)`, which CRIU needs, too.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

/// `KCMP_FILE` of `linux/kcmp.h`.
const FILE: libc::c_int = 0;

/// Returns whether `own` is the same open file as descriptor `number` of process `pid`.
pub(crate) fn same_file(own: BorrowedFd<'_>, pid: i32, number: i32) -> io::Result<bool> {
    let caller = libc::c_long::from(nix::unistd::getpid().as_raw());
    let (pid, number) = (libc::c_long::from(pid), libc::c_long::from(number));
    let own = libc::c_long::from(own.as_raw_fd());
    // SAFETY: the call takes numbers only.
    match unsafe { libc::syscall(libc::SYS_kcmp, caller, pid, FILE, own, number) } {
        0 => Ok(true),
        order if order > 0 => Ok(false),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn copies_of_a_descriptor_are_one_file_and_two_opens_are_not() {
        let first = File::open("/dev/null").unwrap();
        let (copy, second) = (first.try_clone().unwrap(), File::open("/dev/null").unwrap());
        let own = std::process::id().cast_signed();
        let same = |file: &File| same_file(first.as_fd(), own, file.as_raw_fd()).unwrap();
        assert!(same(&copy));
        assert!(!same(&second));
        assert!(same_file(first.as_fd(), own, -1).is_err());
    }
}
