// SPDX-License-Identifier: MIT OR Apache-2.0
//! The bytes of a tar, whichever way they are compressed.

use std::cell::Cell;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, ErrorKind, Read};
use std::rc::Rc;

use flate2::bufread::MultiGzDecoder;
use zstd::stream::read::Decoder;

/// How the two compressed forms begin.
const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// The largest window of zstd, as a power of two: 128 MiB of memory, which every level below --ultra
/// respects.
const MAX_WINDOW: u32 = 27;
/// How other compressed files begin, their names, and what unpacks them. A tar begins with the name of a
/// file.
const OTHERS: [(&[u8], &str, &str); 7] = [
    (b"\xfd7zXZ\0", "xz", "`unxz`"),
    (b"BZh", "bzip2", "`bunzip2`"),
    (b"\x04\x22\x4d\x18", "lz4", "`unlz4`"),
    (b"LZIP", "lzip", "`lzip -d`"),
    (b"\x1f\x9d", "compress", "`uncompress`"),
    (b"7z\xbc\xaf\x27\x1c", "7-Zip", "`7z x`"),
    (b"PK\x03\x04", "zip", "`unzip`"),
];

/// The most bytes before the data of an entry: its headers, and what says more about it. A reader has them in
/// memory.
const MAX_HEADERS: u64 = 1 << 20;
/// The most zeros behind the end of a tar: programs fill their last record.
const MAX_PADDING: u64 = 1 << 20;

/// The bytes of a tar.
pub(crate) struct ArchiveInput {
    bytes: Box<dyn Read>,
    ended: bool,
    limit: HeaderLimit,
}

/// Bounds what is read between the data of two entries.
#[derive(Debug, Clone)]
pub(crate) struct HeaderLimit(Rc<Cell<u64>>);

impl HeaderLimit {
    /// The next bytes are headers.
    pub(crate) fn set(&self) {
        self.0.set(MAX_HEADERS);
    }

    /// The next bytes are data.
    pub(crate) fn lift(&self) {
        self.0.set(u64::MAX);
    }
}

impl fmt::Debug for ArchiveInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ArchiveInput").field("ended", &self.ended).finish_non_exhaustive()
    }
}

impl ArchiveInput {
    /// Whether all bytes were read. The end of a tar is two blocks of zeros: a reader that has found them
    /// needs no more.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Reads what is behind the end of the tar: a compressed file has its checksum there, and it must be
    /// right.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        let (mut left, mut buffer) = (MAX_PADDING, [0; 4096]);
        loop {
            let read = match self.bytes.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                read => read?,
            };
            let padding =
                left.checked_sub(read as u64).filter(|_| buffer[..read].iter().all(|byte| *byte == 0));
            left = padding.ok_or_else(|| {
                io::Error::other(format!(
                    "bytes behind the end of the tar, expected at most {MAX_PADDING} zeros"
                ))
            })?;
        }
    }

    /// Returns the limit of its headers.
    pub(crate) fn limit(&self) -> HeaderLimit {
        self.limit.clone()
    }
}

impl Read for ArchiveInput {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.bytes.read(buffer)?;
        self.ended |= read == 0 && !buffer.is_empty();
        let limit = &self.limit.0;
        match limit.get() {
            u64::MAX => {}
            left => {
                let too_long = || io::Error::other(format!("headers of more than {MAX_HEADERS} bytes"));
                limit.set(left.checked_sub(read as u64).ok_or_else(too_long)?);
            }
        }
        Ok(read)
    }
}

/// Reads a file that may be compressed with gzip or zstd.
pub(crate) fn decompressed(mut file: BufReader<File>) -> io::Result<ArchiveInput> {
    let start = file.fill_buf()?;
    let bytes: Box<dyn Read> = if start.starts_with(&GZIP) {
        Box::new(MultiGzDecoder::new(file))
    } else if start.starts_with(&ZSTD) {
        let mut decoder = Decoder::with_buffer(file)?;
        decoder.window_log_max(MAX_WINDOW)?;
        Box::new(decoder)
    } else if let Some((_, name, program)) = OTHERS.iter().find(|(magic, ..)| start.starts_with(magic)) {
        return Err(io::Error::other(format!(
            "it is compressed with {name}: expected a tar, uncompressed or compressed with gzip or zstd; \
             {program} unpacks it"
        )));
    } else {
        Box::new(file)
    };
    let limit = HeaderLimit(Rc::new(Cell::new(u64::MAX)));
    Ok(ArchiveInput { bytes, ended: false, limit })
}
