// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes images for tests: small ones from nothing, and incremental pairs from plain dumps.
//!
//! Images from nothing have the fields that [`crate::ImageDir`] reads, which is less than `criu restore`
//! needs. A directory that [`split_into_parent`] has changed is still complete for CRIU.

mod split;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use prost::Message;

pub use split::{PagePlace, split_into_parent};

use crate::dir::io_error;
use crate::error::{ImageError, Result};
use crate::frame::{self, file_of};
use crate::generated::{
    CoreEntry, FileEntry, InventoryEntry, MmEntry, PluginsEntry, PstreeEntry, RegFileEntry, TaskCoreEntry,
    VmaEntry,
};
use crate::inventory::Inventory;
use crate::mm::{Mm, Vma};
use crate::pagemap::{Pagemap, pagemap_head, pagemap_record};
use crate::plan::{pagemap_name, pages_name};
use crate::tasks::Task;

/// Writes `inventory.img`.
///
/// # Errors
/// The file cannot be written.
pub fn inventory(dir: &Path, inventory: &Inventory) -> Result<()> {
    put(dir, "inventory.img", &inventory_bytes(inventory))
}

/// Writes `pstree.img` and every task's `core-PID.img`.
///
/// # Errors
/// A file cannot be written.
pub fn tasks(dir: &Path, tasks: &[Task]) -> Result<()> {
    put(dir, "pstree.img", &tree_bytes(tasks))?;
    tasks.iter().try_for_each(|task| put(dir, &format!("core-{}.img", task.pid), &core_bytes(task)))
}

/// Writes `mm-PID.img`.
///
/// # Errors
/// The file cannot be written.
pub fn mm(dir: &Path, pid: u32, mm: &Mm) -> Result<()> {
    put(dir, &format!("mm-{pid}.img"), &mm_bytes(mm))
}

/// Writes `files.img`: paths by file id, as [`crate::ImageDir::files`] returns them.
///
/// # Errors
/// The file cannot be written.
pub fn files(dir: &Path, files: &BTreeMap<u32, Option<PathBuf>>) -> Result<()> {
    put(dir, "files.img", &files_bytes(files))
}

/// Writes `pagemap-PID.img`.
///
/// # Errors
/// The file cannot be written, or an entry is too long for the generation.
pub fn pagemap(dir: &Path, pid: u32, map: &Pagemap) -> Result<()> {
    let path = dir.join(pagemap_name(pid));
    let bytes = pagemap_bytes(map).ok_or_else(|| ImageError::Unsupported {
        file: path,
        expected: "less than 2^32 pages in an entry of CRIU before 4.2".into(),
        found: "more".into(),
    })?;
    put(dir, &pagemap_name(pid), &bytes)
}

/// Writes `pages-N.img`: the present pages without gaps.
///
/// # Errors
/// The file cannot be written.
pub fn pages(dir: &Path, pages_id: u32, bytes: &[u8]) -> Result<()> {
    put(dir, &pages_name(pages_id), bytes)
}

fn put(dir: &Path, name: &str, bytes: &[u8]) -> Result<()> {
    let path = dir.join(name);
    fs::write(&path, bytes).map_err(|error| io_error("write", &path, error))
}

pub(crate) fn inventory_bytes(inventory: &Inventory) -> Vec<u8> {
    let plugins =
        (!inventory.plugins.is_empty()).then(|| PluginsEntry { plugins: inventory.plugins.clone() });
    let entry = InventoryEntry {
        img_version: Some(inventory.version),
        fdinfo_per_id: Some(true),
        ns_per_id: Some(true),
        plugins_entry: plugins,
        dump_criu_run_id: inventory.run_id.clone(),
    };
    file_of(&frame::INVENTORY, [entry.encode_to_vec()])
}

pub(crate) fn tree_bytes(tasks: &[Task]) -> Vec<u8> {
    let entry = |task: &Task| {
        PstreeEntry {
            pid: Some(task.pid),
            ppid: Some(task.ppid),
            pgid: Some(task.pgid),
            sid: Some(task.sid),
            threads: task.threads.clone(),
        }
        .encode_to_vec()
    };
    file_of(&frame::PSTREE, tasks.iter().map(entry))
}

pub(crate) fn core_bytes(task: &Task) -> Vec<u8> {
    let state = Some(task.state.to_raw());
    let tc = TaskCoreEntry { task_state: state, exit_code: Some(0), comm: Some(task.comm.clone()) };
    file_of(&frame::CORE, [CoreEntry { tc: Some(tc) }.encode_to_vec()])
}

pub(crate) fn mm_bytes(mm: &Mm) -> Vec<u8> {
    let entry = |vma: &Vma| VmaEntry {
        start: Some(vma.start),
        end: Some(vma.end),
        pgoff: Some(vma.offset),
        shmid: Some(vma.object),
        prot: Some(vma.prot),
        flags: Some(vma.flags),
        status: Some(vma.status),
        fd: Some(-1),
        madv: (vma.advice != 0).then_some(vma.advice),
    };
    let vmas = mm.vmas.iter().chain(&mm.guards).map(entry).collect();
    file_of(&frame::MM, [MmEntry { vmas }.encode_to_vec()])
}

pub(crate) fn files_bytes(files: &BTreeMap<u32, Option<PathBuf>>) -> Vec<u8> {
    let entry = |(id, path): (&u32, &Option<PathBuf>)| {
        let name = path.as_ref().map(|path| path.as_os_str().as_bytes().to_vec());
        let reg = name.map(|name| RegFileEntry { name: Some(name) });
        FileEntry { id: Some(*id), reg }.encode_to_vec()
    };
    file_of(&frame::FILES, files.iter().map(entry))
}

/// Encodes a pagemap; `None` when an entry is too long for its generation.
pub(crate) fn pagemap_bytes(map: &Pagemap) -> Option<Vec<u8>> {
    let mut bytes = pagemap_head(map.pages_id);
    for entry in &map.entries {
        bytes.extend(pagemap_record(entry, map.generation)?);
    }
    Some(bytes)
}
