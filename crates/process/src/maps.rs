// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lines of `/proc/PID/maps`, and the first line of each mapping in `smaps` (`fs/proc/task_mmu.c:
//! show_map_vma`).

/// A mapping. Addresses and offsets are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapping<'a> {
    /// The first address.
    pub start: u64,
    /// The first address after it.
    pub end: u64,
    /// `r`, `w` and `x`, or `-` in their places, and `p` for a private mapping, else `s`.
    rights: [u8; 4],
    /// The offset of its start in the file.
    pub offset: u64,
    /// The major and minor number of the file's device; 0 for anonymous memory.
    pub device: (u32, u32),
    /// The file's inode; 0 for anonymous memory.
    pub inode: u64,
    /// The path of the file, or what the memory is for, such as `[heap]`. It has any bytes, but for newlines.
    pub name: &'a [u8],
}

impl<'a> Mapping<'a> {
    /// Reads the line that begins a mapping. Other lines of `smaps` give `None`.
    #[must_use]
    pub fn parse(line: &'a [u8]) -> Option<Self> {
        let mut fields = line.splitn(6, |byte| *byte == b' ');
        let mut text = || str::from_utf8(fields.next()?).ok();
        let (start, end) = text()?.split_once('-')?;
        let rights = text()?.as_bytes().try_into().ok()?;
        let offset = hex(text()?)?;
        let (major, minor) = text()?.split_once(':')?;
        let device = (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
        let inode = text()?.parse().ok()?;
        let name = fields.next().unwrap_or_default().trim_ascii_start();
        Some(Self { start: hex(start)?, end: hex(end)?, rights, offset, device, inode, name })
    }

    /// Whether the memory can be read.
    #[must_use]
    pub fn is_readable(&self) -> bool {
        self.rights[0] == b'r'
    }

    /// Whether the memory can be written.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.rights[1] == b'w'
    }

    /// Whether the memory can be executed.
    #[must_use]
    pub fn is_executable(&self) -> bool {
        self.rights[2] == b'x'
    }

    /// Whether what is written is seen by others that map the same.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.rights[3] == b's'
    }
}

fn hex(digits: &str) -> Option<u64> {
    u64::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_line_is_a_mapping() {
        let line =
            b"7f0000001000-7f0000003000 r-xs 00002000 00:01 2057                       /memfd:a b (deleted)";
        let mapping = Mapping::parse(line).unwrap();
        assert_eq!((mapping.start, mapping.end), (0x7f00_0000_1000, 0x7f00_0000_3000));
        assert_eq!((mapping.offset, mapping.device, mapping.inode), (0x2000, (0, 1), 2057));
        assert_eq!(mapping.name, b"/memfd:a b (deleted)");
        let rights =
            [mapping.is_readable(), mapping.is_writable(), mapping.is_executable(), mapping.is_shared()];
        assert_eq!(rights, [true, false, true, true]);
    }

    #[test]
    fn anonymous_memory_has_no_name() {
        for line in [&b"10000-11000 ---p 00000000 00:00 0"[..], b"10000-11000 ---p 00000000 00:00 0 "] {
            let mapping = Mapping::parse(line).unwrap();
            assert_eq!((mapping.inode, mapping.name, mapping.is_readable()), (0, &b""[..], false));
        }
    }

    #[test]
    fn other_lines_of_smaps_begin_no_mapping() {
        for line in [&b""[..], b"Size:                  8 kB", b"VmFlags: rd wr mr um sd"] {
            assert_eq!(Mapping::parse(line), None);
        }
    }

    proptest! {
        #[test]
        fn a_name_of_any_bytes_changes_no_other_field(name in proptest::collection::vec(any::<u8>(), 0..99)) {
            let line = [&b"10000-12000 rw-p 00003000 08:01 77   "[..], &name].concat();
            let mapping = Mapping::parse(&line).unwrap();
            let plain = Mapping::parse(b"10000-12000 rw-p 00003000 08:01 77   ").unwrap();
            prop_assert_eq!(mapping, Mapping { name: name.trim_ascii_start(), ..plain });
        }
    }
}
