// SPDX-License-Identifier: MIT OR Apache-2.0
//! The CPU mappings of all tasks, by file and offset. A buffer's mappings are mappings of its GPU's render
//! node. Where the image does not name a mapping's file, the mapping may be one of any GPU.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use rewake_criu_images::Vma;

use crate::device::DeviceFile;

/// The device that a mapping may be one of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum BackingDevice {
    /// The render node of this minor number.
    Node(u32),
    /// A device that the image does not name.
    Unknown,
}

/// Paths of the image's files; none without `files.img`.
pub(super) type FilePaths = Option<BTreeMap<u32, Option<PathBuf>>>;

impl BackingDevice {
    /// Returns the device of a mapping, or `None` if the mapping cannot be one of a buffer. CRIU passes the
    /// same path to the plugin when it restores the mapping.
    pub(super) fn of(vma: &Vma, files: &FilePaths) -> Option<Self> {
        let file = vma.file().and_then(|id| files.as_ref()?.get(&id));
        let gpu = match file {
            Some(path) => path.as_ref().and_then(|path| DeviceFile::of_path(path.as_os_str().as_bytes())),
            None if vma.is_anonymous() && !vma.is_plugin_device() => return None,
            None => return Some(Self::Unknown),
        };
        match gpu {
            Some(DeviceFile::Render(minor)) => Some(Self::Node(minor)),
            Some(DeviceFile::Kfd) => None,
            // A device under another name.
            None => vma.is_plugin_device().then_some(Self::Unknown),
        }
    }
}

/// All mappings that may be of buffers, by device and sorted by offset.
#[derive(Debug, Default)]
pub(super) struct CpuMappings(BTreeMap<BackingDevice, Vec<CpuMapping>>);

/// One mapping.
#[derive(Debug)]
struct CpuMapping {
    offset: u64,
    /// The highest end of this mapping and of all before it.
    max_end: u64,
    /// The task, if a placeholder can replace the mapping.
    task: Option<u32>,
    /// The index from which on all mappings up to this one have the same `task`.
    same_task_from: usize,
}

impl CpuMappings {
    /// Sorts mappings. Each has its task if a placeholder can replace it.
    pub(super) fn of<'a>(all: impl Iterator<Item = (BackingDevice, &'a Vma, Option<u32>)>) -> Self {
        let mut mappings: BTreeMap<BackingDevice, Vec<CpuMapping>> = BTreeMap::new();
        for (device, vma, task) in all {
            let max_end = vma.offset.saturating_add(vma.end - vma.start);
            mappings.entry(device).or_default().push(CpuMapping {
                offset: vma.offset,
                max_end,
                task,
                same_task_from: 0,
            });
        }
        for sorted in mappings.values_mut() {
            sorted.sort_by_key(|mapping| mapping.offset);
            for index in 1..sorted.len() {
                let before = &sorted[index - 1];
                let (max_end, task, same_task_from) = (before.max_end, before.task, before.same_task_from);
                let mapping = &mut sorted[index];
                mapping.max_end = mapping.max_end.max(max_end);
                mapping.same_task_from = if mapping.task == task { same_task_from } else { index };
            }
        }
        Self(mappings)
    }

    /// Returns whether placeholders of `task` can replace all mappings of these offsets; with no task,
    /// whether there is none.
    pub(super) fn has_only_placeholders(
        &self,
        device: BackingDevice,
        offsets: &Range<u64>,
        task: Option<u32>,
    ) -> bool {
        let Some(all) = self.0.get(&device) else { return true };
        let first = all.partition_point(|mapping| mapping.offset < offsets.start);
        let end = all.partition_point(|mapping| mapping.offset < offsets.end);
        // A mapping that begins before these offsets also has another buffer.
        if all[..first].last().is_some_and(|before| offsets.start < before.max_end) {
            return false;
        }
        let Some(last) = all[first..end].last() else { return true };
        // So does one that ends after them.
        task.is_some() && last.task == task && last.same_task_from <= first && last.max_end <= offsets.end
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
            Some(BackingDevice::Unknown),
            "a device under another name"
        );
    }

    #[test]
    fn without_a_file_name_only_anonymous_memory_is_excluded() {
        let of = |object, files: &FilePaths, flags, status| {
            BackingDevice::of(&Vma { object, ..vma(0, PAGE, flags, status) }, files)
        };
        let none = &Some(BTreeMap::new());
        assert_eq!(of(5, &None, 1, FILE_SHARED), Some(BackingDevice::Unknown), "no files.img");
        assert_eq!(of(5, none, 1, FILE_SHARED), Some(BackingDevice::Unknown), "not in it");
        assert_eq!(of(5, none, 1, 0), Some(BackingDevice::Unknown), "of no kind");
        assert_eq!(of(0, &None, 2 | ANONYMOUS, 1 << 9), None);
        assert_eq!(of(0, &None, 2 | ANONYMOUS, 1 << 9 | PLUGIN), Some(BackingDevice::Unknown));
    }

    #[test]
    fn only_mappings_inside_a_buffer_and_of_one_task_become_placeholders() {
        let at = |mappings: &[(u64, u64, Option<u32>)], task| {
            let vmas: Vec<_> =
                mappings.iter().map(|(offset, length, _)| vma(*offset, *length, 1, 0)).collect();
            let all =
                vmas.iter().zip(mappings).map(|(vma, (_, _, task))| (BackingDevice::Unknown, vma, *task));
            CpuMappings::of(all).has_only_placeholders(BackingDevice::Unknown, &(100..200), task)
        };
        assert!(at(&[(0, 100, None), (200, 100, None)], None), "only around it");
        assert!(at(&[(100, 100, TASK), (120, 10, TASK), (120, 80, TASK)], TASK));
        assert!(!at(&[(100, 100, TASK)], None), "a small buffer");
        assert!(!at(&[(100, 100, None)], TASK), "no placeholder can replace it");
        assert!(
            !at(&[(100, 10, TASK), (110, 10, None), (120, 10, TASK)], TASK),
            "one that no placeholder can replace"
        );
        assert!(!at(&[(100, 10, TASK), (110, 10, Some(8)), (120, 10, TASK)], TASK), "another task's");
        assert!(!at(&[(99, 2, TASK)], TASK), "begins before");
        assert!(!at(&[(0, 1000, TASK), (10, 10, TASK), (120, 10, TASK)], TASK), "one around all");
        assert!(!at(&[(120, 81, TASK), (130, 1, TASK)], TASK), "ends after it");
    }

    #[test]
    fn mappings_are_kept_by_device() {
        let vma = vma(100, 100, 1, 0);
        let mappings = CpuMappings::of([(BackingDevice::Node(128), &vma, None)].into_iter());
        let free = |device| mappings.has_only_placeholders(device, &(100..200), None);
        assert_eq!(
            [BackingDevice::Node(128), BackingDevice::Node(129), BackingDevice::Unknown].map(free),
            [false, true, true]
        );
    }
}
