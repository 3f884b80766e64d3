// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the mappings of a process from `/proc/PID/maps`.

use std::fs;

use rewake_process::maps::Mapping;
use rewake_process::names::lines;

use crate::abi::Tid;
use crate::error::Error;

/// A mapping. Addresses and offsets are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MapsEntry {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// The current `PROT_*`.
    pub(crate) protection: i32,
    pub(crate) executable: bool,
    pub(crate) shared: bool,
    /// The offset of its start in the file.
    pub(crate) offset: u64,
    /// The file, or [`NO_FILE`] for anonymous memory.
    pub(crate) file: FileId,
    /// Whether it is the vdso, the kernel's code for programs.
    pub(crate) vdso: bool,
}

/// The identity of a file: device (as `makedev`) and inode.
pub(crate) type FileId = (u64, u64);

pub(crate) const NO_FILE: FileId = (0, 0);

/// Returns all mappings, by address.
///
/// # Errors
/// [`Error::Ended`] also for a process that is ending, and has no memory any more.
pub(crate) fn read(pid: Tid) -> Result<Vec<MapsEntry>, Error> {
    let path = format!("/proc/{pid}/maps");
    let text = fs::read(&path).map_err(|source| match source.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH) => Error::Ended { pid },
        _ => Error::read(&path)(source),
    })?;
    Ok(lines(&text).filter_map(Mapping::parse).map(|mapping| MapsEntry::of(&mapping)).collect())
}

impl MapsEntry {
    fn of(mapping: &Mapping<'_>) -> Self {
        let protection = [
            (mapping.is_readable(), libc::PROT_READ),
            (mapping.is_writable(), libc::PROT_WRITE),
            (mapping.is_executable(), libc::PROT_EXEC),
        ];
        let protection = protection.iter().filter(|(has, _)| *has);
        let (major, minor) = mapping.device;
        Self {
            start: mapping.start,
            end: mapping.end,
            protection: protection.fold(0, |all, (_, bit)| all | bit),
            executable: mapping.is_executable(),
            shared: mapping.is_shared(),
            offset: mapping.offset,
            file: (libc::makedev(major, minor), mapping.inode),
            vdso: mapping.name == b"[vdso]",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_without_memory_has_ended() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let pid = child.id().cast_signed();
        assert!(!read(pid).unwrap().is_empty());
        child.kill().unwrap();
        // It is a zombie soon, and is reaped at last.
        let ended = |read: Result<Vec<MapsEntry>, Error>| match read {
            Ok(mappings) => mappings.is_empty(),
            Err(error) => matches!(error, Error::Ended { .. }),
        };
        while !ended(read(pid)) {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(matches!(read(pid), Err(Error::Ended { .. })));
    }

    fn parse(line: &[u8]) -> MapsEntry {
        MapsEntry::of(&Mapping::parse(line).unwrap())
    }

    #[test]
    fn a_line_is_a_mapping() {
        let line = b"7f0000001000-7f0000003000 r--s 00002000 00:01 2057                       /memfd:a \xff \
                (deleted)";
        let mapping = parse(line);
        assert_eq!((mapping.start, mapping.end), (0x7f00_0000_1000, 0x7f00_0000_3000));
        assert_eq!((mapping.protection, mapping.shared, mapping.offset), (libc::PROT_READ, true, 0x2000));
        assert_eq!(mapping.file, (libc::makedev(0, 1), 2057));
        assert!(!mapping.vdso && !mapping.executable);
    }

    #[test]
    fn anonymous_memory_has_no_file() {
        let mapping = parse(b"10000-11000 ---p 00000000 00:00 0 ");
        assert_eq!((mapping.protection, mapping.shared, mapping.file), (0, false, NO_FILE));
    }

    #[test]
    fn this_process_has_a_vdso_with_code() {
        let mappings = read(std::process::id().try_into().unwrap()).unwrap();
        assert!(mappings.iter().any(|mapping| mapping.vdso && mapping.executable));
    }
}
