// SPDX-License-Identifier: MIT OR Apache-2.0
//! Surgery on CRIU images: enough of a pagemap codec to change one and write it back.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::unistd::Pid;

use crate::pattern::PAGE;

/// The page is in the parent directory's images.
pub const PARENT: u32 = 1;
/// The page may be restored lazily.
pub const LAZY: u32 = 2;
/// The page is in this directory's pages file.
pub const PRESENT: u32 = 4;

/// The two magic numbers at the head of a pagemap file.
const MAGIC: [u32; 2] = [0x5456_4319, 0x5608_4025];

/// One record of a pagemap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// First address.
    pub vaddr: u64,
    /// Pages.
    pub pages: u64,
    /// [`PARENT`], [`LAZY`], [`PRESENT`].
    pub flags: u32,
}

/// A pagemap file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pagemap {
    /// Which pages file it is about.
    pub pages_id: u64,
    /// Its records.
    pub entries: Vec<Entry>,
}

/// The pagemap file of a process.
#[must_use]
pub fn pagemap_path(images: &Path, pid: Pid) -> PathBuf {
    images.join(format!("pagemap-{pid}.img"))
}

impl Pagemap {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read or is no pagemap.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let bytes = fs::read(path).with_context(|| format!("read {}", path.display()))?;
        let mut rest = bytes.get(8..).context("a pagemap shorter than its magic")?;
        ensure!(bytes[..8] == magic(), "{}: magic {:x?}", path.display(), &bytes[..8]);
        let mut records = Vec::new();
        while let Some((length, tail)) = rest.split_first_chunk() {
            let length = usize::try_from(u32::from_le_bytes(*length))?;
            let (record, tail) = tail.split_at_checked(length).context("a cut record")?;
            records.push(fields(record)?);
            rest = tail;
        }
        let (head, entries) = records.split_first().context("no head")?;
        let value =
            |fields: &[(u64, u64)], number| fields.iter().find(|(at, _)| *at == number).map(|(_, v)| *v);
        let entries = entries.iter().map(|fields| {
            let flags = if value(fields, 3) == Some(1) { Some(u64::from(PARENT)) } else { value(fields, 4) };
            Ok(Entry {
                vaddr: value(fields, 1).context("no address")?,
                pages: value(fields, 5).or_else(|| value(fields, 2)).context("no count")?,
                flags: u32::try_from(flags.unwrap_or_else(|| u64::from(PRESENT)))?,
            })
        });
        Ok(Self {
            pages_id: value(head, 1).context("no pages id")?,
            entries: entries.collect::<anyhow::Result<_>>()?,
        })
    }

    /// Writes a file in the layout of CRIU 4.2.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        let mut bytes = magic();
        let mut record = |fields: &[(u64, u64)]| {
            let mut body = Vec::new();
            for (number, value) in fields {
                varint(&mut body, number << 3);
                varint(&mut body, *value);
            }
            bytes.extend(u32::try_from(body.len()).unwrap_or(u32::MAX).to_le_bytes());
            bytes.extend(body);
        };
        record(&[(1, self.pages_id)]);
        for entry in &self.entries {
            record(&[(1, entry.vaddr), (2, 0), (4, entry.flags.into()), (5, entry.pages)]);
        }
        fs::write(path, bytes).with_context(|| format!("write {}", path.display()))
    }

    /// The entries with the page index in the pages file where each begins.
    pub fn placed(&self) -> impl Iterator<Item = (Entry, u64)> {
        self.entries.iter().scan(0, |next, entry| {
            let at = *next;
            *next += if entry.flags & PRESENT == 0 { 0 } else { entry.pages };
            Some((*entry, at))
        })
    }
}

fn magic() -> Vec<u8> {
    MAGIC.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(u8::try_from(value & 0x7f).unwrap_or(0) | 0x80);
        value >>= 7;
    }
    out.push(u8::try_from(value).unwrap_or(0));
}

/// The fields of a record that has integer fields only.
fn fields(mut record: &[u8]) -> anyhow::Result<Vec<(u64, u64)>> {
    let mut take = || {
        let end = record.iter().position(|byte| byte & 0x80 == 0).context("a cut number")?;
        let (number, rest) = record.split_at(end + 1);
        record = rest;
        let value = number.iter().rev().fold(0, |value: u64, byte| value << 7 | u64::from(byte & 0x7f));
        anyhow::Ok((value, record.is_empty()))
    };
    let mut found = Vec::new();
    loop {
        let (key, _) = take()?;
        ensure!(key & 7 == 0, "a field that is no integer");
        let (value, last) = take()?;
        found.push((key >> 3, value));
        if last {
            return Ok(found);
        }
    }
}

/// The pages file that a pagemap is about.
#[must_use]
pub fn pages_path(images: &Path, pagemap: &Pagemap) -> PathBuf {
    images.join(format!("pages-{}.img", pagemap.pages_id))
}

/// Makes an image of one process incremental: every second page of each lazy entry goes to the images of
/// `parent`, where the other pages lie too, with other content. With `punch` these superseded pages are holes
/// there, as deduplication leaves them. `flags` is what the child's entries say about pages that are in the
/// parent.
///
/// # Errors
/// The images cannot be read or written.
pub fn split(images: &Path, parent: &str, pid: Pid, flags: u32, punch: bool) -> anyhow::Result<()> {
    let folder = images.join(parent);
    let path = pagemap_path(images, pid);
    let whole = Pagemap::read(&path)?;
    let pages = pages_path(images, &whole);
    let source = fs::read(&pages)?;
    fs::create_dir_all(&folder)?;
    std::os::unix::fs::symlink(parent, images.join("parent"))?;
    let below = Pagemap { pages_id: 7, entries: whole.entries.clone() };
    below.write(&pagemap_path(&folder, pid))?;
    fs::copy(images.join("inventory.img"), folder.join("inventory.img"))?;

    let (mut child, mut kept, mut old) = (Vec::new(), Vec::new(), source.clone());
    let mut superseded = Vec::new();
    for (entry, at) in whole.placed() {
        for step in 0..entry.pages {
            let start = usize::try_from(at + step)? * PAGE;
            let below = entry.flags & LAZY != 0 && step % 2 == 1;
            let own = if below { flags } else { entry.flags };
            push(&mut child, Entry { vaddr: entry.vaddr + step * PAGE as u64, pages: 1, flags: own });
            if !below {
                kept.extend_from_slice(&source[start..start + PAGE]);
                old[start..start + PAGE].fill(0xa5);
                superseded.push(start);
            }
        }
    }
    fs::write(&pages, kept)?;
    Pagemap { pages_id: whole.pages_id, entries: child }.write(&path)?;
    let below = pages_path(&folder, &below);
    fs::write(&below, old)?;
    if punch { punch_pages(&below, &superseded) } else { Ok(()) }
}

/// Appends an entry, joining it with the last one when it continues that.
fn push(entries: &mut Vec<Entry>, entry: Entry) {
    match entries.last_mut() {
        Some(last) if last.flags == entry.flags && last.vaddr + last.pages * PAGE as u64 == entry.vaddr => {
            last.pages += entry.pages;
        }
        _ => entries.push(entry),
    }
}

/// Makes holes of the pages that begin at the byte offsets `starts` of a file.
///
/// # Errors
/// The file system cannot punch holes.
pub fn punch_pages(path: &Path, starts: &[usize]) -> anyhow::Result<()> {
    let file = OpenOptions::new().write(true).open(path)?;
    let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    for start in starts {
        fallocate(&file, mode, i64::try_from(*start)?, i64::try_from(PAGE)?).context("punch a hole")?;
    }
    Ok(())
}

/// Makes holes of all pages of a file that hold only zeros; how many.
///
/// # Errors
/// The file cannot be read, or the file system cannot punch holes.
pub fn punch_zero_pages(path: &Path) -> anyhow::Result<usize> {
    let bytes = fs::read(path)?;
    let pages = bytes.chunks(PAGE).enumerate();
    let zero: Vec<usize> =
        pages.filter(|(_, page)| page.iter().all(|byte| *byte == 0)).map(|(index, _)| index * PAGE).collect();
    punch_pages(path, &zero)?;
    Ok(zero.len())
}

/// Takes the lazy pages out of an image, as a dump with a page server of its own leaves it.
///
/// # Errors
/// The images cannot be read or written.
pub fn drop_lazy_pages(images: &Path, pid: Pid) -> anyhow::Result<()> {
    let path = pagemap_path(images, pid);
    let mut pagemap = Pagemap::read(&path)?;
    let pages = pages_path(images, &pagemap);
    let file = File::open(&pages)?;
    let mut kept = Vec::new();
    for (entry, at) in pagemap.placed().filter(|(entry, _)| entry.flags & LAZY == 0) {
        let mut bytes = vec![0; usize::try_from(entry.pages)? * PAGE];
        file.read_exact_at(&mut bytes, at * PAGE as u64)?;
        kept.extend(bytes);
    }
    for entry in &mut pagemap.entries {
        if entry.flags & LAZY != 0 {
            entry.flags = LAZY;
        }
    }
    pagemap.write(&path)?;
    fs::write(&pages, kept).context("write the pages that are left")
}

/// Writes other bytes into the lazy pages of all tasks: a restore that reads one of them from these files
/// fails.
///
/// # Errors
/// The images cannot be read or written.
pub fn spoil_lazy_pages(images: &Path) -> anyhow::Result<()> {
    for entry in fs::read_dir(images)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !name.starts_with("pagemap-") || name.starts_with("pagemap-shmem-") {
            continue;
        }
        let map = Pagemap::read(&path)?;
        let pages = OpenOptions::new().write(true).open(pages_path(images, &map))?;
        for (entry, at) in map.placed().filter(|(entry, _)| entry.flags & LAZY != 0) {
            let bytes = vec![0xa5; usize::try_from(entry.pages)? * PAGE];
            pages.write_all_at(&bytes, at * PAGE as u64)?;
        }
    }
    Ok(())
}

/// Shortens a file to `length` bytes.
///
/// # Errors
/// The file cannot be changed.
pub fn truncate(path: &Path, length: u64) -> anyhow::Result<()> {
    let file =
        OpenOptions::new().write(true).open(path).with_context(|| format!("open {}", path.display()))?;
    file.set_len(length).with_context(|| format!("truncate {}", path.display()))
}

/// Copies images for a server of lazy pages, and spoils those pages in the images that stay: a restore that
/// reads one of them from there fails.
///
/// # Errors
/// The files cannot be read or written.
pub fn move_lazy_pages(images: &Path, to: &Path) -> anyhow::Result<()> {
    copy(images, to)?;
    spoil_lazy_pages(images)
}

/// A copy of all files of an images directory.
///
/// # Errors
/// A file cannot be copied.
pub fn copy(images: &Path, to: &Path) -> anyhow::Result<()> {
    fs::create_dir(to)?;
    for entry in fs::read_dir(images)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

/// Puts another image in an image's place: of the same processes, with other bytes in every page.
///
/// # Errors
/// The files cannot be read or written.
pub fn replace_with_other_bytes(images: &Path) -> anyhow::Result<()> {
    let old = images.with_file_name("old");
    fs::rename(images, &old)?;
    copy(&old, images)?;
    for entry in fs::read_dir(images)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with("pages-") {
            let bytes: Vec<u8> = fs::read(entry.path())?.iter().map(|byte| !byte).collect();
            fs::write(entry.path(), bytes)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("pagemap-1.img");
        let entry = |vaddr, pages, flags| Entry { vaddr, pages, flags };
        let entries = vec![entry(0x1000_0000_0000, 300, LAZY | PRESENT), entry(0x7fff_ffff_e000, 1, PRESENT)];
        let pagemap = Pagemap { pages_id: 0x10001, entries };
        pagemap.write(&path)?;
        assert_eq!(Pagemap::read(&path)?, pagemap);
        Ok(())
    }
}
