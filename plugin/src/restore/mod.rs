// SPDX-License-Identifier: MIT OR Apache-2.0
//! Restores GPU state. CRIU's main process first checks the image, before a task exists. Each task then makes
//! its own state with its queues evicted. When all tasks are complete, the main process loads their memory
//! and starts each process's queues once.

mod check;
mod cpu_mappings;
mod cpu_page_wait;
mod gpu_assignment;
mod kfd;
mod lazy_plan;
mod loading;
mod mapping;
mod placeholders;
mod render;
mod render_nodes;
mod resume;
mod shared;
mod shared_state;
mod streaming;
mod watchdog_wait;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::Path;

use rewake_criu_images::rewake::FreedMapping;
use rewake_criu_plugin::{Answer, Host, MapSource, Refusal, Restored};

use crate::buffers::Buffers;
use crate::device::{CLASS, Devices};
use crate::image::Images;
use cpu_page_wait::WaitScope;
use gpu_assignment::GpuAssignment;
use lazy_plan::LazyBufferPlan;
use render::RenderNode;
use render_nodes::RenderNodes;
use resume::QueueStart;
use shared::Sharing;
use shared_state::SharedState;
use streaming::StreamerConnection;
use watchdog_wait::WatchdogWait;

/// A GPU file of the image.
#[derive(Debug, Clone, Copy)]
enum RestoredFile {
    /// `/dev/kfd`: its index in [`SharedState`] and the index of its process.
    Kfd { file: usize, process: usize },
    /// A render node: index in [`Restore::nodes`].
    Render(usize),
    /// A dma-buf: index in [`Sharing::exports`].
    Dmabuf(usize),
}

/// CRIU's own plugin dumps two `/dev/kfd`s of one process as if they were of two processes.
#[derive(Debug, thiserror::Error)]
#[error(
    "process {0} has two images of its compute state, amdgpu-kfd-{1}.img and amdgpu-kfd-{2}.img: dump it \
     with this plugin, or with one open /dev/kfd"
)]
struct TwoImages(u32, u32, u32);

/// One `criu restore`.
#[derive(Debug)]
pub(crate) struct Restore {
    images: Images,
    devices: Devices,
    /// By index in `images.kfd`.
    buffers: Vec<Buffers>,
    assignment: GpuAssignment,
    sharing: Sharing,
    nodes: Vec<RenderNode>,
    shared_state: SharedState,
    /// The process that this task has made, by index in `images.kfd`; none in the main process.
    own: Option<usize>,
    machine_nodes: RenderNodes,
    /// This task's render nodes: ids in CRIU's store, by the GPU's id in this machine.
    render_nodes: BTreeMap<u32, i32>,
    resume: QueueStart,
    watchdog_wait: WatchdogWait,
    /// Which buffers are lazy.
    lazy_plan: LazyBufferPlan,
    /// Mappings without a buffer, by the id of the process's `/dev/kfd`. A dump by another plugin does not
    /// list them.
    freed_mappings: BTreeMap<u32, BTreeSet<FreedMapping>>,
    /// In the main process: the streamer that loads lazy buffers, until it is responsible for all tasks.
    streamer: Option<StreamerConnection>,
}

impl Restore {
    pub(crate) fn new(host: &Host, images: Images) -> Answer<Self> {
        let assignment = GpuAssignment::find(host, &images)?;
        check::check_images(host, &images, &assignment)?;
        let machine_nodes = RenderNodes::of_host(assignment.minors());
        let devices = Devices::of_machine(Path::new(CLASS))?;
        let shared = shared::read(host)?;
        let mut sharing = Sharing::of(&shared, &images.kfd)?;
        let nodes = render::nodes(&images, &assignment, &shared, &mut sharing)?;
        render::warn_of_lost_state(host, &nodes);
        let files = images.kfd.len() + sharing.second_files.len();
        let of_nodes = nodes.iter().map(|node| node.contents.buffers.len());
        let buffers: Vec<Buffers> = images.kfd.iter().map(|(_, image)| Buffers::of(image)).collect();
        // Without a process that computes there is no gate.
        let streamer = match buffers.is_empty() {
            true => None,
            false => StreamerConnection::connect_in_work_dir(host, buffers.iter().any(Buffers::has_any))?,
        };
        if streamer.is_none() {
            loading::refuse_arriving_files(host)?;
        }
        let lazy_plan = match streamer {
            Some(_) => LazyBufferPlan::of(host, &images.kfd, &buffers, &sharing)?,
            None => LazyBufferPlan::eager(&images.kfd),
        };
        let placeholders = (0..images.kfd.len()).map(|process| lazy_plan.mappings(process).len());
        let shared_state =
            SharedState::new(&images.kfd, placeholders, files, sharing.exports.len(), of_nodes)?;
        let resume = QueueStart::new();
        let watchdog_wait = WatchdogWait::new(host)?;
        Ok(Self {
            images,
            devices,
            buffers,
            assignment,
            sharing,
            nodes,
            shared_state,
            own: None,
            machine_nodes,
            render_nodes: BTreeMap::new(),
            resume,
            watchdog_wait,
            lazy_plan,
            freed_mappings: shared.freed_mappings.into_iter().map(|of| (of.kfd, of.mappings)).collect(),
            streamer,
        })
    }

    pub(crate) fn file(&mut self, host: &Host, id: u32) -> Answer<Restored> {
        let file = self.identify(host, id)?.ok_or(Refusal::NotMine)?;
        self.watchdog_wait.wait(host, &self.shared_state)?;
        // First the task's own state, so that no other task waits for this one while it waits below.
        self.restore_own_state(host, file)?;
        let fd = match file {
            RestoredFile::Kfd { file, process } => {
                let pid = self.images.kfd[process].1.pid;
                host.stored_fd(self.shared_state.file(file, process, pid)?)?
            }
            RestoredFile::Render(node) => self.render_file(host, node)?,
            RestoredFile::Dmabuf(export) => self.exported(host, export)?,
        };
        Ok(Restored::File(fd))
    }

    /// Returns which GPU file of the image has this id.
    fn identify(&self, host: &Host, id: u32) -> Answer<Option<RestoredFile>> {
        if let Some(process) = self.images.kfd.iter().position(|(kfd, _)| *kfd == id) {
            return Ok(Some(RestoredFile::Kfd { file: process, process }));
        }
        if let Some(second) = self.sharing.second_files.iter().position(|(file, _)| *file == id) {
            let process = self.sharing.second_files[second].1;
            return Ok(Some(RestoredFile::Kfd { file: self.images.kfd.len() + second, process }));
        }
        if let Some(node) = self.nodes.iter().position(|node| node.id == id) {
            return Ok(Some(RestoredFile::Render(node)));
        }
        Ok(self.sharing.dmabuf(host, id)?.map(RestoredFile::Dmabuf))
    }

    /// Makes the GPU state of this task's process, if it has one that is not made yet. CRIU restores files in
    /// the order of their ids, and a file that two tasks have in either of them.
    fn restore_own_state(&mut self, host: &Host, requested: RestoredFile) -> Answer {
        let task = std::process::id();
        let is_own = |process: &usize| self.images.kfd[*process].1.pid == task;
        let requested = if let RestoredFile::Kfd { process, .. } = requested {
            Some(process).filter(is_own)
        } else {
            None
        };
        let Some(own) = requested.or(self.own).or_else(|| (0..self.images.kfd.len()).find(is_own)) else {
            return Ok(());
        };
        match self.own {
            Some(made) if made == own => Ok(()),
            Some(made) => Err(TwoImages(task, self.images.kfd[made].0, self.images.kfd[own].0).into()),
            None => self.restore_process(host, own).inspect_err(|_| self.shared_state.put_failed(own)),
        }
    }

    pub(crate) fn mapping(
        &mut self,
        host: &Host,
        path: &str,
        address: u64,
        offset: u64,
    ) -> Answer<MapSource> {
        mapping::replace(self, host, path, address, offset)
    }

    /// In the main process: CRIU has forked the first task.
    pub(crate) fn post_forking(&mut self, host: &Host) {
        self.resume.post_forking(host);
        // Also if no watchdog could be started, which was logged: tasks then run without one.
        self.shared_state.stop_watchdog_wait();
    }

    /// In the main process: a task is complete and stopped. At the first one all tasks are, and their memory
    /// is loaded.
    pub(crate) fn resume(&mut self, host: &Host, pid: i32) -> Answer {
        let loaded = if self.resume.begin(host, pid) { self.load(host) } else { Ok(()) };
        let (images, devices, state, streamer) =
            (&self.images, &self.devices, &self.shared_state, &self.streamer);
        let ready = || {
            loaded?;
            cpu_page_wait::wait(
                host,
                devices,
                streamer.as_ref().map(StreamerConnection::connection),
                pid,
                || wait_scope(images, streamer.as_ref(), pid),
            )?;
            streamer.as_ref().map_or(Ok(()), |streamer| streamer.gate(host, images, state, pid))
        };
        let mut done = self.resume.task(host, pid, ready, self.shared_state.ready_count());
        if self.resume.all_started()
            && let Some(streamer) = self.streamer.take()
        {
            done =
                done.and_then(|()| streamer.finish().map_err(|refusal| self.resume.fail(host, pid, refusal)));
        }
        self.resume.stop_watchdog_when_done(host);
        done
    }

    pub(crate) fn end(self, host: &Host, result: i32) {
        self.resume.end(host, result, self.shared_state.ready_count());
    }
}

/// Returns which lazy CPU memory of a task must be resident before its queues start.
fn wait_scope(images: &Images, streamer: Option<&StreamerConnection>, pid: i32) -> Answer<WaitScope> {
    if !streamer.is_some_and(StreamerConnection::holds_calls) {
        return Ok(WaitScope::All);
    }
    let Some(number) = streaming::pid_in_image(pid) else { return Ok(WaitScope::All) };
    WaitScope::of(images.kfd.iter().map(|(_, image)| image).find(|image| image.pid == number))
}

/// Returns the open `/dev/kfd` of a process.
fn kfd_file(host: &Host, images: &Images, state: &SharedState, process: usize) -> Answer<OwnedFd> {
    let pid = images.kfd[process].1.pid;
    Ok(host.stored_fd(state.file(process, process, pid)?)?)
}
