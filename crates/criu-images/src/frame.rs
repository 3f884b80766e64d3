// SPDX-License-Identifier: MIT OR Apache-2.0
//! The frame of image files: a header of one or two magic numbers, then records. Each record is a
//! little-endian `u32` length and that many bytes of protobuf. A length is checked before it is used.

use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use prost::Message;

use crate::error::{ImageError, Result};

/// First word of every image file except the inventory and the raw ones.
pub(crate) const COMMON_MAGIC: u32 = 0x5456_4319;

/// A kind of image file.
#[derive(Debug)]
pub(crate) struct FileKind {
    /// The name for messages.
    pub name: &'static str,
    /// The magic number of the kind.
    pub magic: u32,
    /// Whether [`COMMON_MAGIC`] precedes it.
    pub common: bool,
    /// The longest record that is accepted, in bytes.
    pub record_limit: u32,
}

/// `inventory.img`: a few numbers and names.
pub(crate) const INVENTORY: FileKind =
    FileKind { name: "inventory", magic: 0x5831_3116, common: false, record_limit: 1 << 20 };
/// `pstree.img`: up to six bytes per thread.
pub(crate) const PSTREE: FileKind =
    FileKind { name: "process tree", magic: 0x5027_3030, common: true, record_limit: 32 << 20 };
/// `core-PID.img`: registers, signals, limits; a few KiB.
pub(crate) const CORE: FileKind =
    FileKind { name: "core", magic: 0x5505_3847, common: true, record_limit: 16 << 20 };
/// `mm-PID.img`: about 50 bytes per mapping.
pub(crate) const MM: FileKind =
    FileKind { name: "mm", magic: 0x5749_2820, common: true, record_limit: 256 << 20 };
/// `files.img`: a path and some numbers per file; about 60 bytes for each file of an inotify or epoll.
pub(crate) const FILES: FileKind =
    FileKind { name: "files", magic: 0x5630_3138, common: true, record_limit: 256 << 20 };
/// `pagemap-ID.img`: about 20 bytes per record.
pub(crate) const PAGEMAP: FileKind =
    FileKind { name: "pagemap", magic: 0x5608_4025, common: true, record_limit: 64 << 10 };

/// Reads the records of one file, one at a time.
#[derive(Debug)]
pub(crate) struct Records<R> {
    kind: &'static FileKind,
    file: PathBuf,
    input: BufReader<R>,
    len: u64,
    offset: u64,
    record: Vec<u8>,
}

impl<R: Read> Records<R> {
    /// Checks the header of a file of `len` bytes; `file` is for messages only.
    pub(crate) fn new(kind: &'static FileKind, file: &Path, input: R, len: u64) -> Result<Self> {
        let mut records = Self {
            kind,
            file: file.to_path_buf(),
            input: BufReader::new(input),
            len,
            offset: 0,
            record: Vec::new(),
        };
        if kind.common {
            records.magic("the common image magic", COMMON_MAGIC)?;
        }
        records.magic(kind.name, kind.magic)?;
        Ok(records)
    }

    /// Byte offset of the next record.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// The file's name for messages.
    pub(crate) fn file(&self) -> &Path {
        &self.file
    }

    /// Makes an error about the record or header at `offset`.
    pub(crate) fn damaged(
        &self,
        offset: u64,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> ImageError {
        let (expected, found) = (expected.into(), found.into());
        ImageError::Damaged { file: self.file.clone(), offset, expected, found }
    }

    /// Reads the bytes of the next record; `None` at the end of the file.
    pub(crate) fn next(&mut self) -> Result<Option<&[u8]>> {
        if self.offset == self.len {
            return Ok(None);
        }
        let start = self.offset;
        let size = self.word("a record's length of 4 bytes")?;
        let left = self.len - self.offset;
        if size > self.kind.record_limit {
            return Err(ImageError::TooMany {
                file: self.file.clone(),
                offset: start,
                what: "bytes in one record",
                found: u64::from(size),
                limit_name: "the record limit of this kind of file",
                limit: u64::from(self.kind.record_limit),
            });
        }
        if u64::from(size) > left {
            return Err(self.damaged(
                start,
                format!("a record of {size} bytes"),
                format!("{left} bytes to the end"),
            ));
        }
        self.record.resize(size as usize, 0);
        let read = self.input.read_exact(&mut self.record);
        read.map_err(|source| self.io(source))?;
        self.offset += u64::from(size);
        Ok(Some(&self.record))
    }

    /// Decodes the next record and returns it with its offset.
    pub(crate) fn message<M: Message + Default>(&mut self) -> Result<Option<(u64, M)>> {
        let start = self.offset;
        let decoded = match self.next()? {
            Some(record) => M::decode(record),
            None => return Ok(None),
        };
        match decoded {
            Ok(message) => Ok(Some((start, message))),
            Err(error) => Err(self.damaged(start, format!("a {} record", self.kind.name), error.to_string())),
        }
    }

    /// Decodes the record of a file that has exactly one.
    pub(crate) fn single<M: Message + Default>(mut self) -> Result<M> {
        let Some((_, message)) = self.message()? else { return Err(self.no_record()) };
        self.end()?;
        Ok(message)
    }

    /// Makes an error: the file ends where a record must be.
    pub(crate) fn no_record(&self) -> ImageError {
        self.damaged(self.offset, format!("a {} record", self.kind.name), "the end of the file")
    }

    /// Checks that the file ends here.
    pub(crate) fn end(&self) -> Result<()> {
        let left = self.len - self.offset;
        if left == 0 {
            return Ok(());
        }
        Err(self.damaged(self.offset, "the end of the file", format!("{left} bytes more")))
    }

    fn magic(&mut self, what: &str, expected: u32) -> Result<()> {
        let start = self.offset;
        let found = self.word(what)?;
        if found == expected {
            return Ok(());
        }
        Err(self.damaged(start, format!("{what} {expected:#010x}"), format!("{found:#010x}")))
    }

    fn word(&mut self, what: &str) -> Result<u32> {
        let left = self.len - self.offset;
        if left < 4 {
            return Err(self.damaged(self.offset, what, format!("{left} bytes to the end")));
        }
        let mut bytes = [0; 4];
        let read = self.input.read_exact(&mut bytes);
        read.map_err(|source| self.io(source))?;
        self.offset += 4;
        Ok(u32::from_le_bytes(bytes))
    }

    fn io(&self, source: std::io::Error) -> ImageError {
        ImageError::Io { act: "read", file: self.file.clone(), source }
    }
}

/// Makes a whole file of `kind` with these records, in memory.
///
/// # Panics
/// A record has 4 GiB or more: no message of this crate is as long.
pub(crate) fn file_of(kind: &FileKind, records: impl IntoIterator<Item = Vec<u8>>) -> Vec<u8> {
    let mut bytes = Vec::new();
    if kind.common {
        bytes.extend_from_slice(&COMMON_MAGIC.to_le_bytes());
    }
    bytes.extend_from_slice(&kind.magic.to_le_bytes());
    for content in records {
        bytes.extend(record(&content));
    }
    bytes
}

/// Makes one record: its length and its bytes.
///
/// # Panics
/// It has 4 GiB or more.
#[allow(clippy::expect_used, reason = "it is written, and no byte from outside is read")]
pub(crate) fn record(content: &[u8]) -> Vec<u8> {
    let len = u32::try_from(content.len()).expect("a record is shorter than 4 GiB");
    [&len.to_le_bytes(), content].concat()
}
