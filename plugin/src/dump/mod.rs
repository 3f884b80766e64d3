// SPDX-License-Identifier: MIT OR Apache-2.0
//! The dump. A process's queues are paused when its `/dev/kfd` is dumped, and go on when CRIU is done with everything, or
//! has failed: what they could write in between would be in one part of the image and not in another.

mod dmabuf;
mod freed_mappings;
mod kfd;
mod render;
mod shared;
mod tasks;

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::thread::sleep;
use std::time::Duration;

use nix::sys::stat::fstat;
use rewake_amdgpu_uapi::abi::kfd_criu_bo_bucket;
use rewake_amdgpu_uapi::criu::{self, Counts};
use rewake_criu_images::amdgpu::KfdBuffer;
use rewake_criu_plugin::{Answer, Host, Refusal};
use rewake_plugin_protocol::ProcessId;

use crate::criu_watchdog::CriuWatchdog;
use crate::device::{Devices, Gpu};
use crate::image;
use dmabuf::Ownerless;
use kfd::Name;
use render::{Renders, Spaces};
use shared::Shared;
use tasks::Tasks;

/// Tries to let a process's queues go on, and time between them.
const UNPAUSES: u32 = 10;
const BETWEEN: Duration = Duration::from_millis(10);

/// One `criu dump`.
#[derive(Debug)]
pub(crate) struct Dump {
    devices: Devices,
    tasks: Tasks,
    paused: Vec<Process>,
    /// Every `/dev/kfd` that was dumped.
    files: Vec<OwnedFd>,
    renders: Renders,
    shared: Shared,
}

/// A process with its queues paused.
#[derive(Debug)]
struct Process {
    /// Its own `/dev/kfd`, to let its queues go on.
    kfd: OwnedFd,
    /// The file's id.
    id: u32,
    counts: Counts,
    buffers: Vec<KfdBuffer>,
    /// Its GPUs.
    names: Vec<Name>,
    /// For as long as its queues are paused.
    guard: Option<CriuWatchdog>,
}

#[derive(Debug, thiserror::Error)]
#[error(
    "file {0:#x} is a second /dev/kfd of a process, and its state is that of processes {1:?} alike: \
     close one of the two"
)]
struct Alike(u32, Vec<u32>);

#[derive(Debug, thiserror::Error)]
#[error(
    "process {0} was restored while the dump began, and its GPU queues are stopped until their memory is resident: an image \
     would have zeros in its place; dump it again"
)]
struct BeingLoaded(i32);

impl Dump {
    pub(crate) fn new(devices: Devices) -> Self {
        Self {
            devices,
            tasks: Tasks::default(),
            paused: Vec::new(),
            files: Vec::new(),
            renders: Renders::default(),
            shared: Shared::default(),
        }
    }

    /// Notes a task of the tree, all of which are stopped. One whose gate is shut is refused here, before anything is touched:
    /// its queues are paused already, and the driver would count a second pause that nobody ends (`criu_process_info` in
    /// `kfd_chardev.c`).
    pub(crate) fn task(&mut self, pid: i32) -> Answer {
        if let Some(gated) = ProcessId::of(pid)?
            && gated.is_dump_blocked()?
        {
            return Err(BeingLoaded(pid).into());
        }
        self.tasks.add(pid);
        Ok(())
    }

    /// Mappings of GPUs are kept; their bytes are the buffers'.
    pub(crate) fn mapping(&self, host: &Host, status: &libc::stat) -> Answer {
        self.devices.gpu(status).ok_or(Refusal::NotMine)?;
        Ok(host.record_in_inventory()?)
    }

    pub(crate) fn file(&mut self, host: &Host, file: BorrowedFd<'_>, id: u32) -> Answer {
        match self.devices.gpu(&fstat(file)?) {
            Some(Gpu::Kfd) => {
                begin(host)?;
                self.kfd(host, file, id)?;
            }
            Some(Gpu::Render(minor)) => {
                begin(host)?;
                self.renders.add(file.try_clone_to_owned()?, id, minor);
            }
            None if dmabuf::is_one(file)? => {
                begin(host)?;
                dmabuf::dump(host, file, id, &mut self.shared)?;
            }
            None => return Err(Refusal::NotMine),
        }
        self.renders(host)?;
        self.owners()
    }

    /// Writes the render nodes when all files of GPUs have been seen.
    fn renders(&mut self, host: &Host) -> Answer {
        let seen: Vec<BorrowedFd<'_>> =
            self.files.iter().map(OwnedFd::as_fd).chain(self.renders.files()).collect();
        if !self.tasks.all_are(&self.devices, &seen) {
            return Ok(());
        }
        let mut spaces = Spaces::new(&self.devices, &self.tasks, &self.paused);
        self.renders.write(host, &mut spaces, &mut self.shared)
    }

    fn kfd(&mut self, host: &Host, file: BorrowedFd<'_>, id: u32) -> Answer {
        let first = self.process_of(file, id)?;
        self.files.push(file.try_clone_to_owned()?);
        if let Some(first) = first {
            host.info(format_args!("file {id:#x}: a second /dev/kfd of the process of file {first:#x}"));
            self.shared.second_file(id, first);
            return self.shared.write(host);
        }
        let own = file.try_clone_to_owned()?;
        let tasks = self.tasks.with(file, &self.devices);
        let guard = CriuWatchdog::of_queues(host, file, &tasks);
        let counts = criu::process_info(file)?;
        self.paused.push(Process { kfd: own, id, counts, buffers: Vec::new(), names: Vec::new(), guard });
        let state = kfd::dump(host, file, id, &counts, &mut self.shared)?;
        if let Some(mappings) = freed_mappings::mappings(&tasks, &state.image)? {
            self.shared.bare(id, mappings);
        }
        if let Some(process) = self.paused.last_mut() {
            (process.buffers, process.names) = (state.image.buffers, state.names);
        }
        self.shared.write(host)
    }

    /// The id of the `/dev/kfd` by which the process of `file` was paused, if it was. It must not be paused twice: that
    /// would have to be undone twice, and cannot be (`criu_process_info` in `kfd_chardev.c`). The kernel gives a paused
    /// process's state to who knows its counts, and refuses for all others.
    fn process_of(&self, file: BorrowedFd<'_>, id: u32) -> Answer<Option<u32>> {
        // Every refusal is a line in the kernel's log.
        if !self.tasks.one_has_both(&self.devices, file, &self.files) {
            return Ok(None);
        }
        let same = |process: &&Process| {
            criu::checkpoint(file, &process.counts).is_ok_and(|state| process.is(&state.bos))
        };
        let found: Vec<&Process> = self.paused.iter().filter(same).collect();
        match found[..] {
            [] => Ok(None),
            [process] => Ok(Some(process.id)),
            _ => Err(Alike(id, found.iter().map(|process| process.counts.pid).collect()).into()),
        }
    }

    /// Refuses open dma-bufs when nobody is left who could have their buffers.
    fn owners(&self) -> Answer {
        match self.shared.ownerless().first() {
            Some(file) if self.tasks.have_only(&self.devices, &self.files) => Err(Ownerless(*file).into()),
            _ => Ok(()),
        }
    }

    /// Lets all queues go on, whatever became of the dump.
    pub(crate) fn end(self, host: &Host) {
        for file in self.shared.ownerless() {
            host.error(format_args!("it cannot be restored: {}", Ownerless(file)));
        }
        for process in self.paused {
            if let Err(error) = process.go_on() {
                host.error(format_args!(
                    "the queues of a dumped process stay paused: {error}; it is tried again when CRIU has ended"
                ));
                // By the guard.
                std::mem::forget(process.guard);
            }
        }
    }
}

impl Process {
    /// Lets its queues go on.
    fn go_on(&self) -> Result<(), rewake_amdgpu_uapi::Error> {
        until_unpaused(|| criu::unpause(self.kfd.as_fd()))
    }

    /// Whether these are its buffers. No two have one offset on a GPU.
    fn is(&self, bos: &[kfd_criu_bo_bucket]) -> bool {
        let same = |(buffer, bo): (&KfdBuffer, &kfd_criu_bo_bucket)| {
            (buffer.address, buffer.size, buffer.offset) == (bo.addr, bo.size, bo.offset)
        };
        self.buffers.len() == bos.len() && self.buffers.iter().zip(bos).all(same)
    }
}

/// The image gets GPU state.
fn begin(host: &Host) -> Answer {
    image::refuse_stream(host.image_dir()?)?;
    Ok(host.record_in_inventory()?)
}

/// The kernel says EINVAL when nothing is paused (any more), which is what is wanted, and may be asked again otherwise: what failed has not
/// counted (`criu_unpause` in `kfd_chardev.c`).
fn until_unpaused(
    mut unpause: impl FnMut() -> Result<(), rewake_amdgpu_uapi::Error>,
) -> Result<(), rewake_amdgpu_uapi::Error> {
    let mut left = UNPAUSES;
    loop {
        left -= 1;
        match unpause() {
            Err(error) if error.errno() == Some(libc::EINVAL) => return Ok(()),
            Err(_) if left > 0 => sleep(BETWEEN),
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io;

    use super::*;

    /// The kernel answers with these, the last one ever after; what it comes to, and how often it was asked.
    fn unpaused(answers: &[i32]) -> (Result<(), i32>, usize) {
        let asked = Cell::new(0);
        let unpause = || {
            let errno = answers[asked.replace(asked.get() + 1).min(answers.len() - 1)];
            let (what, source) = (Box::default(), io::Error::from_raw_os_error(errno));
            if errno == 0 { Ok(()) } else { Err(rewake_amdgpu_uapi::Error::Call { what, source }) }
        };
        let done = until_unpaused(unpause);
        (done.map_err(|error| error.errno().unwrap()), asked.get())
    }

    #[test]
    fn queues_that_are_not_paused_any_more_need_no_other_try() {
        assert_eq!(unpaused(&[0]), (Ok(()), 1));
        assert_eq!(unpaused(&[libc::EINVAL]), (Ok(()), 1));
        assert_eq!(unpaused(&[libc::EBUSY, libc::EINTR, libc::EINVAL]), (Ok(()), 3));
        assert_eq!(unpaused(&[libc::EBUSY]), (Err(libc::EBUSY), UNPAUSES as usize));
    }
}
