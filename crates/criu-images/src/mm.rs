// SPDX-License-Identifier: MIT OR Apache-2.0
//! `mm-PID.img`: the mappings of a task.

use std::io::Read;

use prost::Message as _;

use crate::PAGE;
use crate::error::{ImageError, Result};
use crate::frame::Records;
use crate::generated::VmaEntry;

/// The most mappings that one task may have: 64 times the kernel's default of `vm.max_map_count`.
pub const MAX_VMAS: usize = 1 << 22;

/// MAP_* of the kernel's mman.h, the same on x86-64 and arm64.
const MAP_SHARED: u32 = 0x1;
const MAP_PRIVATE: u32 = 0x2;
const MAP_ANONYMOUS: u32 = 0x20;
const MAP_LOCKED: u32 = 0x2000;
const MAP_NORESERVE: u32 = 0x4000;
const MAP_HUGETLB: u32 = 0x4_0000;

/// From the kernel's mman-common.h.
const PROT_WRITE: u32 = 2;
const MADV_DONTFORK: u32 = 10;

/// Bits of a mapping's status in the image.
const STATUS_VSYSCALL: u32 = 1 << 2;
const STATUS_VDSO: u32 = 1 << 3;
const STATUS_FILE_PRIVATE: u32 = 1 << 6;
const STATUS_FILE_SHARED: u32 = 1 << 7;
const STATUS_ANON_PRIVATE: u32 = 1 << 9;
const STATUS_VVAR: u32 = 1 << 12;
const STATUS_GUARD: u32 = 1 << 16;
const STATUS_PLUGIN: u32 = 1 << 27;

/// Names of mappings by status bits: the first bit that is set decides.
const KINDS: &[(u32, &str)] = &[
    (STATUS_GUARD, "guard"),
    (STATUS_VSYSCALL, "vsyscall"),
    (STATUS_VDSO, "vdso"),
    (STATUS_VVAR, "vvar"),
    (STATUS_PLUGIN, "plugin"),
    (1 << 10, "sysv-shm"),
    (1 << 11, "socket"),
    (1 << 13, "aio-ring"),
    (1 << 14, "memfd"),
    (1 << 15, "shadow-stack"),
    (1 << 1, "stack"),
    (1 << 5, "heap"),
    (STATUS_FILE_PRIVATE, "file-private"),
    (STATUS_FILE_SHARED, "file-shared"),
    (1 << 8, "anon-shared"),
    (STATUS_ANON_PRIVATE, "anon-private"),
];

/// One mapping of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vma {
    /// First address.
    pub start: u64,
    /// The first address after it.
    pub end: u64,
    /// PROT_* of the kernel.
    pub prot: u32,
    /// MAP_* of the kernel.
    pub flags: u32,
    /// CRIU's status bits: the kind of the mapping.
    pub status: u32,
    /// Byte offset in its file.
    pub offset: u64,
    /// The mapped object: a file's id in `files.img`, or CRIU's number of shared memory; 0 for private
    /// memory.
    pub object: u64,
    /// The MADV_* in force, one bit for each number.
    pub advice: u64,
}

impl Vma {
    /// Whether CRIU registers this mapping with userfaultfd: private anonymous memory that is neither locked,
    /// nor huge pages, nor the kernel's own.
    #[must_use]
    pub fn can_be_lazy(&self) -> bool {
        self.flags & MAP_ANONYMOUS != 0
            && self.flags & MAP_PRIVATE != 0
            && self.flags & (MAP_LOCKED | MAP_HUGETLB) == 0
            && self.status & (STATUS_VDSO | STATUS_VVAR | STATUS_VSYSCALL) == 0
    }

    /// Whether a lazy restore maps this writable before it makes the rest of the process: private memory, no
    /// huge pages.
    pub(crate) fn is_premapped(&self) -> bool {
        self.flags & MAP_PRIVATE != 0
            && self.flags & MAP_HUGETLB == 0
            && self.status & (STATUS_FILE_PRIVATE | STATUS_ANON_PRIVATE) != 0
            && self.status & (STATUS_VDSO | STATUS_VVAR | STATUS_VSYSCALL) == 0
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.prot & PROT_WRITE != 0
    }

    /// Whether the kernel does not count it as memory that may be needed, unless it overcommits none.
    pub(crate) fn is_unreserved(&self) -> bool {
        self.flags & MAP_NORESERVE != 0
    }

    /// Returns a short name of the kind of mapping, for printing.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        KINDS.iter().find(|(bit, _)| self.status & bit != 0).map_or("other", |(_, name)| name)
    }

    /// Whether it is shared with other mappings of its file.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.flags & MAP_SHARED != 0
    }

    /// Whether children do not inherit it (MADV_DONTFORK).
    #[must_use]
    pub fn is_dontfork(&self) -> bool {
        self.advice & 1 << MADV_DONTFORK != 0
    }

    /// Whether it is memory without a file.
    #[must_use]
    pub fn is_anonymous(&self) -> bool {
        self.flags & MAP_ANONYMOUS != 0
    }

    /// Whether a plugin claimed it at the dump as a mapping of its device.
    #[must_use]
    pub fn is_plugin_device(&self) -> bool {
        self.status & STATUS_PLUGIN != 0
    }

    /// Returns the id of its file in `files.img` ([`crate::ImageDir::files`]); `None` where the image names
    /// none.
    #[must_use]
    pub fn file(&self) -> Option<u32> {
        let of_file = self.status & (STATUS_FILE_PRIVATE | STATUS_FILE_SHARED) != 0;
        u32::try_from(self.object).ok().filter(|_| of_file)
    }

    /// Returns its length in pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        (self.end - self.start) / PAGE
    }

    fn is_guard(&self) -> bool {
        self.status & STATUS_GUARD != 0
    }
}

/// The mappings of a task.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Mm {
    /// Mappings in ascending order, without overlaps.
    pub vmas: Vec<Vma>,
    /// Ranges inside the mappings with an installed guard (MADV_GUARD_INSTALL), in the file's order.
    pub guards: Vec<Vma>,
}

pub(crate) fn parse<R: Read>(mut records: Records<R>) -> Result<Mm> {
    let start = records.offset();
    let Some(record) = records.next()? else { return Err(records.no_record()) };
    // Mappings are decoded one by one, not as one message. An empty mapping takes two bytes in the file and
    // fifty times as much in memory, so a hostile file must be refused at its first one.
    let mut mm = Mm::default();
    let outcome = collect(record, &mut mm);
    match outcome {
        Ok(()) => {}
        Err(RecordError::Damage { expected, found }) => return Err(records.damaged(start, expected, found)),
        Err(RecordError::TooMany) => {
            return Err(ImageError::TooMany {
                file: records.file().to_path_buf(),
                offset: start,
                what: "mappings and more",
                found: MAX_VMAS as u64,
                limit_name: "MAX_VMAS",
                limit: MAX_VMAS as u64,
            });
        }
    }
    records.end()?;
    mm.vmas.sort_unstable_by_key(|vma| vma.start);
    if let Some(pair) = mm.vmas.windows(2).find(|pair| pair[0].end > pair[1].start) {
        let found = format!("{:#x}-{:#x} and {:#x}", pair[0].start, pair[0].end, pair[1].start);
        return Err(records.damaged(start, "mappings that do not overlap", found));
    }
    Ok(mm)
}

enum RecordError {
    Damage { expected: &'static str, found: String },
    TooMany,
}

fn damage(expected: &'static str, found: impl Into<String>) -> RecordError {
    RecordError::Damage { expected, found: found.into() }
}

/// Number of the field of `mm_entry` that has a mapping.
const VMAS_FIELD: u64 = 14;

fn collect(mut record: &[u8], mm: &mut Mm) -> Result<(), RecordError> {
    while !record.is_empty() {
        let Some(body) = field(&mut record)? else { continue };
        let vma = vma(body)?;
        if mm.vmas.len() + mm.guards.len() == MAX_VMAS {
            return Err(RecordError::TooMany);
        }
        if vma.is_guard() { mm.guards.push(vma) } else { mm.vmas.push(vma) }
    }
    Ok(())
}

/// Takes one field off the record. Returns its bytes when it is a mapping.
fn field<'a>(record: &mut &'a [u8]) -> Result<Option<&'a [u8]>, RecordError> {
    let key = varint(record)?;
    let len = match key & 7 {
        0 => {
            varint(record)?;
            return Ok(None);
        }
        1 => 8,
        2 => varint(record)?,
        5 => 4,
        other => return Err(damage("a protobuf wire type of 0, 1, 2 or 5", other.to_string())),
    };
    let split = usize::try_from(len).ok().and_then(|len| record.split_at_checked(len));
    let Some((body, rest)) = split else {
        return Err(damage(
            "a field inside the record",
            format!("a length of {len}, {} bytes left", record.len()),
        ));
    };
    *record = rest;
    Ok((key == VMAS_FIELD << 3 | 2).then_some(body))
}

fn varint(record: &mut &[u8]) -> Result<u64, RecordError> {
    // A length delimiter is a varint like any other.
    let value =
        prost::decode_length_delimiter(record).map_err(|error| damage("a varint", error.to_string()))?;
    Ok(value as u64)
}

fn vma(body: &[u8]) -> Result<Vma, RecordError> {
    let entry = VmaEntry::decode(body).map_err(|error| damage("a mapping", error.to_string()))?;
    let (Some(start), Some(end), Some(flags), Some(status)) =
        (entry.start, entry.end, entry.flags, entry.status)
    else {
        return Err(damage("a mapping with start, end, flags and status", "one without"));
    };
    if start >= end || start % PAGE != 0 || end % PAGE != 0 {
        return Err(damage("a mapping of whole pages with start < end", format!("{start:#x}-{end:#x}")));
    }
    let offset = entry.pgoff.unwrap_or(0);
    let object = entry.shmid.unwrap_or(0);
    let (prot, advice) = (entry.prot.unwrap_or(0), entry.madv.unwrap_or(0));
    Ok(Vma { start, end, prot, flags, status, offset, object, advice })
}
