// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where CPUs reach files: all tasks' mappings, by file and offset. A mapping is one of a buffer if its file is the render node of
//! the buffer's GPU. Where the image does not tell the file, it may be any GPU's.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use rewake_criu_images::Vma;

use crate::device::Gpu;

/// What a mapping can be one of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum BackingDevice {
    /// The render node of this minor number.
    Node(u32),
    /// The image does not tell.
    Untold,
}

/// Paths of the image's files; none without `files.img`.
pub(super) type Files = Option<BTreeMap<u32, Option<PathBuf>>>;

impl BackingDevice {
    /// None for a mapping that can show no buffer. CRIU asks the plugin what to map by the path that is looked at here.
    pub(super) fn of(vma: &Vma, files: &Files) -> Option<Self> {
        let file = vma.file().and_then(|id| files.as_ref()?.get(&id));
        let gpu = match file {
            Some(path) => path.as_ref().and_then(|path| Gpu::of_path(&path.to_string_lossy())),
            None if vma.is_anonymous() && !vma.is_plugin_device() => return None,
            None => return Some(Self::Untold),
        };
        match gpu {
            Some(Gpu::Render(minor)) => Some(Self::Node(minor)),
            Some(Gpu::Kfd) => None,
            // A device under another name.
            None => vma.is_plugin_device().then_some(Self::Untold),
        }
    }
}

/// All that CPUs reach.
#[derive(Debug, Default)]
pub(super) struct CpuMappings(BTreeMap<BackingDevice, Vec<Mapping>>);

/// One mapping; sorted by offsets.
#[derive(Debug)]
struct Mapping {
    offset: u64,
    /// The furthest offset behind this one and all before it.
    furthest: u64,
    /// The task, if a placeholder could stand there.
    task: Option<u32>,
    /// The first of those up to this one with the same `task`.
    since: usize,
}

impl CpuMappings {
    /// Of all mappings, each with the task that has it if a placeholder could stand there.
    pub(super) fn of<'a>(all: impl Iterator<Item = (BackingDevice, &'a Vma, Option<u32>)>) -> Self {
        let mut reached: BTreeMap<BackingDevice, Vec<Mapping>> = BTreeMap::new();
        for (shown, vma, task) in all {
            let furthest = vma.offset.saturating_add(vma.end - vma.start);
            reached.entry(shown).or_default().push(Mapping { offset: vma.offset, furthest, task, since: 0 });
        }
        for mappings in reached.values_mut() {
            mappings.sort_by_key(|mapping| mapping.offset);
            for index in 1..mappings.len() {
                let before = &mappings[index - 1];
                let (furthest, task, since) = (before.furthest, before.task, before.since);
                let mapping = &mut mappings[index];
                mapping.furthest = mapping.furthest.max(furthest);
                mapping.since = if mapping.task == task { since } else { index };
            }
        }
        Self(reached)
    }

    /// Whether placeholders of `task` can stand for all that reaches these offsets; with no task, whether nothing does.
    pub(super) fn only_by(&self, shown: BackingDevice, offsets: &Range<u64>, task: Option<u32>) -> bool {
        let Some(all) = self.0.get(&shown) else { return true };
        let first = all.partition_point(|mapping| mapping.offset < offsets.start);
        let behind = all.partition_point(|mapping| mapping.offset < offsets.end);
        // One that begins before them is of another buffer, too.
        if all[..first].last().is_some_and(|before| offsets.start < before.furthest) {
            return false;
        }
        let Some(last) = all[first..behind].last() else { return true };
        // As is one that ends behind them.
        task.is_some() && last.task == task && last.since <= first && last.furthest <= offsets.end
    }
}

#[cfg(test)]
mod tests {
    use rewake_amdgpu_uapi::abi::memory::PAGE;

    use super::*;

    const ANONYMOUS: u32 = 0x20;
    const FILE_SHARED: u32 = 1 << 7;
    const PLUGIN: u32 = 1 << 27;
    const TASK: Option<u32> = Some(7);

    fn vma(offset: u64, length: u64, flags: u32, status: u32) -> Vma {
        Vma { start: 0, end: length, prot: 3, flags, status, offset, object: 5, advice: 0 }
    }

    fn shown(path: Option<&str>, flags: u32, status: u32) -> Option<BackingDevice> {
        let files = Some(BTreeMap::from([(5, path.map(PathBuf::from))]));
        BackingDevice::of(&vma(0, PAGE, flags, status), &files)
    }

    #[test]
    fn a_file_is_known_by_its_path() {
        let device = FILE_SHARED | PLUGIN;
        assert_eq!(shown(Some("/dev/dri/renderD129"), 1, device), Some(BackingDevice::Node(129)));
        assert_eq!(shown(Some("/dev/dri/renderD129"), 1, FILE_SHARED), Some(BackingDevice::Node(129)));
        assert_eq!(shown(Some("/dev/kfd"), 1, device), None, "doorbells");
        assert_eq!(shown(Some("/srv/weights"), 1, FILE_SHARED), None);
        assert_eq!(shown(None, 1, FILE_SHARED), None, "a memfd");
        assert_eq!(
            shown(Some("/dev/gpu"), 1, device),
            Some(BackingDevice::Untold),
            "a device under another name"
        );
    }

    #[test]
    fn without_the_file_only_anonymous_memory_is_none() {
        let of = |object, files: &Files, flags, status| {
            BackingDevice::of(&Vma { object, ..vma(0, PAGE, flags, status) }, files)
        };
        let none = &Some(BTreeMap::new());
        assert_eq!(of(5, &None, 1, FILE_SHARED), Some(BackingDevice::Untold), "no files.img");
        assert_eq!(of(5, none, 1, FILE_SHARED), Some(BackingDevice::Untold), "not in it");
        assert_eq!(of(5, none, 1, 0), Some(BackingDevice::Untold), "of no kind");
        assert_eq!(of(0, &None, 2 | ANONYMOUS, 1 << 9), None);
        assert_eq!(of(0, &None, 2 | ANONYMOUS, 1 << 9 | PLUGIN), Some(BackingDevice::Untold));
    }

    #[test]
    fn only_what_lies_inside_and_is_one_task_s_can_have_placeholders() {
        let at = |mappings: &[(u64, u64, Option<u32>)], task| {
            let vmas: Vec<_> =
                mappings.iter().map(|(offset, length, _)| vma(*offset, *length, 1, 0)).collect();
            let all =
                vmas.iter().zip(mappings).map(|(vma, (_, _, task))| (BackingDevice::Untold, vma, *task));
            CpuMappings::of(all).only_by(BackingDevice::Untold, &(100..200), task)
        };
        assert!(at(&[(0, 100, None), (200, 100, None)], None), "beside it");
        assert!(at(&[(100, 100, TASK), (120, 10, TASK), (120, 80, TASK)], TASK));
        assert!(!at(&[(100, 100, TASK)], None), "a small buffer");
        assert!(!at(&[(100, 100, None)], TASK), "no placeholder can stand there");
        assert!(!at(&[(100, 10, TASK), (110, 10, None), (120, 10, TASK)], TASK), "one among others");
        assert!(!at(&[(100, 10, TASK), (110, 10, Some(8)), (120, 10, TASK)], TASK), "another task's");
        assert!(!at(&[(99, 2, TASK)], TASK), "begins before");
        assert!(!at(&[(0, 1000, TASK), (10, 10, TASK), (120, 10, TASK)], TASK), "all over it");
        assert!(!at(&[(120, 81, TASK), (130, 1, TASK)], TASK), "ends behind");
    }

    #[test]
    fn files_are_told_apart() {
        let vma = vma(100, 100, 1, 0);
        let reached = CpuMappings::of([(BackingDevice::Node(128), &vma, None)].into_iter());
        let free = |shown| reached.only_by(shown, &(100..200), None);
        assert_eq!(
            [BackingDevice::Node(128), BackingDevice::Node(129), BackingDevice::Untold].map(free),
            [false, true, true]
        );
    }
}
