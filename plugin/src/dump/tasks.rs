// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds which tasks of the tree have which GPU files open. CRIU passes each file to the plugin, but not its
//! task.

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};

use rewake_process::kcmp::same_file;

use crate::device::{DeviceFile, Devices};

/// The tasks of the tree, stopped.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    pids: Vec<i32>,
}

impl Tasks {
    pub(super) fn add(&mut self, pid: i32) {
        self.pids.push(pid);
    }

    /// Returns whether a task has both `file` and one of `others` open.
    pub(super) fn any_has_kfd_and_other(
        &self,
        devices: &Devices,
        file: BorrowedFd<'_>,
        others: &[OwnedFd],
    ) -> bool {
        self.pids.iter().any(|pid| {
            let numbers = kfd_numbers(*pid, devices);
            let has = |file: BorrowedFd<'_>| numbers.iter().any(|number| is_same(file, *pid, *number));
            numbers.len() > 1 && has(file) && others.iter().any(|other| has(other.as_fd()))
        })
    }

    /// Returns whether a task has both files open. They may be of any kind.
    pub(super) fn any_has(&self, devices: &Devices, one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> bool {
        self.pids.iter().any(|pid| {
            let numbers = numbers(*pid, devices, |_| true);
            let has = |file: BorrowedFd<'_>| numbers.iter().any(|number| is_same(file, *pid, *number));
            has(one) && has(other)
        })
    }

    /// Returns whether `files` has every GPU file of the tree. A task that cannot be read counts as one
    /// without GPU files.
    pub(super) fn have_only_files(&self, devices: &Devices, files: &[BorrowedFd<'_>]) -> bool {
        let known = |pid, number| files.iter().any(|file| is_same(*file, pid, number));
        self.pids
            .iter()
            .all(|pid| numbers(*pid, devices, |_| true).into_iter().all(|number| known(*pid, number)))
    }

    /// Returns the tasks that have `file` open: the one that opened it, and children that did not close it.
    pub(super) fn with(&self, file: BorrowedFd<'_>, devices: &Devices) -> Vec<i32> {
        let has = |pid: &&i32| kfd_numbers(**pid, devices).iter().any(|number| is_same(file, **pid, *number));
        self.pids.iter().filter(has).copied().collect()
    }

    /// Returns whether `files` has every `/dev/kfd` of the tree; false while no task is known.
    pub(super) fn have_only_kfds(&self, devices: &Devices, files: &[OwnedFd]) -> bool {
        let known = |pid, number| files.iter().any(|file| is_same(file.as_fd(), pid, number));
        let all = |pid: &i32| kfd_numbers(*pid, devices).into_iter().all(|number| known(*pid, number));
        !self.pids.is_empty() && self.pids.iter().all(all)
    }
}

fn is_same(file: BorrowedFd<'_>, pid: i32, number: i32) -> bool {
    same_file(file.as_raw_fd(), pid, number).unwrap_or(false)
}

/// Returns a task's descriptors of `/dev/kfd`.
fn kfd_numbers(pid: i32, devices: &Devices) -> Vec<i32> {
    numbers(pid, devices, |gpu| gpu == DeviceFile::Kfd)
}

/// Returns a task's descriptors of GPU files. The list is empty if the task has ended or cannot be read.
fn numbers(pid: i32, devices: &Devices, wanted: impl Fn(DeviceFile) -> bool) -> Vec<i32> {
    let open = devices.open_in(pid).unwrap_or_default();
    open.into_iter().filter(|(_, gpu)| wanted(*gpu)).map(|(number, _)| number).collect()
}
