// SPDX-License-Identifier: MIT OR Apache-2.0
//! Dumps GPU state. A process's queues are evicted when its `/dev/kfd` is dumped, and resumed when CRIU has
//! finished or failed. If they ran in between, parts of the image would disagree.

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
use crate::device::{DeviceFile, Devices};
use crate::image;
use dmabuf::OwnerlessDmabuf;
use kfd::GpuName;
use render::{AddressSpaces, RenderNodes};
use shared::DumpSharing;
use tasks::Tasks;

/// Attempts to resume a process's queues, and the time between them.
const MAX_UNPAUSES: u32 = 10;
/// Pause between two of these attempts.
const UNPAUSE_INTERVAL: Duration = Duration::from_millis(10);

/// One `criu dump`.
#[derive(Debug)]
pub(crate) struct Dump {
    devices: Devices,
    tasks: Tasks,
    evicted: Vec<EvictedProcess>,
    /// Every `/dev/kfd` dumped so far.
    files: Vec<OwnedFd>,
    render_nodes: RenderNodes,
    shared: DumpSharing,
}

/// A process whose queues are evicted.
#[derive(Debug)]
struct EvictedProcess {
    /// The process's own `/dev/kfd`, with which its queues are resumed.
    kfd: OwnedFd,
    /// The id that CRIU gave the file.
    id: u32,
    counts: Counts,
    buffers: Vec<KfdBuffer>,
    /// The ids of its GPUs.
    names: Vec<GpuName>,
    /// Runs for as long as the queues are evicted.
    watchdog: Option<CriuWatchdog>,
}

#[derive(Debug, thiserror::Error)]
#[error(
    "file {0:#x} is a second /dev/kfd of a process, and its state matches each of the processes {1:?}: \
     close one of the process's two files"
)]
struct AmbiguousKfd(u32, Vec<u32>);

#[derive(Debug, thiserror::Error)]
#[error(
    "process {0} was restored while the dump began, and its GPU queues are stopped until their memory is \
     resident: an image would have zeros in its place; dump it again"
)]
struct ClosedGate(i32);

impl Dump {
    pub(crate) fn new(devices: Devices) -> Self {
        Self {
            devices,
            tasks: Tasks::default(),
            evicted: Vec::new(),
            files: Vec::new(),
            render_nodes: RenderNodes::default(),
            shared: DumpSharing::default(),
        }
    }

    /// Adds a task of the stopped tree. A process whose gate is closed is refused here, before its state is
    /// changed.
    ///
    /// Its queues are evicted already. The driver would count a second eviction, and no call would end it
    /// (`criu_process_info` in `kfd_chardev.c`).
    pub(crate) fn task(&mut self, pid: i32) -> Answer {
        if let Some(process) = ProcessId::of(pid)?
            && process.is_dump_blocked()?
        {
            return Err(ClosedGate(pid).into());
        }
        self.tasks.add(pid);
        Ok(())
    }

    /// Accepts a mapping of a GPU. Its bytes are written with the buffers.
    pub(crate) fn mapping(&self, host: &Host, status: &libc::stat) -> Answer {
        self.devices.gpu(status).ok_or(Refusal::NotMine)?;
        Ok(host.record_in_inventory()?)
    }

    pub(crate) fn file(&mut self, host: &Host, file: BorrowedFd<'_>, id: u32) -> Answer {
        match self.devices.gpu(&fstat(file)?) {
            Some(DeviceFile::Kfd) => {
                record_gpu_state(host)?;
                self.kfd(host, file, id)?;
            }
            Some(DeviceFile::Render(minor)) => {
                record_gpu_state(host)?;
                self.render_nodes.add(file.try_clone_to_owned()?, id, minor);
            }
            None if dmabuf::is_amdgpu_dmabuf(file)? => {
                record_gpu_state(host)?;
                dmabuf::dump(host, file, id, &mut self.shared)?;
            }
            None => {
                dmabuf::refuse_fence(file, id)?;
                return Err(Refusal::NotMine);
            }
        }
        self.write_render_nodes(host)?;
        self.check_dmabuf_owners()
    }

    /// Writes the render nodes once CRIU has dumped all GPU files of the tree.
    fn write_render_nodes(&mut self, host: &Host) -> Answer {
        let seen: Vec<BorrowedFd<'_>> =
            self.files.iter().map(OwnedFd::as_fd).chain(self.render_nodes.files()).collect();
        if !self.tasks.have_only_files(&self.devices, &seen) {
            return Ok(());
        }
        let mut spaces = AddressSpaces::new(&self.devices, &self.tasks, &self.evicted);
        self.render_nodes.write(host, &mut spaces, &mut self.shared)
    }

    fn kfd(&mut self, host: &Host, file: BorrowedFd<'_>, id: u32) -> Answer {
        let first = self.process_of(file, id)?;
        self.files.push(file.try_clone_to_owned()?);
        if let Some(first) = first {
            host.info(format_args!("file {id:#x}: a second /dev/kfd of the process of file {first:#x}"));
            self.shared.add_second_file(id, first);
            return self.shared.write(host);
        }
        let own = file.try_clone_to_owned()?;
        let tasks = self.tasks.with(file, &self.devices);
        let watchdog = CriuWatchdog::for_queues(host, file, &tasks);
        let counts = criu::process_info(file)?;
        self.evicted.push(EvictedProcess {
            kfd: own,
            id,
            counts,
            buffers: Vec::new(),
            names: Vec::new(),
            watchdog,
        });
        let state = kfd::dump(host, file, id, &counts, &mut self.shared)?;
        if let Some(mappings) = freed_mappings::find(&tasks, &state.image)? {
            self.shared.add_freed_mappings(id, mappings);
        }
        if let Some(process) = self.evicted.last_mut() {
            (process.buffers, process.names) = (state.image.buffers, state.names);
        }
        self.shared.write(host)
    }

    /// Returns the id of the `/dev/kfd` with which the queues of this process were evicted, if they were.
    ///
    /// A second eviction must not happen: it would have to be undone twice, and cannot be
    /// (`criu_process_info` in `kfd_chardev.c`). CHECKPOINT succeeds only with the counts of the evicted
    /// process, so it identifies the process.
    fn process_of(&self, file: BorrowedFd<'_>, id: u32) -> Answer<Option<u32>> {
        // The kernel logs every call that it refuses: try only where the answer can be yes.
        if !self.tasks.any_has_kfd_and_other(&self.devices, file, &self.files) {
            return Ok(None);
        }
        let same = |process: &&EvictedProcess| {
            criu::checkpoint(file, &process.counts).is_ok_and(|state| process.has_buffers(&state.bos))
        };
        let found: Vec<&EvictedProcess> = self.evicted.iter().filter(same).collect();
        match found[..] {
            [] => Ok(None),
            [process] => Ok(Some(process.id)),
            _ => Err(AmbiguousKfd(id, found.iter().map(|process| process.counts.pid).collect()).into()),
        }
    }

    /// Refuses an open dma-buf once no process remains that could have its buffer.
    fn check_dmabuf_owners(&self) -> Answer {
        match self.shared.ownerless().first() {
            Some(file) if self.tasks.have_only_kfds(&self.devices, &self.files) => {
                Err(OwnerlessDmabuf(*file).into())
            }
            _ => Ok(()),
        }
    }

    /// Resumes all queues, after a dump that succeeded or failed.
    pub(crate) fn end(self, host: &Host) {
        for file in self.shared.ownerless() {
            host.error(format_args!("the image cannot be restored: {}", OwnerlessDmabuf(file)));
        }
        for process in self.evicted {
            if let Err(error) = process.resume_queues() {
                host.error(format_args!(
                    "process {}: its queues could not be resumed: {error}; the CRIU watchdog tries again \
                     when CRIU has ended",
                    process.counts.pid
                ));
                // The watchdog resumes them.
                std::mem::forget(process.watchdog);
            }
        }
    }
}

impl EvictedProcess {
    /// Resumes the process's queues.
    fn resume_queues(&self) -> Result<(), rewake_amdgpu_uapi::Error> {
        unpause_with_retries(|| criu::unpause(self.kfd.as_fd()))
    }

    /// Returns whether these are the process's buffers. Two buffers never have the same offset on a GPU.
    fn has_buffers(&self, bos: &[kfd_criu_bo_bucket]) -> bool {
        let same = |(buffer, bo): (&KfdBuffer, &kfd_criu_bo_bucket)| {
            (buffer.address, buffer.size, buffer.offset) == (bo.addr, bo.size, bo.offset)
        };
        self.buffers.len() == bos.len() && self.buffers.iter().zip(bos).all(same)
    }
}

/// Prepares the image for GPU state: names this plugin in the inventory, and refuses a streamed image.
fn record_gpu_state(host: &Host) -> Answer {
    image::refuse_stream(host.image_dir()?)?;
    Ok(host.record_in_inventory()?)
}

/// Resumes queues with retries. EINVAL means that no queue is evicted (any more), and is success.
///
/// A call that failed has not been counted, so that it can be repeated (`criu_unpause` in `kfd_chardev.c`).
fn unpause_with_retries(
    mut unpause: impl FnMut() -> Result<(), rewake_amdgpu_uapi::Error>,
) -> Result<(), rewake_amdgpu_uapi::Error> {
    let mut left = MAX_UNPAUSES;
    loop {
        left -= 1;
        match unpause() {
            Err(error) if error.errno() == Some(libc::EINVAL) => return Ok(()),
            Err(_) if left > 0 => sleep(UNPAUSE_INTERVAL),
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io;

    use super::*;

    /// Returns the result and the number of calls for a kernel that returns these errors in order, then
    /// always the last.
    fn unpause_answered_with(answers: &[i32]) -> (Result<(), i32>, usize) {
        let calls = Cell::new(0);
        let unpause = || {
            let errno = answers[calls.replace(calls.get() + 1).min(answers.len() - 1)];
            let (what, source) = (Box::default(), io::Error::from_raw_os_error(errno));
            if errno == 0 { Ok(()) } else { Err(rewake_amdgpu_uapi::Error::Call { what, source }) }
        };
        let done = unpause_with_retries(unpause);
        (done.map_err(|error| error.errno().unwrap()), calls.get())
    }

    #[test]
    fn queues_that_run_again_need_no_other_attempt() {
        assert_eq!(unpause_answered_with(&[0]), (Ok(()), 1));
        assert_eq!(unpause_answered_with(&[libc::EINVAL]), (Ok(()), 1));
        assert_eq!(unpause_answered_with(&[libc::EBUSY, libc::EINTR, libc::EINVAL]), (Ok(()), 3));
        assert_eq!(unpause_answered_with(&[libc::EBUSY]), (Err(libc::EBUSY), MAX_UNPAUSES as usize));
    }
}
