// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process's compute state, made anew in its task. Nothing runs before [`super::resume`].

use std::collections::BTreeSet;
use std::os::fd::{AsFd as _, OwnedFd};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rewake_amdgpu_uapi::Kfd;
use rewake_amdgpu_uapi::abi::{
    KFD_INVALID_FD, KFD_IOC_ALLOC_MEM_FLAGS_AQL_QUEUE_MEM, call, kfd_criu_bo_bucket, kfd_criu_device_bucket,
};
use rewake_amdgpu_uapi::criu::{self, Image};
use rewake_amdgpu_uapi::render::Render;
use rewake_criu_images::amdgpu::{KfdBuffer, KfdImage, kfd_name};
use rewake_criu_plugin::{Answer, Host};

use super::Restore;
use super::gpu_assignment::gpus;
use super::shared_state::MmapOffset;
use crate::hsakmt;

#[derive(Debug, thiserror::Error)]
#[error(
    "process {pid} had {had} GPUs, and its task sees {sees}: the driver restores it with as many only; choose them by the \
     device cgroup"
)]
struct Visible {
    pid: u32,
    had: usize,
    sees: usize,
}

/// The kernel seldom says more than EINVAL.
#[derive(Debug, thiserror::Error)]
#[error("make the GPU state of process {pid} as {file} has it")]
struct Unmade {
    pid: u32,
    file: String,
    #[source]
    source: rewake_amdgpu_uapi::Error,
}

/// What it says of numbers of copy engines' queues, which it gives back exactly (`create_queue_cpsch` of
/// `kfd_device_queue_manager.c`).
#[derive(Debug, thiserror::Error)]
#[error(
    "make the GPU state of process {pid} as {file} has it: a queue of a copy engine (SDMA) has the number that it had, of another process on that \
     GPU, and the driver gives back the same only: restore it on another GPU, or when that process has ended"
)]
struct Engaged {
    pid: u32,
    file: String,
    #[source]
    source: rewake_amdgpu_uapi::Error,
}

impl Restore {
    /// Makes the state of the process `index` in this task, which is its own; see [`super::loading`] for what is
    /// in its buffers.
    pub(super) fn process(&mut self, host: &Host, index: usize) -> Answer {
        raise_limit_of_files()?;
        let kfd = Kfd::open()?;
        self.check_visible(&kfd, index)?;
        let renders = self.renders(host, index)?;
        let image = &self.images.kfd[index].1;
        let imports = self.sharing.imports_of(index);
        let mut state = self.state(image, &renders, &imports)?;
        let (pid, file) = (image.pid, kfd_name(self.images.kfd[index].0));
        criu::restore(kfd.as_fd(), &mut state).map_err(
            |source| -> Box<dyn std::error::Error + Send + Sync> {
                match source.errno() {
                    Some(libc::EBUSY) => Engaged { pid, file, source }.into(),
                    _ => Unmade { pid, file, source }.into(),
                }
            },
        )?;
        let mut made = state.bos.iter().zip(state.dmabufs);
        let mut dmabufs = Vec::new();
        for buffer in 0..image.buffers.len() {
            let own = if imports.contains(&buffer) { None } else { made.next() };
            if let Some((bo, _)) = &own {
                self.board.put_buffer(index, buffer, MmapOffset::Offset(bo.restored_offset));
            }
            dmabufs.push(own.and_then(|(_, dmabuf)| dmabuf));
        }
        self.show(host, index, &dmabufs)?;
        if !imports.is_empty() {
            self.import(host, index, kfd.as_fd())?;
        }
        self.board.put_contents(index, Self::hand_over(host, &dmabufs)?);
        hsakmt::put_back(image)?;
        self.put_files(host, index, &kfd)?;
        self.own = Some(index);
        self.board.made(index);
        Ok(())
    }

    /// The kernel's own answer would be EINVAL, as to many other questions.
    fn check_visible(&self, kfd: &Kfd, index: usize) -> Answer {
        let image = &self.images.kfd[index].1;
        let (had, sees) = (gpus(image).count(), kfd.apertures()?.len());
        if had == sees { Ok(()) } else { Err(Visible { pid: image.pid, had, sees }.into()) }
    }

    /// The process's render nodes, in the image's order of GPUs.
    fn renders(&mut self, host: &Host, index: usize) -> Answer<Vec<OwnedFd>> {
        let mut renders = Vec::new();
        for node in 0..self.images.kfd[index].1.nodes.len() {
            let properties = self.images.kfd[index].1.nodes[node].properties;
            if properties.gpu_id != 0 {
                let place = self.places.of(&properties)?;
                let stored = self.render_node(host, place.actual, place.minor)?;
                self.board.put_render(index, node, stored);
                renders.push(host.stored_fd(stored)?);
            }
        }
        Ok(renders)
    }

    /// Puts the process's files of `/dev/kfd` where CRIU's questions for them find them.
    fn put_files(&self, host: &Host, index: usize, kfd: &Kfd) -> Answer {
        self.board.put_file(index, host.store_fd(kfd.as_fd())?);
        for (second, (_, process)) in self.sharing.second_files.iter().enumerate() {
            if *process == index {
                let file = self.images.kfd.len() + second;
                self.board.put_file(file, host.store_fd(Kfd::open()?.as_fd())?);
            }
        }
        Ok(())
    }

    /// What the kernel is told: everything but the buffers that are imported.
    fn state(&self, image: &KfdImage, renders: &[OwnedFd], imports: &BTreeSet<usize>) -> Answer<Image> {
        let mut devices = Vec::new();
        for (gpu, render) in gpus(image).zip(renders) {
            devices.push(kfd_criu_device_bucket {
                user_gpu_id: gpu.gpu_id,
                actual_gpu_id: self.places.of(gpu)?.actual,
                drm_fd: call::number(render.as_fd()),
                pad: 0,
            });
        }
        let mut state = Image {
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

    /// This task's open render node of a GPU, by its id in CRIU's store. The driver lets a process map its buffers through
    /// the file that it restored them with only, so that all of a task's are this one.
    pub(super) fn render_node(&mut self, host: &Host, gpu: u32, minor: u32) -> Answer<i32> {
        if let Some(stored) = self.render.get(&gpu) {
            return Ok(*stored);
        }
        let stored = host.store_fd(Render::open(minor)?.as_fd())?;
        self.render.insert(gpu, stored);
        Ok(stored)
    }
}

/// CRIU opens the file of each mapping before it maps the first one, and not always may it raise the limit. The task gets back what
/// it had when CRIU is done.
fn raise_limit_of_files() -> Answer {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?)
}

fn bucket(buffer: &KfdBuffer) -> kfd_criu_bo_bucket {
    // The kernel halves what it is asked for: such a buffer is mapped twice in a row (`amdgpu_amdkfd_gpuvm.c`). Its image
    // has the halved size.
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
