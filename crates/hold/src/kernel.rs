// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the running kernel's own types tell (BTF, `Documentation/bpf/btf.rst`): the hook's function, and where its structs have what
//! the program looks at.

use crate::Error;

/// Where it tells them.
pub(crate) const PATH: &str = "/sys/kernel/btf/vmlinux";

/// The function that stands for the hook.
const HOOK: &[u8] = b"bpf_lsm_file_ioctl";

const HEADER: usize = 24;
const MAGIC: u32 = 0x0001_eb9f;
const STRUCT: u32 = 4;
const FUNCTION: u32 = 12;

/// What was looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Found {
    /// The type of the hook's function.
    pub(crate) hook: u32,
    /// Bytes before `f_inode` in `struct file`.
    pub(crate) file_inode: i16,
    /// Bytes before `private_data` in `struct file`.
    pub(crate) file_private: i16,
    /// Bytes before `i_rdev` in `struct inode`.
    pub(crate) inode_device: i16,
}

/// Looks through all types.
pub(crate) fn find(btf: &[u8]) -> Result<Found, Error> {
    let header = |at: usize| word(btf, 4 * at).map(|word| word as usize);
    if word(btf, 0)? & 0x00ff_ffff != MAGIC {
        return Err(Error::Types("no BTF of version 1 in this machine's byte order"));
    }
    let part = |offset: usize, length: usize| {
        let start = header(1)?.checked_add(offset).ok_or(CUT)?;
        btf.get(start..start.checked_add(length).ok_or(CUT)?).ok_or(CUT)
    };
    if header(1)? < HEADER {
        return Err(CUT);
    }
    let types = part(header(2)?, header(3)?)?;
    let names = part(header(4)?, header(5)?)?;
    let (mut hook, mut file_inode, mut file_private, mut inode_device) = (None, None, None, None);
    let mut at = 0;
    let mut id = 1_u32;
    while at < types.len() {
        let (name, info) = (name(names, word(types, at)?), word(types, at + 4)?);
        let (kind, count) = (info >> 24 & 0x1f, info as usize & 0xffff);
        let body = at + 12;
        match (kind, name) {
            (FUNCTION, HOOK) => hook = Some(id),
            (STRUCT, b"file") => {
                file_inode = member(types, names, body, info, b"f_inode")?.or(file_inode);
                file_private = member(types, names, body, info, b"private_data")?.or(file_private);
            }
            (STRUCT, b"inode") => {
                inode_device = member(types, names, body, info, b"i_rdev")?.or(inode_device);
            }
            _ => {}
        }
        at = body + trailing(kind, count)?;
        id += 1;
    }
    Ok(Found {
        hook: hook.ok_or(Error::Missing("function bpf_lsm_file_ioctl"))?,
        file_inode: file_inode.ok_or(Error::Missing("f_inode in struct file"))?,
        file_private: file_private.ok_or(Error::Missing("private_data in struct file"))?,
        inode_device: inode_device.ok_or(Error::Missing("i_rdev in struct inode"))?,
    })
}

const CUT: Error = Error::Types("it ends too early");

/// Bytes that follow the three words of a type.
fn trailing(kind: u32, count: usize) -> Result<usize, Error> {
    Ok(match kind {
        // Pointers, forward declarations, names of types, qualifiers, functions, floats, tags of types.
        2 | 7..=12 | 16 | 18 => 0,
        // Integers, variables, tags of declarations.
        1 | 14 | 17 => 4,
        // Enumerations, of 4 bytes; prototypes.
        6 | 13 => 8 * count,
        3 => 12,
        // Structs and unions, sections, enumerations of 8 bytes.
        4 | 5 | 15 | 19 => 12 * count,
        _ => return Err(Error::Types("it has types of a kind that is not known here")),
    })
}

/// Where a struct has a member, in bytes.
fn member(types: &[u8], names: &[u8], body: usize, info: u32, wanted: &[u8]) -> Result<Option<i16>, Error> {
    for number in 0..info as usize & 0xffff {
        let at = body + 12 * number;
        if name(names, word(types, at)?) == wanted {
            let bits = word(types, at + 8)?;
            // With the flag the upper byte is a bit-field's width.
            let bits = if info >> 31 == 1 { bits & 0x00ff_ffff } else { bits };
            return Ok(i16::try_from(bits / 8).ok());
        }
    }
    Ok(None)
}

fn word(bytes: &[u8], at: usize) -> Result<u32, Error> {
    let word = at.checked_add(4).and_then(|end| bytes.get(at..end)).and_then(|word| word.try_into().ok());
    word.map(u32::from_ne_bytes).ok_or(CUT)
}

fn name(names: &[u8], at: u32) -> &[u8] {
    let rest = names.get(at as usize..).unwrap_or_default();
    rest.split(|byte| *byte == 0).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// With a hook that is type 4, behind a struct with a bit-field.
    fn btf(hook: &str) -> Vec<u8> {
        let names = format!("\0file\0f_inode\0private_data\0inode\0i_rdev\0{hook}\0");
        let at = |name: &str| u32::try_from(names.find(&format!("\0{name}\0")).unwrap() + 1).unwrap();
        let types = [
            at("file"),
            STRUCT << 24 | 2,
            48,
            at("f_inode"),
            0,
            256,
            at("private_data"),
            0,
            320, //
            at("inode"),
            STRUCT << 24 | 1 << 31 | 2,
            80,
            0,
            0,
            3 << 24,
            at("i_rdev"),
            0,
            32 << 24 | 608, //
            0,
            13 << 24 | 1,
            0,
            0,
            0, //
            at(hook),
            FUNCTION << 24,
            3,
        ];
        let (types_len, names_len) =
            (u32::try_from(types.len() * 4).unwrap(), u32::try_from(names.len()).unwrap());
        let header = [MAGIC, 24, 0, types_len, types_len, names_len];
        let words = header.iter().chain(&types).flat_map(|word| word.to_ne_bytes());
        words.chain(names.bytes()).collect()
    }

    #[test]
    fn the_hook_and_the_members_are_found() {
        let found = find(&btf("bpf_lsm_file_ioctl")).unwrap();
        assert_eq!(found, Found { hook: 4, file_inode: 32, file_private: 40, inode_device: 76 });
    }

    #[test]
    fn a_kernel_without_the_hook_is_told() {
        let error = find(&btf("bpf_lsm_file_close")).unwrap_err().to_string();
        assert_eq!(error, "the kernel has no function bpf_lsm_file_ioctl: it needs CONFIG_BPF_LSM");
    }

    #[test]
    fn this_machine_s_kernel_can_be_read() {
        match std::fs::read(PATH) {
            Ok(btf) => match find(&btf) {
                Ok(found) => {
                    let all = [found.file_inode, found.file_private, found.inode_device];
                    assert!(all.into_iter().all(|offset| offset > 0), "{found:?}");
                }
                Err(error) => assert!(matches!(error, Error::Missing(_)), "{error}"),
            },
            Err(error) => eprintln!("not tried: {PATH}: {error}"),
        }
    }

    proptest! {
        #[test]
        fn damaged_types_are_refused_or_read(at in 0_usize..200, bytes: [u8; 4], end in 0_usize..300) {
            let mut btf = btf("bpf_lsm_file_ioctl");
            let at = at.min(btf.len() - 4);
            btf[at..at + 4].copy_from_slice(&bytes);
            btf.truncate(end);
            let _ = find(&btf);
        }
    }
}
