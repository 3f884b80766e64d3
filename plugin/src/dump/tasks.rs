// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which tasks of the tree have which files of GPUs open: CRIU tells of a file when it dumps it, and not whose it is.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use crate::device::{Devices, Gpu};
use crate::kcmp;

/// The tasks of the tree, stopped.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    pids: Vec<i32>,
}

impl Tasks {
    pub(super) fn add(&mut self, pid: i32) {
        self.pids.push(pid);
    }

    /// Whether some task has `file` and one of `others` besides.
    pub(super) fn one_has_both(&self, devices: &Devices, file: BorrowedFd<'_>, others: &[OwnedFd]) -> bool {
        self.pids.iter().any(|pid| {
            let numbers = kfd_numbers(*pid, devices);
            let has = |file: BorrowedFd<'_>| numbers.iter().any(|number| is(file, *pid, *number));
            numbers.len() > 1 && has(file) && others.iter().any(|other| has(other.as_fd()))
        })
    }

    /// Whether some task has both files, of whichever kind.
    pub(super) fn one_has(&self, devices: &Devices, one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> bool {
        self.pids.iter().any(|pid| {
            let numbers = numbers(*pid, devices, |_| true);
            let has = |file: BorrowedFd<'_>| numbers.iter().any(|number| is(file, *pid, *number));
            has(one) && has(other)
        })
    }

    /// Whether every file of a GPU that the tree has is one of `files`; yes if that cannot be told: none is waited for.
    pub(super) fn all_are(&self, devices: &Devices, files: &[BorrowedFd<'_>]) -> bool {
        let known = |pid, number| files.iter().any(|file| is(*file, pid, number));
        self.pids
            .iter()
            .all(|pid| numbers(*pid, devices, |_| true).into_iter().all(|number| known(*pid, number)))
    }

    /// The tasks that have `file`: whoever opened it, and its children that did not close it.
    pub(super) fn with(&self, file: BorrowedFd<'_>, devices: &Devices) -> Vec<i32> {
        let has = |pid: &&i32| kfd_numbers(**pid, devices).iter().any(|number| is(file, **pid, *number));
        self.pids.iter().filter(has).copied().collect()
    }

    /// Whether every `/dev/kfd` of the tree is one of `files`; no if that cannot be told.
    pub(super) fn have_only(&self, devices: &Devices, files: &[OwnedFd]) -> bool {
        let known = |pid, number| files.iter().any(|file| is(file.as_fd(), pid, number));
        let all = |pid: &i32| kfd_numbers(*pid, devices).into_iter().all(|number| known(*pid, number));
        !self.pids.is_empty() && self.pids.iter().all(all)
    }
}

fn is(file: BorrowedFd<'_>, pid: i32, number: i32) -> bool {
    kcmp::same_file(file, pid, number).unwrap_or(false)
}

/// A task's descriptors of `/dev/kfd`.
fn kfd_numbers(pid: i32, devices: &Devices) -> Vec<i32> {
    numbers(pid, devices, |gpu| gpu == Gpu::Kfd)
}

/// A task's descriptors of GPUs; none of a task that cannot be looked at, or has ended.
fn numbers(pid: i32, devices: &Devices, wanted: impl Fn(Gpu) -> bool) -> Vec<i32> {
    let open = devices.open_in(pid).unwrap_or_default();
    open.into_iter().filter(|(_, gpu)| wanted(*gpu)).map(|(number, _)| number).collect()
}
