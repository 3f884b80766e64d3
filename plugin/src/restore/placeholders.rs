// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes placeholders in a task: anonymous memory in the place of CPU mappings of a buffer, until the buffer
//! is resident. The streamer serves their page faults with the task's own userfaultfd, and swaps them.

use std::os::fd::AsFd as _;

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::ftruncate;
use rewake_criu_plugin::{Answer, Host, MapSource};

use super::Restore;
use super::lazy_plan::Placeholder;

impl Restore {
    /// Returns the placeholder that the task maps in the place of a mapping of its own process's buffer.
    pub(super) fn placeholder(
        &mut self,
        host: &Host,
        process: usize,
        buffer: usize,
        placeholder: Placeholder,
    ) -> Answer<MapSource> {
        let stored = match self.shared_state.placeholders(process) {
            Some((stored, _)) => stored,
            None => self.make_placeholders(host, process)?,
        };
        self.shared_state.put_placeholder(process, placeholder.number, buffer, placeholder.offset);
        Ok(MapSource { offset: placeholder.offset, file: Some(host.stored_fd(stored)?) })
    }

    /// Makes the placeholders' file and returns its id in CRIU's store. The task may need any descriptor
    /// number that stays open here.
    fn make_placeholders(&self, host: &Host, process: usize) -> Answer<i32> {
        let file = memfd_create(c"rewake-placeholders", MFdFlags::MFD_CLOEXEC)?;
        ftruncate(&file, i64::try_from(self.lazy_plan.length(process))?)?;
        let stored = host.store_fd(file.as_fd())?;
        let uffd = host.store_fd(rewake_uffd::open_unnegotiated()?.as_fd())?;
        self.shared_state.put_placeholders(process, stored, uffd);
        Ok(stored)
    }
}
