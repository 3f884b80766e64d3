// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds what must be resident before each GPU of a process is resumed, where that differs between its GPUs.

use std::collections::BTreeSet;

use rewake_amdgpu_uapi::abi::kfd_ioctl_update_queue_args;
use rewake_amdgpu_uapi::criu::blob::{Private, Queue};
use rewake_criu_images::amdgpu::KfdImage;
use tracing::warn;

/// What the queues of one GPU of a process reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GpuReach {
    /// The GPU's name in the image.
    pub(super) gpu: u32,
    /// N of its `/dev/dri/renderDN`.
    pub(super) minor: u32,
    /// The GPU's own buffers, and those that are mapped on it, among the buffers that are loaded later.
    pub(super) buffers: BTreeSet<usize>,
    /// The queues that ran, with the settings to restore.
    pub(super) queues: Vec<QueueSettings>,
}

/// The settings of a queue in the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct QueueSettings {
    id: u32,
    ring: u64,
    ring_size: u32,
    percent: u32,
    priority: u32,
}

impl QueueSettings {
    /// Returns `None` for a queue that does not run: its ring or its percentage is 0.
    fn of(queue: &Queue) -> Option<Self> {
        let &Queue { id, ring, ring_size, percent, priority, .. } = queue;
        let ring_size = u32::try_from(ring_size).ok()?;
        (ring != 0 && percent != 0).then_some(Self { id, ring, ring_size, percent, priority })
    }

    /// Returns the argument of UPDATE_QUEUE that gives the queue its percentage, or 0.
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

/// Returns the reach of each of a process's GPUs that has queues; `gpus` are names in the image with their
/// N. Returns none where all GPUs reach the same, or where the driver's private record is not understood:
/// the GPUs are resumed together then. `later` says whether a buffer is loaded later.
pub(super) fn of(image: &KfdImage, gpus: &[(u32, u32)], later: impl Fn(usize) -> bool) -> Vec<GpuReach> {
    let counts = (image.gpus as usize, image.buffers.len(), image.objects as usize);
    let private = match Private::read(&image.private, counts.0, counts.1, counts.2) {
        Ok(private) => private,
        Err(error) => {
            warn!("all GPUs of process {} go on at once: {error}", image.pid);
            return Vec::new();
        }
    };
    let mut sets: Vec<GpuReach> = Vec::new();
    for &(gpu, minor) in gpus {
        let queues: Vec<QueueSettings> =
            private.queues().filter(|queue| queue.gpu == gpu).filter_map(QueueSettings::of).collect();
        let reaches = |number: &usize| {
            let is_its = image.buffers[*number].gpu_id == gpu;
            later(*number) && (is_its || private.bos()[*number].mapped().contains(&gpu))
        };
        let buffers = (0..image.buffers.len()).filter(reaches).collect();
        if !queues.is_empty() {
            sets.push(GpuReach { gpu, minor, buffers, queues });
        }
    }
    let all_known = private.queues().filter_map(|queue| QueueSettings::of(queue).map(|_| queue.gpu));
    let are_known = all_known.into_iter().all(|gpu| gpus.iter().any(|(name, _)| *name == gpu));
    let differ = sets.iter().any(|set| set.buffers != sets[0].buffers);
    if are_known && differ { sets } else { Vec::new() }
}

/// Returns the GPU ids that calls can contain: the process's names, and the driver's own on this machine, by
/// their N. Also returns whether both are equal for each GPU. The driver looks up some calls' buffers by its
/// own ids, so GPUs are resumed together where they differ.
pub(super) fn names(gpus: &[(u32, u32)], own: impl Fn(u32) -> Option<u32>) -> (Vec<u32>, bool) {
    let names = gpus.iter().flat_map(|(name, minor)| own(*minor).into_iter().chain([*name]));
    let names: BTreeSet<u32> = names.collect();
    let each = gpus.iter().all(|(name, minor)| own(*minor) == Some(*name));
    let alike = each && names.len() == gpus.len();
    (names.into_iter().collect(), alike)
}

#[cfg(test)]
mod tests {
    use rewake_amdgpu_uapi::criu::blob;
    use rewake_criu_images::amdgpu::KfdBuffer;

    use super::*;

    const GPUS: [(u32, u32); 2] = [(71, 128), (72, 129)];

    /// An image of two GPUs: buffers with their GPUs and those that they are mapped on, and a queue on each
    /// of `queues`.
    fn image(buffers: &[(u32, &[u32])], queues: &[u32]) -> KfdImage {
        let length = blob::PROCESS + 2 * blob::DEVICE + buffers.len() * blob::BO + queues.len() * blob::QUEUE;
        let mut blank = vec![0; length];
        blank[0] = 1;
        let mut private = Private::read(&blank, 2, buffers.len(), queues.len()).unwrap();
        for (bo, (_, mapped)) in private.bos_mut().iter_mut().zip(buffers) {
            bo.set_mapped(mapped).unwrap();
        }
        for (id, (queue, gpu)) in (0..).zip(private.queues_mut().zip(queues)) {
            (queue.id, queue.gpu, queue.ring, queue.ring_size) = (id, *gpu, 0x7000, 4096);
            (queue.percent, queue.priority) = (60, 7);
        }
        let buffer = |(gpu_id, _): &(u32, &[u32])| KfdBuffer { gpu_id: *gpu_id, ..KfdBuffer::default() };
        KfdImage {
            gpus: 2,
            buffers: buffers.iter().map(buffer).collect(),
            objects: u32::try_from(queues.len()).unwrap(),
            private: private.write(),
            ..KfdImage::default()
        }
    }

    /// The image, with its queues changed.
    fn with(mut image: KfdImage, change: impl FnMut(&mut Queue)) -> KfdImage {
        let (buffers, queues) = (image.buffers.len(), image.objects as usize);
        let mut private = Private::read(&image.private, 2, buffers, queues).unwrap();
        private.queues_mut().for_each(change);
        image.private = private.write();
        image
    }

    /// GPUs and their buffers.
    fn sets(image: &KfdImage, later: impl Fn(usize) -> bool) -> Vec<(u32, Vec<usize>)> {
        let sets = of(image, &GPUS, later).into_iter();
        sets.map(|set| (set.minor, set.buffers.into_iter().collect())).collect()
    }

    const NONE: [(u32, Vec<usize>); 0] = [];

    #[test]
    fn a_gpu_waits_for_its_own_buffers_and_for_those_that_are_mapped_on_it() {
        let image =
            image(&[(71, &[71]), (72, &[72]), (72, &[71, 72]), (71, &[]), (71, &[72])], &[71, 72, 71]);
        assert_eq!(sets(&image, |_| true), [(128, vec![0, 2, 3, 4]), (129, vec![1, 2, 4])]);
        let queues = of(&image, &GPUS, |_| true).into_iter().map(|set| set.queues);
        let ids = queues.map(|of| of.iter().map(|queue| queue.id).collect::<Vec<_>>());
        assert_eq!(ids.collect::<Vec<_>>(), [vec![0, 2], vec![1]]);
    }

    #[test]
    fn for_what_comes_before_none_waits() {
        let image = image(&[(71, &[71]), (72, &[72]), (72, &[71, 72])], &[71, 72]);
        assert_eq!(sets(&image, |buffer| buffer != 2), [(128, vec![0]), (129, vec![1])]);
        assert_eq!(sets(&image, |buffer| buffer == 0), [(128, vec![0]), (129, vec![])]);
        assert_eq!(sets(&image, |_| false), NONE, "none for anything");
    }

    #[test]
    fn gpus_that_wait_for_the_same_go_on_together() {
        let image = image(&[(71, &[71, 72]), (72, &[71, 72])], &[71, 72]);
        assert_eq!(sets(&image, |_| true), NONE);
    }

    #[test]
    fn a_gpu_whose_queues_did_not_run_has_nothing_to_be_kept_from() {
        let two = || image(&[(71, &[71]), (72, &[72])], &[71, 72]);
        assert_eq!(sets(&two(), |_| true).len(), 2);
        let stopped: [fn(&mut Queue); 2] = [|queue| queue.percent = 0, |queue| queue.ring = 0];
        for stop in stopped {
            let of_one = with(two(), |queue| {
                if queue.gpu == 72 {
                    stop(queue);
                }
            });
            assert_eq!(sets(&of_one, |_| true), NONE, "one alone goes on when all is there");
        }
    }

    #[test]
    fn what_is_not_understood_has_gpus_go_on_together() {
        let two = || image(&[(71, &[71]), (72, &[72])], &[71, 72]);
        let three = image(&[(71, &[71]), (72, &[72])], &[71, 72, 73]);
        assert_eq!(sets(&three, |_| true), NONE, "nobody knows what the third reaches");
        let mut cut = two();
        cut.private.pop();
        assert_eq!(sets(&cut, |_| true), NONE);
    }

    #[test]
    fn a_queue_is_given_its_share_of_time_or_none_and_is_else_as_it_was() {
        let sets = of(&image(&[(71, &[71]), (72, &[72])], &[71, 72]), &GPUS, |_| true);
        let told = |runs| {
            let of = sets[1].queues[0].argument(runs);
            (of.ring_base_address, of.queue_id, of.ring_size, of.queue_percentage, of.queue_priority)
        };
        assert_eq!([true, false].map(told), [(0x7000, 1, 4096, 60, 7), (0x7000, 1, 4096, 0, 7)]);
    }

    #[test]
    fn gpus_that_the_driver_calls_otherwise_go_on_together() {
        let own = |names: [u32; 2]| move |minor: u32| names.get(minor as usize - 128).copied();
        assert_eq!(names(&GPUS, own([71, 72])), (vec![71, 72], true));
        assert_eq!(names(&GPUS, own([71, 73])), (vec![71, 72, 73], false));
        assert_eq!(names(&GPUS, own([72, 71])), (vec![71, 72], false), "each the other's");
        assert_eq!(names(&GPUS, |_| None), (vec![71, 72], false), "it has none of that N");
    }
}
