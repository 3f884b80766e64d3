// SPDX-License-Identifier: MIT OR Apache-2.0
//! What must be there before each GPU of a process goes on, where that is not the same for all.

use std::collections::BTreeSet;

use rewake_criu_images::amdgpu::KfdImage;
use rewake_kfd::abi::kfd_ioctl_update_queue_args;
use rewake_kfd::criu::blob::{Private, Queue};
use tracing::warn;

/// A GPU of a process with queues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Set {
    /// Its name in the image.
    pub(super) gpu: u32,
    /// N of its `/dev/dri/renderDN`.
    pub(super) minor: u32,
    /// Buffers of its own, and those that are mapped on it, among those that come later.
    pub(super) buffers: BTreeSet<usize>,
    /// Those that ran, as they are to be again.
    pub(super) queues: Vec<Share>,
}

/// A queue as the image has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Share {
    id: u32,
    ring: u64,
    ring_size: u32,
    percent: u32,
    priority: u32,
}

impl Share {
    /// None if it does not run: its ring or its share of time is nothing.
    fn of(queue: &Queue) -> Option<Self> {
        let &Queue { id, ring, ring_size, percent, priority, .. } = queue;
        let ring_size = u32::try_from(ring_size).ok()?;
        (ring != 0 && percent != 0).then_some(Self { id, ring, ring_size, percent, priority })
    }

    /// What gives it its time, or none of it.
    pub(super) fn argument(&self, runs: bool) -> kfd_ioctl_update_queue_args {
        kfd_ioctl_update_queue_args {
            ring_base_address: self.ring,
            queue_id: self.id,
            ring_size: self.ring_size,
            queue_percentage: if runs { self.percent } else { 0 },
            queue_priority: self.priority,
        }
    }
}

/// A process's GPUs with queues, of those that the image names so, with their N. None where all wait for the same, and where the driver's own
/// record is not understood: then they go on together. `later`: whether a buffer comes later.
pub(super) fn of(image: &KfdImage, gpus: &[(u32, u32)], later: impl Fn(usize) -> bool) -> Vec<Set> {
    let counts = (image.gpus as usize, image.buffers.len(), image.objects as usize);
    let private = match Private::read(&image.private, counts.0, counts.1, counts.2) {
        Ok(private) => private,
        Err(error) => {
            warn!("all GPUs of process {} go on at once: {error}", image.pid);
            return Vec::new();
        }
    };
    let mut sets: Vec<Set> = Vec::new();
    for &(gpu, minor) in gpus {
        let queues: Vec<Share> =
            private.queues().filter(|queue| queue.gpu == gpu).filter_map(Share::of).collect();
        let reaches = |number: &usize| {
            let is_its = image.buffers[*number].gpu_id == gpu;
            later(*number) && (is_its || private.bos()[*number].mapped().contains(&gpu))
        };
        let buffers = (0..image.buffers.len()).filter(reaches).collect();
        if !queues.is_empty() {
            sets.push(Set { gpu, minor, buffers, queues });
        }
    }
    let all_known = private.queues().filter_map(|queue| Share::of(queue).map(|_| queue.gpu));
    let are_known = all_known.into_iter().all(|gpu| gpus.iter().any(|(name, _)| *name == gpu));
    let differ = sets.iter().any(|set| set.buffers != sets[0].buffers);
    if are_known && differ { sets } else { Vec::new() }
}
