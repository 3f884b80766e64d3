// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whether queues run when their gates are open.
//!
//! A driver that was asked to let them go on says yes, and may still hold them back: what RESUME has begun maps all that GPUs reach,
//! and tries again for ever if something cannot be had. It counts a process's queues on each GPU out and in, and tells of it; they
//! run when they were counted in as often as out.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::os::fd::{AsFd as _, RawFd};
use std::os::unix::fs::MetadataExt as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use rewake_kfd::Kfd;
use rewake_kfd::smi::{QueueEvent, Stream, What};
use rewake_kfd::topology::Topology;
use tracing::warn;

use crate::sys;

/// RESTORE has counted all out, once, before anything is handed over.
const BY_RESTORE: i64 = 1;
/// Inode of the first pid namespace (`PROC_PID_INIT_INO`, include/linux/proc_ns.h).
const FIRST_PID_NAMESPACE: u64 = 0xEFFF_FFFC;
/// Between two looks at who has ended.
const LOOK: u16 = 20;

/// A process whose gate is open.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) pid: u32,
    /// Its process descriptor, in the ledger.
    pub(super) process: RawFd,
    /// N of the `/dev/dri/renderDN` of its GPUs.
    pub(super) minors: Vec<u32>,
}

/// A process's queues on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Queues {
    /// How much more often counted out than in since it is looked at.
    out: i64,
    put_off: u64,
}

/// What the driver has told.
#[derive(Debug, Default)]
struct Told(BTreeMap<(u32, u32), Queues>);

/// Hears what the driver tells of some GPUs.
#[derive(Debug)]
pub(super) struct Confirm {
    kfd: Kfd,
    /// By N of `/dev/dri/renderDN`, with the GPU's id in the topology.
    streams: BTreeMap<u32, (u32, Stream)>,
    told: Told,
}

impl Confirm {
    /// Of no GPU yet. To be made when nobody waits: the driver lets nobody in while it takes a process apart that has ended
    /// (`kfd_create_process`).
    ///
    /// # Errors
    /// There is no driver, or it does not tell who is meant.
    pub(super) fn new() -> anyhow::Result<Self> {
        let space = std::fs::metadata("/proc/self/ns/pid").context("finding the pid namespace")?;
        ensure!(
            space.ino() == FIRST_PID_NAMESPACE,
            "the driver calls processes by their numbers in the first pid namespace, and this is in another"
        );
        Ok(Self { kfd: Kfd::open()?, streams: BTreeMap::new(), told: Told::default() })
    }

    /// Listens, from now on, to the GPUs with these render nodes: after RESTORE, before PROCESS_INFO.
    ///
    /// # Errors
    /// The driver does not tell.
    pub(super) fn listen(&mut self, minors: impl IntoIterator<Item = u32>) -> anyhow::Result<()> {
        let topology = Topology::read()?;
        for minor in minors {
            let gpu = topology.gpus().find(|gpu| gpu.render_minor() == minor);
            let gpu = gpu.with_context(|| format!("renderD{minor} is not in the topology"))?.gpu_id;
            if let Entry::Vacant(place) = self.streams.entry(minor) {
                place.insert((gpu, Stream::open(&self.kfd, gpu)?));
            }
        }
        Ok(())
    }

    /// Takes what was told, often enough that nothing is lost.
    ///
    /// # Errors
    /// The driver's.
    pub(super) fn hear(&mut self) -> anyhow::Result<()> {
        for (_, stream) in self.streams.values_mut() {
            self.told.take(&stream.read().context("reading SMI events")?);
        }
        Ok(())
    }

    /// Waits until the queues of all these run, whose gates are open; at most `patience`. Whoever has ended is not waited
    /// for. Says what is wrong with the others, a line each.
    ///
    /// # Errors
    /// The driver's.
    pub(super) fn run(&mut self, opened: &[Opened], patience: Duration) -> anyhow::Result<Vec<String>> {
        let start = Instant::now();
        loop {
            self.hear()?;
            let alive = opened.iter().filter(|of| !sys::has_ended(of.process));
            let wrong: Vec<String> = alive.flat_map(|of| self.wrong(of)).collect();
            if wrong.is_empty() || start.elapsed() >= patience {
                return Ok(wrong);
            }
            let streams = self.streams.values();
            let mut fds: Vec<PollFd<'_>> =
                streams.map(|(_, stream)| PollFd::new(stream.as_fd(), PollFlags::POLLIN)).collect();
            match poll(&mut fds, LOOK) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno).context("waiting for SMI events"),
            }
        }
    }

    fn wrong(&self, of: &Opened) -> impl Iterator<Item = String> {
        let streams = of.minors.iter().filter_map(|minor| self.streams.get(minor));
        streams.filter_map(|(gpu, _)| self.told.wrong(of.pid, *gpu))
    }
}

/// Says that nothing will be confirmed.
pub(super) fn not(why: &anyhow::Error) {
    warn!("whether queues run will not be confirmed: {why:#}");
}

/// Does something with it, which is no more if that fails.
pub(super) fn trying(confirm: &mut Option<Confirm>, act: impl FnOnce(&mut Confirm) -> anyhow::Result<()>) {
    if let Some(Err(error)) = confirm.as_mut().map(act) {
        not(&error);
        *confirm = None;
    }
}

impl Told {
    fn take(&mut self, events: &[QueueEvent]) {
        for event in events {
            let queues = self.0.entry((event.pid, event.gpu)).or_default();
            match event.what {
                What::Out => queues.out += 1,
                What::In => queues.out -= 1,
                What::PutOff => queues.put_off += 1,
            }
        }
    }

    /// What is wrong with a process's queues on a GPU; nothing if they run.
    fn wrong(&self, pid: u32, gpu: u32) -> Option<String> {
        let queues = format!("queues of process {pid} on GPU {gpu:#x}");
        // PROCESS_INFO was to be told of.
        let Some(&Queues { out, put_off }) = self.0.get(&(pid, gpu)) else {
            return Some(format!("the driver has told nothing of {queues} (is CAP_SYS_ADMIN there?)"));
        };
        let held = BY_RESTORE + out;
        let why = match put_off {
            0 => String::new(),
            times => format!("; it has put them off {times} times for memory that it cannot have"),
        };
        (held > 0).then(|| format!("the driver holds {queues} back, {held} times{why}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(events: &[What]) -> Told {
        let mut told = Told::default();
        told.take(
            &events.iter().map(|what| QueueEvent { pid: 7, gpu: 0x1a, what: *what }).collect::<Vec<_>>(),
        );
        told
    }

    #[test]
    fn queues_run_when_the_gate_is_open_and_what_resume_began_is_done_in_any_order() {
        // PROCESS_INFO; then UNPAUSE and RESUME's worker.
        assert!(told(&[What::Out, What::In]).wrong(7, 0x1a).is_some());
        assert_eq!(told(&[What::Out, What::In, What::In]).wrong(7, 0x1a), None);
    }

    #[test]
    fn what_is_evicted_meanwhile_must_come_back() {
        let events = [What::Out, What::In, What::Out, What::In];
        assert!(told(&events).wrong(7, 0x1a).unwrap().contains("process 7 on GPU 0x1a back, 1 times"));
        assert_eq!(told(&[&events[..], &[What::In]].concat()).wrong(7, 0x1a), None);
    }

    #[test]
    fn memory_that_cannot_be_had_is_the_reason() {
        let wrong = told(&[What::Out, What::In, What::PutOff, What::PutOff]).wrong(7, 0x1a).unwrap();
        assert!(wrong.contains("put them off 2 times"), "{wrong}");
    }

    #[test]
    fn another_s_queues_and_another_gpu_s_tell_nothing() {
        let told = told(&[What::Out, What::In, What::In]);
        for (pid, gpu) in [(8, 0x1a), (7, 0x1b)] {
            let wrong = told.wrong(pid, gpu).unwrap();
            assert!(wrong.contains("has told nothing"), "{wrong}");
        }
    }
}
