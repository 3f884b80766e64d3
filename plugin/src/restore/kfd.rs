// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes a process's compute state in its task. Its queues start with [`super::resume`] only.

use std::collections::BTreeSet;
use std::os::fd::{AsFd as _, OwnedFd};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rewake_amdgpu_uapi::Kfd;
use rewake_amdgpu_uapi::abi::{
    KFD_INVALID_FD, KFD_IOC_ALLOC_MEM_FLAGS_AQL_QUEUE_MEM, call, kfd_criu_bo_bucket, kfd_criu_device_bucket,
};
use rewake_amdgpu_uapi::criu::blob::Queue;
use rewake_amdgpu_uapi::criu::queues::{QueueSupport, restored_by};
use rewake_amdgpu_uapi::criu::{self, Checkpoint};
use rewake_criu_images::amdgpu::{KfdBuffer, KfdImage, kfd_name};
use rewake_criu_plugin::{Answer, Host};

use super::Restore;
use super::gpu_assignment::gpus;
use super::shared_state::MmapOffset;
use crate::hsakmt;

#[derive(Debug, thiserror::Error)]
#[error(
    "process {pid} had {had} GPUs, and its task sees {sees}: the driver restores it only with as many; \
     choose them with the device cgroup"
)]
struct GpuCountMismatch {
    pid: u32,
    had: usize,
    sees: usize,
}

#[derive(Debug, thiserror::Error)]
#[error(
    "GPU {gpu:#x} of process {pid} was assigned to GPU {actual:#x}, which the task's device cgroup hides: \
     GPUs are assigned among those that CRIU sees, so start CRIU in the task's cgroup, as runc does"
)]
struct HiddenGpu {
    pid: u32,
    gpu: u32,
    actual: u32,
}

/// The kernel refused the state, usually with EINVAL.
#[derive(Debug, thiserror::Error)]
#[error("make the GPU state of process {pid} as {file} has it")]
struct RestoreFailure {
    pid: u32,
    file: String,
    #[source]
    source: rewake_amdgpu_uapi::Error,
}

/// The kernel answers EBUSY if an SDMA queue's number on the GPU is in use: it restores the same number only
/// (`create_queue_cpsch` in `kfd_device_queue_manager.c`).
#[derive(Debug, thiserror::Error)]
#[error(
    "make the GPU state of process {pid} as {file} has it: another process on that GPU has a copy engine \
     (SDMA) queue of the same number, and the driver restores that number only: restore it on another GPU, \
     or when that process has ended"
)]
struct SdmaQueueTaken {
    pid: u32,
    file: String,
    #[source]
    source: rewake_amdgpu_uapi::Error,
}

/// The kernel answers EINVAL: it compares the state's length with that of one XCC.
#[derive(Debug, thiserror::Error)]
#[error(
    "make the GPU state of process {pid} as {file} has it: its queues are spread over the {xccs} XCCs of GPU \
     {gpu:#x}, and this kernel refuses such queues; {}",
    restored_by()
)]
struct QueuesOfXccsRefused {
    pid: u32,
    file: String,
    gpu: u32,
    xccs: u64,
    #[source]
    source: rewake_amdgpu_uapi::Error,
}

impl Restore {
    /// Makes the state of the process `index` in this task, which is its own. [`super::loading`] fills its
    /// buffers.
    pub(super) fn restore_process(&mut self, host: &Host, index: usize) -> Answer {
        raise_limit_of_files()?;
        let kfd = Kfd::open()?;
        self.check_visible(&kfd, index)?;
        let renders = self.open_render_nodes(host, index)?;
        let image = &self.images.kfd[index].1;
        let imports = self.sharing.imports_of(index);
        let mut state = self.kernel_state(image, &renders, &imports)?;
        let (pid, file) = (image.pid, kfd_name(self.images.kfd[index].0));
        criu::restore(kfd.as_fd(), &mut state).map_err(
            |source| -> Box<dyn std::error::Error + Send + Sync> {
                match (source.errno(), self.queue_of_several_xccs(&state)) {
                    (Some(libc::EBUSY), _) => SdmaQueueTaken { pid, file, source }.into(),
                    (Some(libc::EINVAL), Some((gpu, xccs))) => {
                        QueuesOfXccsRefused { pid, file, gpu, xccs, source }.into()
                    }
                    _ => RestoreFailure { pid, file, source }.into(),
                }
            },
        )?;
        let mut made = state.bos.iter().zip(state.dmabufs);
        let mut dmabufs = Vec::new();
        for buffer in 0..image.buffers.len() {
            let own = if imports.contains(&buffer) { None } else { made.next() };
            if let Some((bo, _)) = &own {
                self.shared_state.put_buffer(index, buffer, MmapOffset::Offset(bo.restored_offset));
            }
            dmabufs.push(own.and_then(|(_, dmabuf)| dmabuf));
        }
        self.share_exports(host, index, &dmabufs)?;
        if !imports.is_empty() {
            self.import(host, index, kfd.as_fd())?;
        }
        self.shared_state.put_contents(index, Self::send_dmabufs(host, &dmabufs)?);
        hsakmt::recreate(image)?;
        self.share_kfd_files(host, index, &kfd)?;
        self.own = Some(index);
        self.shared_state.put_ready(index);
        Ok(())
    }

    /// Checks which GPUs the task sees. The kernel would answer EINVAL, as for many other reasons.
    fn check_visible(&self, kfd: &Kfd, index: usize) -> Answer {
        let image = &self.images.kfd[index].1;
        let pid = image.pid;
        let visible: Vec<u32> = kfd.apertures()?.iter().map(|gpu| gpu.gpu_id).collect();
        let (had, sees) = (gpus(image).count(), visible.len());
        if had != sees {
            return Err(GpuCountMismatch { pid, had, sees }.into());
        }
        for gpu in gpus(image) {
            let actual = self.assignment.of(gpu)?.actual;
            if !visible.contains(&actual) {
                return Err(HiddenGpu { pid, gpu: gpu.gpu_id, actual }.into());
            }
        }
        Ok(())
    }

    /// A GPU with several XCCs on which the state has a queue that the driver does not restore, and their
    /// number.
    fn queue_of_several_xccs(&self, state: &Checkpoint) -> Option<(u32, u64)> {
        let private = state.private().ok()?;
        let of = |queue: &Queue| {
            let bucket = state.devices.iter().find(|bucket| bucket.user_gpu_id == queue.gpu)?;
            let gpu = self.assignment.here(bucket.actual_gpu_id)?;
            (queue.is_spread(gpu.xccs) && gpu.queues != QueueSupport::Restored)
                .then_some((gpu.actual, gpu.xccs))
        };
        private.queues().find_map(of)
    }

    /// Opens the process's render nodes, in the image's order of GPUs.
    fn open_render_nodes(&mut self, host: &Host, index: usize) -> Answer<Vec<OwnedFd>> {
        let mut renders = Vec::new();
        for node in 0..self.images.kfd[index].1.nodes.len() {
            let properties = self.images.kfd[index].1.nodes[node].properties;
            if properties.gpu_id != 0 {
                let gpu = self.assignment.of(&properties)?;
                let stored = self.render_node(host, gpu.actual, gpu.minor)?;
                self.shared_state.put_render(index, node, stored);
                renders.push(host.stored_fd(stored)?);
            }
        }
        Ok(renders)
    }

    /// Stores the process's open `/dev/kfd`s for the tasks that CRIU restores them in.
    fn share_kfd_files(&self, host: &Host, index: usize, kfd: &Kfd) -> Answer {
        self.shared_state.put_file(index, host.store_fd(kfd.as_fd())?);
        for (second, (_, process)) in self.sharing.second_files.iter().enumerate() {
            if *process == index {
                let file = self.images.kfd.len() + second;
                self.shared_state.put_file(file, host.store_fd(Kfd::open()?.as_fd())?);
            }
        }
        Ok(())
    }

    /// Returns the state for the kernel: all but the imported buffers.
    fn kernel_state(
        &self,
        image: &KfdImage,
        renders: &[OwnedFd],
        imports: &BTreeSet<usize>,
    ) -> Answer<Checkpoint> {
        let mut devices = Vec::new();
        for (gpu, render) in gpus(image).zip(renders) {
            devices.push(kfd_criu_device_bucket {
                user_gpu_id: gpu.gpu_id,
                actual_gpu_id: self.assignment.of(gpu)?.actual,
                drm_fd: call::number(render.as_fd()),
                pad: 0,
            });
        }
        let mut state = Checkpoint {
            devices,
            bos: image.buffers.iter().map(bucket).collect(),
            private: image.private.clone(),
            objects: image.objects,
            dmabufs: Vec::new(),
        };
        if !imports.is_empty() {
            let mut private = state.private()?;
            private.retain_bos(|buffer| !imports.contains(&buffer));
            let mut index = 0..;
            state.bos.retain(|_| index.next().is_some_and(|buffer: usize| !imports.contains(&buffer)));
            state.private = private.write();
        }
        Ok(state)
    }

    /// Returns this task's open render node of a GPU, by its id in CRIU's store. A task has one for all
    /// mappings: the driver lets a process map buffers only through the file that it restored them with.
    pub(super) fn render_node(&mut self, host: &Host, gpu: u32, minor: u32) -> Answer<i32> {
        if let Some(stored) = self.render_nodes.get(&gpu) {
            return Ok(*stored);
        }
        let stored = host.store_fd(self.machine_nodes.open(minor)?.as_fd())?;
        self.render_nodes.insert(gpu, stored);
        Ok(stored)
    }
}

/// Raises the soft limit of open files. CRIU opens the file of each mapping before it maps the first one, and
/// may lack the right to raise the limit. It restores the task's own limit at the end.
fn raise_limit_of_files() -> Answer {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?)
}

fn bucket(buffer: &KfdBuffer) -> kfd_criu_bo_bucket {
    // The kernel halves the size in the call: it maps such a buffer twice in a row (`amdgpu_amdkfd_gpuvm.c`).
    // The image has the halved size.
    let twice = buffer.alloc_flags & KFD_IOC_ALLOC_MEM_FLAGS_AQL_QUEUE_MEM != 0;
    kfd_criu_bo_bucket {
        addr: buffer.address,
        size: if twice { buffer.size.saturating_mul(2) } else { buffer.size },
        offset: buffer.offset,
        restored_offset: 0,
        gpu_id: buffer.gpu_id,
        alloc_flags: buffer.alloc_flags,
        dmabuf_fd: KFD_INVALID_FD,
        pad: 0,
    }
}
