// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which memory may come later, with a page server: known before a task exists, so that all of them know it.
//!
//! A buffer may if every mapping of it is one that a CPU cannot use, or one that a placeholder takes the place of: the process's own,
//! shared, not for children (`docs/decisions/0010-placeholders.md`). All others come before a task runs.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::path::Path;

use rewake_amdgpu_uapi::abi::memory::PAGE;
use rewake_criu_images::amdgpu::KfdImage;
use rewake_criu_images::{ImageDir, Vma};
use rewake_criu_plugin::{Answer, Host};

use super::cpu_mappings::{BackingDevice, CpuMappings, Files};
use super::gpu_assignment::gpus;
use super::shared::Sharing;
use crate::buffers::{Buffers, gpu_of_minor, minors_of};
use crate::image::{FOLDER, again};

/// PROT_READ, PROT_WRITE and PROT_EXEC, which lets a CPU read, too.
const REACHED: u32 = 7;
/// Mapped buffers that are smaller come before the process runs: to put the device in a placeholder's place stops the process for half a
/// millisecond, and a copy engine fills as much in that time.
const WORTH_IT: u64 = 2 << 20;

/// Of all processes.
#[derive(Debug)]
pub(super) struct LazyPlan(Vec<OfProcess>);

#[derive(Debug)]
struct OfProcess {
    /// By the image's number of the buffer: whether it may come later, and where it begins in the placeholders' file.
    buffers: Vec<(bool, u64)>,
    /// Bytes of that file.
    length: u64,
    /// Mappings that placeholders take the place of, if the buffer is one that comes later; by address.
    mappings: Vec<Vma>,
}

/// A mapping's place among its process's, and the placeholder in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Placeholder {
    /// Among [`LazyPlan::mappings`].
    pub(super) number: usize,
    /// Where it begins in the file.
    pub(super) offset: u64,
}

impl LazyPlan {
    /// Without a page server.
    pub(super) fn nothing(images: &[(u32, KfdImage)]) -> Self {
        let of = |image: &KfdImage| OfProcess {
            buffers: vec![(false, 0); image.buffers.len()],
            length: 0,
            mappings: Vec::new(),
        };
        Self(images.iter().map(|(_, image)| of(image)).collect())
    }

    /// With one.
    pub(super) fn of(
        host: &Host,
        images: &[(u32, KfdImage)],
        buffers: &[Buffers],
        sharing: &Sharing,
    ) -> Answer<Self> {
        let uffd = rewake_uffd::open_unnegotiated();
        if let Err(error) = &uffd {
            host.warn(format_args!("userfaultfd: {error}: what CPUs reach comes before the processes run"));
        }
        let mappings = Mappings::of(host.image_dir()?, uffd.is_ok())?;
        let of = |(index, ((_, image), buffers)): (usize, (&(u32, KfdImage), &Buffers))| {
            let (exports, imports) = (sharing.exports_of(index), sharing.imports_of(index));
            let is_elsewhere = |buffer| exports.contains(&buffer) || imports.contains(&buffer);
            mappings.of_process(image, buffers, is_elsewhere)
        };
        Ok(Self(images.iter().zip(buffers).enumerate().map(of).collect()))
    }

    /// Whether a buffer comes later.
    pub(super) fn has(&self, process: usize, buffer: usize) -> bool {
        self.0[process].buffers[buffer].0
    }

    /// Bytes of a process's file of placeholders.
    pub(super) fn length(&self, process: usize) -> u64 {
        self.0[process].length
    }

    /// Mappings of a process that may be placeholders.
    pub(super) fn mappings(&self, process: usize) -> &[Vma] {
        &self.0[process].mappings
    }

    /// What takes the place of the mapping at `address`, which shows a buffer of the same process from `within` on.
    pub(super) fn placeholder(
        &self,
        process: usize,
        buffer: usize,
        address: u64,
        within: u64,
    ) -> Option<Placeholder> {
        let of = &self.0[process];
        let (later, base) = of.buffers[buffer];
        let number = of.mappings.binary_search_by_key(&address, |vma| vma.start).ok().filter(|_| later)?;
        Some(Placeholder { number, offset: base + within })
    }
}

/// Where CPUs reach the render nodes, in all tasks of the image.
struct Mappings {
    /// By the tasks' numbers; of each by address.
    tasks: BTreeMap<u32, Vec<(BackingDevice, Vma)>>,
    reached: CpuMappings,
}

impl Mappings {
    /// Read from the image.
    fn of(folder: BorrowedFd<'_>, may_be_placeholders: bool) -> Answer<Self> {
        let images = ImageDir::of(again(folder)?, Path::new(FOLDER))?;
        let files = images.files()?;
        let mut tasks = BTreeMap::new();
        for task in images.tasks()?.iter().filter(|task| task.state.has_memory()) {
            tasks.insert(task.pid, images.mm(task.pid)?.vmas);
        }
        Ok(Self::sorted(tasks, &files, may_be_placeholders))
    }

    fn sorted(tasks: BTreeMap<u32, Vec<Vma>>, files: &Files, may_be_placeholders: bool) -> Self {
        let of_buffers = |vma: &Vma| BackingDevice::of(vma, files).filter(|_| vma.prot & REACHED != 0);
        let with_files = |vmas: Vec<Vma>| {
            vmas.into_iter().filter_map(|vma| Some((of_buffers(&vma)?, vma))).collect::<Vec<_>>()
        };
        let tasks: BTreeMap<u32, Vec<(BackingDevice, Vma)>> =
            tasks.into_iter().map(|(pid, vmas)| (pid, with_files(vmas))).collect();
        let can_be_one = |vma: &Vma| may_be_placeholders && vma.is_shared() && vma.is_dontfork();
        let all = tasks.iter().flat_map(|(pid, vmas)| {
            vmas.iter().map(|(shown, vma)| (*shown, vma, Some(*pid).filter(|_| can_be_one(vma))))
        });
        let reached = CpuMappings::of(all);
        Self { tasks, reached }
    }

    fn of_process(
        &self,
        image: &KfdImage,
        buffers: &Buffers,
        is_elsewhere: impl Fn(usize) -> bool,
    ) -> OfProcess {
        let mut of = OfProcess { buffers: Vec::new(), length: 0, mappings: Vec::new() };
        for (number, buffer) in image.buffers.iter().enumerate() {
            let offsets = buffer.offset..buffer.offset.saturating_add(buffer.size);
            let task = Some(image.pid).filter(|_| buffer.size >= WORTH_IT);
            let mut shown = minors_of(image, buffer.gpu_id)
                .map(BackingDevice::Node)
                .chain(std::iter::once(BackingDevice::Untold));
            let later =
                !is_elsewhere(number) && shown.all(|shown| self.reached.only_by(shown, &offsets, task));
            of.buffers.push((later, of.length));
            of.length += buffer.size.next_multiple_of(PAGE);
        }
        let comes_later =
            |gpu_id: u32, offset: u64| buffers.at(gpu_id, offset).is_some_and(|buffer| of.buffers[buffer].0);
        let own = self.tasks.get(&image.pid).into_iter().flatten();
        let may_be_asked_for = own.filter(|(shown, vma)| match shown {
            BackingDevice::Node(minor) => {
                gpu_of_minor(image, *minor).is_some_and(|(_, gpu_id)| comes_later(gpu_id, vma.offset))
            }
            BackingDevice::Untold => gpus(image).any(|gpu| comes_later(gpu.gpu_id, vma.offset)),
        });
        of.mappings = may_be_asked_for.map(|(_, vma)| *vma).collect();
        of
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use nix::time::{ClockId, clock_gettime};
    use rewake_criu_images::amdgpu::{KfdBuffer, Node, Properties};

    use super::*;

    const OWN: u32 = 7;
    const SHARED: u32 = 1;
    const FILE: u32 = 1 << 7;
    const DONTFORK: u64 = 1 << 10;
    /// Ids of files.
    const NODE: u64 = 1;
    const OTHER_NODE: u64 = 2;
    const WEIGHTS: u64 = 3;

    /// So many that going through all for each takes minutes.
    const MANY: u64 = 200_000;
    /// Far more than going through them once takes.
    const SOON: Duration = Duration::from_secs(5);

    /// What this thread has had of a CPU: others' work does not count.
    fn cpu_time() -> Duration {
        clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().into()
    }

    /// A mapping of [`NODE`].
    fn vma(start: u64, pages: u64, offset: u64) -> Vma {
        let end = start + pages * PAGE;
        Vma { start, end, prot: 3, flags: SHARED, status: FILE, offset, object: NODE, advice: DONTFORK }
    }

    /// Of these GPUs (1 or 2), with these offsets and sizes.
    fn image_of(buffers: impl Iterator<Item = (u32, u64, u64)>) -> KfdImage {
        let buffer = |(gpu_id, offset, size)| KfdBuffer { gpu_id, offset, size, ..KfdBuffer::default() };
        let gpu = |(gpu_id, drm_render_minor)| {
            let properties = Properties { gpu_id, drm_render_minor, ..Properties::default() };
            Node { properties, links: Vec::new() }
        };
        let nodes = [(0, 0), (1, 128), (2, 129)].map(gpu).to_vec();
        KfdImage { pid: OWN, nodes, buffers: buffers.map(buffer).collect(), ..KfdImage::default() }
    }

    /// Two buffers of 4 MiB and one of a page, one behind the other.
    fn image() -> KfdImage {
        let all = [(1, 1 << 32, 4 << 20), (1, (1 << 32) + (4 << 20), 4 << 20), (1, 1 << 33, PAGE)];
        image_of(all.into_iter())
    }

    fn plan_of(image: &KfdImage, tasks: &[(u32, &[Vma])], files: &Files) -> LazyPlan {
        let tasks = tasks.iter().map(|(pid, vmas)| (*pid, vmas.to_vec())).collect();
        let mappings = Mappings::sorted(tasks, files, true);
        LazyPlan(vec![mappings.of_process(image, &Buffers::of(image), |_| false)])
    }

    fn files() -> Files {
        let paths =
            [(1, "/dev/dri/renderD128"), (2, "/jail/dev/dri/renderD129"), (3, "/srv/weights.safetensors")];
        Some(paths.map(|(id, path)| (id, Some(PathBuf::from(path)))).into())
    }

    fn plan(tasks: &[(u32, &[Vma])]) -> LazyPlan {
        plan_of(&image(), tasks, &files())
    }

    fn later(plan: &LazyPlan) -> [bool; 3] {
        [0, 1, 2].map(|buffer| plan.has(0, buffer))
    }

    #[test]
    fn what_no_cpu_reaches_comes_later() {
        assert_eq!(later(&plan(&[])), [true; 3]);
        let no_access = Vma { prot: 0, advice: 0, ..vma(0x10_0000, 2048, 1 << 32) };
        assert_eq!(later(&plan(&[(OWN, &[no_access])])), [true; 3]);
        let executed = Vma { prot: 4, ..no_access };
        assert_eq!(later(&plan(&[(OWN, &[executed])])), [false, false, true]);
    }

    #[test]
    fn a_mapping_of_the_process_itself_becomes_a_placeholder() {
        let plan = plan(&[(OWN, &[vma(0x10_0000, 16, (1 << 32) + (4 << 20) + PAGE)])]);
        assert_eq!(later(&plan), [true; 3]);
        let first = Some(Placeholder { number: 0, offset: (4 << 20) + PAGE });
        assert_eq!(plan.placeholder(0, 1, 0x10_0000, PAGE), first);
        assert_eq!(plan.placeholder(0, 1, 0x10_1000, PAGE), None, "nothing begins there");
        assert_eq!(plan.length(0), (8 << 20) + PAGE);
    }

    #[test]
    fn what_a_placeholder_cannot_stand_for_comes_first() {
        let at = vma(0x10_0000, 16, 1 << 32);
        let cases = [
            (OWN, Vma { advice: 0, ..at }, "a child would have it"),
            (OWN, Vma { flags: 2, ..at }, "private"),
            (OWN, vma(0x10_0000, 1025, 1 << 32), "of two buffers"),
            (OWN + 1, at, "another process's"),
        ];
        for (pid, vma, why) in cases {
            let plan = plan(&[(pid, &[vma])]);
            assert!(!plan.has(0, 0), "{why}");
            assert_eq!(plan.placeholder(0, 0, 0x10_0000, 0), None, "{why}");
        }
        assert_eq!(later(&plan(&[(OWN, &[vma(0x10_0000, 1, 1 << 33)])])), [true, true, false], "small");
    }

    #[test]
    fn a_file_at_a_buffer_s_offset_has_no_part_in_it() {
        // Weights, mapped as a whole, and a piece of them that looks like one of the first buffer.
        let weights = Vma { object: WEIGHTS, advice: 0, ..vma(0x10_0000, 4 << 20, 0) };
        let piece = Vma { object: WEIGHTS, ..vma(0x8_0000_0000, 16, 1 << 32) };
        let plan = plan(&[(OWN, &[weights, piece])]);
        assert_eq!(later(&plan), [true; 3]);
        assert!(plan.mappings(0).is_empty(), "{:?}", plan.mappings(0));
    }

    #[test]
    fn a_mapping_of_an_unknown_file_may_be_one_of_each_gpu() {
        let image =
            image_of([(1, 1 << 32, 4 << 20), (2, 1 << 32, 4 << 20), (2, 1 << 33, 4 << 20)].into_iter());
        let child_has_it = [Vma { advice: 0, ..vma(0x10_0000, 16, 1 << 32) }];
        assert_eq!(later(&plan_of(&image, &[(OWN, &child_has_it)], &None)), [false, false, true]);
        // As a placeholder's: it may be asked for.
        let plan = plan_of(&image, &[(OWN, &[vma(0x10_0000, 16, 1 << 32)])], &None);
        assert_eq!((later(&plan), plan.mappings(0).len()), ([true; 3], 1));
    }

    #[test]
    fn gpus_with_the_same_offsets_are_told_apart_by_their_nodes() {
        let image = image_of([(1, 1 << 32, 4 << 20), (2, 1 << 32, 4 << 20), (2, 1 << 33, PAGE)].into_iter());
        let private = Vma { object: OTHER_NODE, flags: 2, ..vma(0x10_0000, 16, 1 << 32) };
        let own = vma(0x20_0000, 16, 1 << 32);
        let plan = plan_of(&image, &[(OWN, &[private, own])], &files());
        assert_eq!(later(&plan), [true, false, true]);
        assert_eq!(plan.mappings(0), [own]);
        assert_eq!(plan.placeholder(0, 0, 0x20_0000, 0), Some(Placeholder { number: 0, offset: 0 }));
        assert_eq!(plan.placeholder(0, 1, 0x10_0000, 0), None);
    }

    #[test]
    fn many_mappings_of_as_many_buffers_are_planned_at_once() {
        let offset = |number: u64| (1 << 32) + number * WORTH_IT;
        let image = image_of((0..MANY).map(|number| (1, offset(number), WORTH_IT)));
        let own: Vec<Vma> =
            (0..MANY).map(|number| vma((number + 1) << 32, 2, offset(MANY - 1 - number))).collect();
        let start = cpu_time();
        let plan = plan_of(&image, &[(OWN, &own)], &files());
        let took = cpu_time() - start;
        assert!((0..image.buffers.len()).all(|buffer| plan.has(0, buffer)));
        assert!(plan.mappings(0) == own, "{} mappings", plan.mappings(0).len());
        assert!(took < SOON, "{took:?}");
    }

    #[test]
    fn nor_does_it_take_long_where_all_reach_all() {
        // Buffers that are all at one offset, mapped, and in the middle of files that the image does not tell.
        let image = image_of((0..MANY).map(|_| (1, 1 << 32, WORTH_IT)));
        let untold = |number: u64| Vma { object: 4, ..vma((number + 1) << 40, 1 << 21, 0) };
        let own = |number: u64| vma((MANY + number + 1) << 40, 1, 1 << 32);
        let all: Vec<Vma> = (0..MANY).map(untold).chain((0..MANY).map(own)).collect();
        let start = cpu_time();
        let plan = plan_of(&image, &[(OWN, &all)], &files());
        let took = cpu_time() - start;
        assert!((0..image.buffers.len()).all(|buffer| !plan.has(0, buffer)));
        assert!(took < SOON, "{took:?}");
    }
}
