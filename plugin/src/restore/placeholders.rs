// SPDX-License-Identifier: MIT OR Apache-2.0
//! In a task: memory that stands for a device's until that is there. The page server watches it by the task's own userfaultfd, and puts the
//! device in its place.

use std::os::fd::AsFd as _;

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::ftruncate;
use rewake_criu_plugin::{Answer, Host, Mapping};

use super::Restore;
use super::lazy_plan::Placeholder;

impl Restore {
    /// What the task maps in the place of a mapping of a buffer of its own process.
    pub(super) fn placeholder(
        &mut self,
        host: &Host,
        process: usize,
        buffer: usize,
        placeholder: Placeholder,
    ) -> Answer<Mapping> {
        let stored = match self.board.placeholders(process) {
            Some((stored, _)) => stored,
            None => self.make_placeholders(host, process)?,
        };
        self.board.put_placeholder(process, placeholder.number, buffer, placeholder.offset);
        Ok(Mapping { offset: placeholder.offset, file: Some(host.stored_fd(stored)?) })
    }

    /// The file, by its id in CRIU's store: a number kept open could be one that the task needs.
    fn make_placeholders(&self, host: &Host, process: usize) -> Answer<i32> {
        let file = memfd_create(c"rewake-placeholders", MFdFlags::MFD_CLOEXEC)?;
        ftruncate(&file, i64::try_from(self.later.length(process))?)?;
        let stored = host.store_fd(file.as_fd())?;
        let uffd = host.store_fd(rewake_uffd::open_unnegotiated()?.as_fd())?;
        self.board.put_placeholders(process, stored, uffd);
        Ok(stored)
    }
}
