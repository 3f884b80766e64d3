// SPDX-License-Identifier: MIT OR Apache-2.0
//! The restore. Everything that can be refused is refused in CRIU's main process, before a task exists; then every task
//! makes its own GPU state, stopped; and when all tasks are whole, the main process loads their memory and starts the queues of
//! each, once.

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
mod resume;
mod shared;
mod shared_state;
mod streaming;
mod watchdog_wait;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::Path;

use rewake_criu_images::rewake::FreedMapping;
use rewake_criu_plugin::{Answer, Host, Mapping, Refusal, Restored};

use crate::buffers::Buffers;
use crate::device::{CLASS, Devices};
use crate::image::Images;
use cpu_page_wait::WaitScope;
use gpu_assignment::GpuAssignment;
use lazy_plan::LazyPlan;
use render::Node;
use resume::Resume;
use shared::Sharing;
use shared_state::SharedState;
use streaming::Server;
use watchdog_wait::Forked;

/// A file of the image.
#[derive(Debug, Clone, Copy)]
enum File {
    /// `/dev/kfd`, by its place on the board.
    Kfd { file: usize, process: usize },
    /// Index in [`Restore::nodes`].
    Render(usize),
    /// Index in [`Sharing::exports`].
    Dmabuf(usize),
}

/// CRIU's own plugin dumps two such files as if they were two processes.
#[derive(Debug, thiserror::Error)]
#[error(
    "process {0} has two images of one compute state, amdgpu-kfd-{1}.img and amdgpu-kfd-{2}.img: dump it with this \
     plugin, or with one /dev/kfd open"
)]
struct Twice(u32, u32, u32);

/// One `criu restore`.
#[derive(Debug)]
pub(crate) struct Restore {
    images: Images,
    devices: Devices,
    /// By index in `images.kfd`.
    buffers: Vec<Buffers>,
    places: GpuAssignment,
    sharing: Sharing,
    nodes: Vec<Node>,
    board: SharedState,
    /// This task's process, by index in `images.kfd`; none in the main process.
    own: Option<usize>,
    /// This task's render nodes by their GPU in the machine: ids in CRIU's store.
    render: BTreeMap<u32, i32>,
    resume: Resume,
    forked: Forked,
    /// What may come later.
    later: LazyPlan,
    /// Mappings without a buffer, by the id of the process's `/dev/kfd`; none of a process: its dump did not tell.
    bare: BTreeMap<u32, BTreeSet<FreedMapping>>,
    /// Who loads that, until it answers for all; in the main process.
    server: Option<Server>,
}

impl Restore {
    pub(crate) fn new(host: &Host, images: Images) -> Answer<Self> {
        let places = GpuAssignment::find(host, &images)?;
        check::all(host, &images, &places)?;
        let devices = Devices::of_machine(Path::new(CLASS))?;
        let shared = shared::read(host)?;
        let mut sharing = Sharing::of(&shared, &images.kfd)?;
        let nodes = render::nodes(&images, &places, &shared, &mut sharing)?;
        let files = images.kfd.len() + sharing.second_files.len();
        let of_nodes = nodes.iter().map(|node| node.contents.buffers.len());
        let buffers: Vec<Buffers> = images.kfd.iter().map(|(_, image)| Buffers::of(image)).collect();
        // Without a process that computes there is no gate.
        let server = match buffers.is_empty() {
            true => None,
            false => Server::find(host, buffers.iter().any(Buffers::are_some))?,
        };
        let later = match server {
            Some(_) => LazyPlan::of(host, &images.kfd, &buffers, &sharing)?,
            None => LazyPlan::nothing(&images.kfd),
        };
        let placeholders = (0..images.kfd.len()).map(|process| later.mappings(process).len());
        let board = SharedState::new(&images.kfd, placeholders, files, sharing.exports.len(), of_nodes)?;
        let (own, render, resume) = (None, BTreeMap::new(), Resume::new());
        let forked = Forked::new(host)?;
        Ok(Self {
            images,
            devices,
            buffers,
            places,
            sharing,
            nodes,
            board,
            own,
            render,
            resume,
            forked,
            later,
            bare: shared.freed_mappings.into_iter().map(|of| (of.kfd, of.mappings)).collect(),
            server,
        })
    }

    pub(crate) fn file(&mut self, host: &Host, id: u32) -> Answer<Restored> {
        let file = self.what(host, id)?.ok_or(Refusal::NotMine)?;
        self.forked.until_guarded(host, &self.board)?;
        // Whatever the task waits for below, nobody waits for the task then.
        self.own_state(host, file)?;
        let fd = match file {
            File::Kfd { file, process } => {
                let pid = self.images.kfd[process].1.pid;
                host.stored_fd(self.board.file(file, process, pid)?)?
            }
            File::Render(node) => self.render_file(host, node)?,
            File::Dmabuf(export) => self.shown(host, export)?,
        };
        Ok(Restored::File(fd))
    }

    /// What a file of the image is.
    fn what(&self, host: &Host, id: u32) -> Answer<Option<File>> {
        if let Some(process) = self.images.kfd.iter().position(|(kfd, _)| *kfd == id) {
            return Ok(Some(File::Kfd { file: process, process }));
        }
        if let Some(second) = self.sharing.second_files.iter().position(|(file, _)| *file == id) {
            let process = self.sharing.second_files[second].1;
            return Ok(Some(File::Kfd { file: self.images.kfd.len() + second, process }));
        }
        if let Some(node) = self.nodes.iter().position(|node| node.id == id) {
            return Ok(Some(File::Render(node)));
        }
        Ok(self.sharing.dmabuf(host, id)?.map(File::Dmabuf))
    }

    /// Makes the GPU state of this task's process, if it has one and it is not made yet: CRIU asks for files in the order
    /// of their numbers, and for one that two tasks have in whichever it likes.
    fn own_state(&mut self, host: &Host, asked: File) -> Answer {
        let task = std::process::id();
        let is_own = |process: &usize| self.images.kfd[*process].1.pid == task;
        let asked = if let File::Kfd { process, .. } = asked { Some(process).filter(is_own) } else { None };
        let Some(own) = asked.or(self.own).or_else(|| (0..self.images.kfd.len()).find(is_own)) else {
            return Ok(());
        };
        match self.own {
            Some(made) if made == own => Ok(()),
            Some(made) => Err(Twice(task, self.images.kfd[made].0, self.images.kfd[own].0).into()),
            None => self.process(host, own).inspect_err(|_| self.board.failed(own)),
        }
    }

    pub(crate) fn mapping(&mut self, host: &Host, path: &str, address: u64, offset: u64) -> Answer<Mapping> {
        mapping::find(self, host, path, address, offset)
    }

    /// In the main process: the first task is forked.
    pub(crate) fn forked(&mut self, host: &Host) {
        self.resume.forked(host);
        // Also where no guard could be started, which was said: tasks go on without.
        self.board.put_guarded();
    }

    /// In the main process: a task is whole, and stopped. With the first one all are, and their memory is loaded.
    pub(crate) fn resume(&mut self, host: &Host, pid: i32) -> Answer {
        let loaded = if self.resume.begin(host, pid) { self.load(host) } else { Ok(()) };
        let (images, devices, board, server) = (&self.images, &self.devices, &self.board, &self.server);
        let ready = || {
            loaded?;
            cpu_page_wait::wait(host, devices, server.as_ref().map(Server::connection), pid, || {
                first(images, server.as_ref(), pid)
            })?;
            server.as_ref().map_or(Ok(()), |server| server.gate(host, images, board, pid))
        };
        let mut done = self.resume.task(host, pid, ready, self.board.count());
        if self.resume.all_started()
            && let Some(server) = self.server.take()
        {
            done = done.and_then(|()| server.go().map_err(|refusal| self.resume.fail(host, pid, refusal)));
        }
        self.resume.no_more_guard(host);
        done
    }

    pub(crate) fn end(self, host: &Host, result: i32) {
        self.resume.end(host, result, self.board.count());
    }
}

/// What memory of a task's CPUs is to be there before its queues start.
fn first(images: &Images, server: Option<&Server>, pid: i32) -> Answer<WaitScope> {
    if !server.is_some_and(Server::holds) {
        return Ok(WaitScope::All);
    }
    let Some(number) = streaming::number_in_image(pid) else { return Ok(WaitScope::All) };
    WaitScope::of(images.kfd.iter().map(|(_, image)| image).find(|image| image.pid == number))
}

/// The `/dev/kfd` of a process.
fn kfd_file(host: &Host, images: &Images, board: &SharedState, process: usize) -> Answer<OwnedFd> {
    let pid = images.kfd[process].1.pid;
    Ok(host.stored_fd(board.file(process, process, pid)?)?)
}
