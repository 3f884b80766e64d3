// SPDX-License-Identifier: MIT OR Apache-2.0
//! Plans which buffers a streamer loads in the background. The plan is made before a task exists, so that all
//! tasks have it.
//!
//! A buffer is lazy if a CPU can access none of its mappings, or if a placeholder can replace each of them:
//! mappings of the process itself that are shared and not inherited by children
//! (`docs/decisions/0010-placeholders.md`). All other buffers are loaded before a task runs.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::path::Path;

use rewake_amdgpu_uapi::abi::memory::PAGE;
use rewake_criu_images::amdgpu::KfdImage;
use rewake_criu_images::{ImageDir, Vma};
use rewake_criu_plugin::{Answer, Host};

use super::cpu_mappings::{BackingDevice, CpuMappings, FilePaths};
use super::gpu_assignment::gpus;
use super::shared::Sharing;
use crate::buffers::{Buffers, gpu_of_minor, minors_of};
use crate::image::{FOLDER, reopen};

/// PROT_READ, PROT_WRITE, and PROT_EXEC, with which a CPU can read, too.
const CPU_ACCESS: u32 = 7;
/// Mapped buffers below this size are not lazy. To swap a placeholder stops the process for half a
/// millisecond, and a copy engine fills as many bytes in that time.
const MIN_PLACEHOLDER: u64 = 2 << 20;

/// The plan for all processes.
#[derive(Debug)]
pub(super) struct LazyBufferPlan(Vec<ProcessPlan>);

#[derive(Debug)]
struct ProcessPlan {
    /// For each buffer of the image: whether it is lazy, and its start in the placeholders' file.
    buffers: Vec<(bool, u64)>,
    /// The length of that file in bytes.
    length: u64,
    /// Mappings that placeholders replace if their buffer is lazy, sorted by address.
    mappings: Vec<Vma>,
}

/// A mapping and the placeholder that replaces it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Placeholder {
    /// The mapping's index in [`LazyBufferPlan::mappings`].
    pub(super) number: usize,
    /// The placeholder's start in the file.
    pub(super) offset: u64,
}

impl LazyBufferPlan {
    /// Returns the plan without a streamer: no buffer is lazy.
    pub(super) fn eager(images: &[(u32, KfdImage)]) -> Self {
        let of = |image: &KfdImage| ProcessPlan {
            buffers: vec![(false, 0); image.buffers.len()],
            length: 0,
            mappings: Vec::new(),
        };
        Self(images.iter().map(|(_, image)| of(image)).collect())
    }

    /// Returns the plan with a streamer.
    pub(super) fn of(
        host: &Host,
        images: &[(u32, KfdImage)],
        buffers: &[Buffers],
        sharing: &Sharing,
    ) -> Answer<Self> {
        let uffd = rewake_uffd::open_unnegotiated();
        if let Err(error) = &uffd {
            host.warn(format_args!(
                "userfaultfd: {error}: buffers that CPUs can access are loaded before the processes run"
            ));
        }
        let mappings = RenderMappings::of(host.image_dir()?, uffd.is_ok())?;
        let of = |(index, ((_, image), buffers)): (usize, (&(u32, KfdImage), &Buffers))| {
            let (exports, imports) = (sharing.exports_of(index), sharing.imports_of(index));
            let is_elsewhere = |buffer| exports.contains(&buffer) || imports.contains(&buffer);
            mappings.of_process(image, buffers, is_elsewhere)
        };
        Ok(Self(images.iter().zip(buffers).enumerate().map(of).collect()))
    }

    /// Returns whether a buffer is lazy.
    pub(super) fn is_lazy(&self, process: usize, buffer: usize) -> bool {
        self.0[process].buffers[buffer].0
    }

    /// Returns the length of a process's placeholder file in bytes.
    pub(super) fn length(&self, process: usize) -> u64 {
        self.0[process].length
    }

    /// Returns the mappings of a process that placeholders may replace.
    pub(super) fn mappings(&self, process: usize) -> &[Vma] {
        &self.0[process].mappings
    }

    /// Returns the placeholder for the mapping at `address`. The mapping starts at `within` in a buffer of
    /// the same process.
    pub(super) fn placeholder(
        &self,
        process: usize,
        buffer: usize,
        address: u64,
        within: u64,
    ) -> Option<Placeholder> {
        let of = &self.0[process];
        let (is_lazy, base) = of.buffers[buffer];
        let number = of.mappings.binary_search_by_key(&address, |vma| vma.start).ok().filter(|_| is_lazy)?;
        Some(Placeholder { number, offset: base + within })
    }
}

/// The mappings of render nodes that a CPU can access, in all tasks of the image.
struct RenderMappings {
    /// Mappings of each task by its pid, sorted by address.
    tasks: BTreeMap<u32, Vec<(BackingDevice, Vma)>>,
    cpu_mappings: CpuMappings,
}

impl RenderMappings {
    /// Reads the mappings from the image.
    fn of(folder: BorrowedFd<'_>, may_be_placeholders: bool) -> Answer<Self> {
        let images = ImageDir::of(reopen(folder)?, Path::new(FOLDER))?;
        let files = images.files()?;
        let mut tasks = BTreeMap::new();
        for task in images.tasks()?.iter().filter(|task| task.state.has_memory()) {
            tasks.insert(task.pid, images.mm(task.pid)?.vmas);
        }
        Ok(Self::sorted(tasks, &files, may_be_placeholders))
    }

    fn sorted(tasks: BTreeMap<u32, Vec<Vma>>, files: &FilePaths, may_be_placeholders: bool) -> Self {
        let of_buffers = |vma: &Vma| BackingDevice::of(vma, files).filter(|_| vma.prot & CPU_ACCESS != 0);
        let with_files = |vmas: Vec<Vma>| {
            vmas.into_iter().filter_map(|vma| Some((of_buffers(&vma)?, vma))).collect::<Vec<_>>()
        };
        let tasks: BTreeMap<u32, Vec<(BackingDevice, Vma)>> =
            tasks.into_iter().map(|(pid, vmas)| (pid, with_files(vmas))).collect();
        let is_replaceable = |vma: &Vma| may_be_placeholders && vma.is_shared() && vma.is_dontfork();
        let all = tasks.iter().flat_map(|(pid, vmas)| {
            vmas.iter().map(|(device, vma)| (*device, vma, Some(*pid).filter(|_| is_replaceable(vma))))
        });
        let cpu_mappings = CpuMappings::of(all);
        Self { tasks, cpu_mappings }
    }

    fn of_process(
        &self,
        image: &KfdImage,
        buffers: &Buffers,
        is_elsewhere: impl Fn(usize) -> bool,
    ) -> ProcessPlan {
        let mut of = ProcessPlan { buffers: Vec::new(), length: 0, mappings: Vec::new() };
        for (number, buffer) in image.buffers.iter().enumerate() {
            let offsets = buffer.offset..buffer.offset.saturating_add(buffer.size);
            let task = Some(image.pid).filter(|_| buffer.size >= MIN_PLACEHOLDER);
            let mut device = minors_of(image, buffer.gpu_id)
                .map(BackingDevice::Node)
                .chain(std::iter::once(BackingDevice::Unknown));
            let is_lazy = !is_elsewhere(number)
                && device.all(|device| self.cpu_mappings.has_only_placeholders(device, &offsets, task));
            of.buffers.push((is_lazy, of.length));
            of.length += buffer.size.next_multiple_of(PAGE);
        }
        let is_lazy =
            |gpu_id: u32, offset: u64| buffers.at(gpu_id, offset).is_some_and(|buffer| of.buffers[buffer].0);
        let own = self.tasks.get(&image.pid).into_iter().flatten();
        let placeholders = own.filter(|(device, vma)| match device {
            BackingDevice::Node(minor) => {
                gpu_of_minor(image, *minor).is_some_and(|(_, gpu_id)| is_lazy(gpu_id, vma.offset))
            }
            BackingDevice::Unknown => gpus(image).any(|gpu| is_lazy(gpu.gpu_id, vma.offset)),
        });
        of.mappings = placeholders.map(|(_, vma)| *vma).collect();
        of
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use nix::time::{ClockId, clock_gettime};
    use rewake_criu_images::amdgpu::{KfdBuffer, NodeImage, Properties};

    use super::*;

    const OWN: u32 = 7;
    const SHARED: u32 = 1;
    const FILE: u32 = 1 << 7;
    const DONTFORK: u64 = 1 << 10;
    /// Ids of files.
    const NODE: u64 = 1;
    const OTHER_NODE: u64 = 2;
    const WEIGHTS: u64 = 3;

    /// With this number, a search of all mappings for each of them takes minutes.
    const MANY: u64 = 200_000;
    /// Far more than one pass over them takes.
    const SOON: Duration = Duration::from_secs(5);

    /// The CPU time of this thread: other threads' work does not count.
    fn cpu_time() -> Duration {
        clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().into()
    }

    /// A mapping of [`NODE`].
    fn vma(start: u64, pages: u64, offset: u64) -> Vma {
        let end = start + pages * PAGE;
        Vma { start, end, prot: 3, flags: SHARED, status: FILE, offset, object: NODE, advice: DONTFORK }
    }

    /// A process with buffers of these GPUs (1 or 2), offsets and sizes.
    fn image_of(buffers: impl Iterator<Item = (u32, u64, u64)>) -> KfdImage {
        let buffer = |(gpu_id, offset, size)| KfdBuffer { gpu_id, offset, size, ..KfdBuffer::default() };
        let gpu = |(gpu_id, drm_render_minor)| {
            let properties = Properties { gpu_id, drm_render_minor, ..Properties::default() };
            NodeImage { properties, links: Vec::new() }
        };
        let nodes = [(0, 0), (1, 128), (2, 129)].map(gpu).to_vec();
        KfdImage { pid: OWN, nodes, buffers: buffers.map(buffer).collect(), ..KfdImage::default() }
    }

    /// A process with two adjacent buffers of 4 MiB, and one of a page.
    fn image() -> KfdImage {
        let all = [(1, 1 << 32, 4 << 20), (1, (1 << 32) + (4 << 20), 4 << 20), (1, 1 << 33, PAGE)];
        image_of(all.into_iter())
    }

    fn plan_of(image: &KfdImage, tasks: &[(u32, &[Vma])], files: &FilePaths) -> LazyBufferPlan {
        let tasks = tasks.iter().map(|(pid, vmas)| (*pid, vmas.to_vec())).collect();
        let mappings = RenderMappings::sorted(tasks, files, true);
        LazyBufferPlan(vec![mappings.of_process(image, &Buffers::of(image), |_| false)])
    }

    fn files() -> FilePaths {
        let paths =
            [(1, "/dev/dri/renderD128"), (2, "/jail/dev/dri/renderD129"), (3, "/srv/weights.safetensors")];
        Some(paths.map(|(id, path)| (id, Some(PathBuf::from(path)))).into())
    }

    fn plan(tasks: &[(u32, &[Vma])]) -> LazyBufferPlan {
        plan_of(&image(), tasks, &files())
    }

    fn lazy(plan: &LazyBufferPlan) -> [bool; 3] {
        [0, 1, 2].map(|buffer| plan.is_lazy(0, buffer))
    }

    #[test]
    fn a_buffer_without_cpu_access_is_lazy() {
        assert_eq!(lazy(&plan(&[])), [true; 3]);
        let no_access = Vma { prot: 0, advice: 0, ..vma(0x10_0000, 2048, 1 << 32) };
        assert_eq!(lazy(&plan(&[(OWN, &[no_access])])), [true; 3]);
        let executed = Vma { prot: 4, ..no_access };
        assert_eq!(lazy(&plan(&[(OWN, &[executed])])), [false, false, true]);
    }

    #[test]
    fn a_mapping_of_the_process_itself_becomes_a_placeholder() {
        let plan = plan(&[(OWN, &[vma(0x10_0000, 16, (1 << 32) + (4 << 20) + PAGE)])]);
        assert_eq!(lazy(&plan), [true; 3]);
        let first = Some(Placeholder { number: 0, offset: (4 << 20) + PAGE });
        assert_eq!(plan.placeholder(0, 1, 0x10_0000, PAGE), first);
        assert_eq!(plan.placeholder(0, 1, 0x10_1000, PAGE), None, "nothing begins there");
        assert_eq!(plan.length(0), (8 << 20) + PAGE);
    }

    #[test]
    fn a_buffer_with_an_irreplaceable_mapping_is_not_lazy() {
        let at = vma(0x10_0000, 16, 1 << 32);
        let cases = [
            (OWN, Vma { advice: 0, ..at }, "a child would have it"),
            (OWN, Vma { flags: 2, ..at }, "private"),
            (OWN, vma(0x10_0000, 1025, 1 << 32), "of two buffers"),
            (OWN + 1, at, "another process's"),
        ];
        for (pid, vma, why) in cases {
            let plan = plan(&[(pid, &[vma])]);
            assert!(!plan.is_lazy(0, 0), "{why}");
            assert_eq!(plan.placeholder(0, 0, 0x10_0000, 0), None, "{why}");
        }
        assert_eq!(lazy(&plan(&[(OWN, &[vma(0x10_0000, 1, 1 << 33)])])), [true, true, false], "small");
    }

    #[test]
    fn a_file_mapped_at_a_buffer_s_offset_does_not_count() {
        // Weights, mapped as a whole, and a piece of them that looks like one of the first buffer.
        let weights = Vma { object: WEIGHTS, advice: 0, ..vma(0x10_0000, 4 << 20, 0) };
        let piece = Vma { object: WEIGHTS, ..vma(0x8_0000_0000, 16, 1 << 32) };
        let plan = plan(&[(OWN, &[weights, piece])]);
        assert_eq!(lazy(&plan), [true; 3]);
        assert!(plan.mappings(0).is_empty(), "{:?}", plan.mappings(0));
    }

    #[test]
    fn a_mapping_of_an_unknown_file_may_be_one_of_each_gpu() {
        let image =
            image_of([(1, 1 << 32, 4 << 20), (2, 1 << 32, 4 << 20), (2, 1 << 33, 4 << 20)].into_iter());
        let child_has_it = [Vma { advice: 0, ..vma(0x10_0000, 16, 1 << 32) }];
        assert_eq!(lazy(&plan_of(&image, &[(OWN, &child_has_it)], &None)), [false, false, true]);
        // As a placeholder: it may have page faults.
        let plan = plan_of(&image, &[(OWN, &[vma(0x10_0000, 16, 1 << 32)])], &None);
        assert_eq!((lazy(&plan), plan.mappings(0).len()), ([true; 3], 1));
    }

    #[test]
    fn gpus_with_the_same_offsets_are_separated_by_their_nodes() {
        let image = image_of([(1, 1 << 32, 4 << 20), (2, 1 << 32, 4 << 20), (2, 1 << 33, PAGE)].into_iter());
        let private = Vma { object: OTHER_NODE, flags: 2, ..vma(0x10_0000, 16, 1 << 32) };
        let own = vma(0x20_0000, 16, 1 << 32);
        let plan = plan_of(&image, &[(OWN, &[private, own])], &files());
        assert_eq!(lazy(&plan), [true, false, true]);
        assert_eq!(plan.mappings(0), [own]);
        assert_eq!(plan.placeholder(0, 0, 0x20_0000, 0), Some(Placeholder { number: 0, offset: 0 }));
        assert_eq!(plan.placeholder(0, 1, 0x10_0000, 0), None);
    }

    #[test]
    fn many_mappings_of_as_many_buffers_are_planned_quickly() {
        let offset = |number: u64| (1 << 32) + number * MIN_PLACEHOLDER;
        let image = image_of((0..MANY).map(|number| (1, offset(number), MIN_PLACEHOLDER)));
        let own: Vec<Vma> =
            (0..MANY).map(|number| vma((number + 1) << 32, 2, offset(MANY - 1 - number))).collect();
        let start = cpu_time();
        let plan = plan_of(&image, &[(OWN, &own)], &files());
        let took = cpu_time() - start;
        assert!((0..image.buffers.len()).all(|buffer| plan.is_lazy(0, buffer)));
        assert!(plan.mappings(0) == own, "{} mappings", plan.mappings(0).len());
        assert!(took < SOON, "{took:?}");
    }

    #[test]
    fn many_mappings_of_each_buffer_are_planned_quickly() {
        // All buffers have one offset. It is mapped, and lies within mappings of files that the image does
        // not name.
        let image = image_of((0..MANY).map(|_| (1, 1 << 32, MIN_PLACEHOLDER)));
        let unnamed = |number: u64| Vma { object: 4, ..vma((number + 1) << 40, 1 << 21, 0) };
        let own = |number: u64| vma((MANY + number + 1) << 40, 1, 1 << 32);
        let all: Vec<Vma> = (0..MANY).map(unnamed).chain((0..MANY).map(own)).collect();
        let start = cpu_time();
        let plan = plan_of(&image, &[(OWN, &all)], &files());
        let took = cpu_time() - start;
        assert!((0..image.buffers.len()).all(|buffer| !plan.is_lazy(0, buffer)));
        assert!(took < SOON, "{took:?}");
    }
}
