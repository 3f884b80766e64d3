// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the running kernel's types (BTF, `Documentation/bpf/btf.rst`): the hooks' functions, and the offsets
//! of the struct fields that the programs read.

use crate::Error;
use crate::offsets::Offsets;

/// The file with the kernel's types.
pub(crate) const PATH: &str = "/sys/kernel/btf/vmlinux";

/// The functions of the hooks.
const IOCTL_HOOK: &[u8] = b"bpf_lsm_file_ioctl";
const PROTECT_HOOK: &[u8] = b"bpf_lsm_file_mprotect";

const HEADER: usize = 24;
const MAGIC: u32 = 0x0001_eb9f;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
const FUNCTION: u32 = 12;
/// The deepest nesting of unnamed members that is searched.
const MAX_DEPTH: u32 = 4;

/// The fields that the programs read: struct and name.
const FIELDS: [(&str, &str); 8] = [
    ("file", "f_inode"),
    ("file", "private_data"),
    ("inode", "i_rdev"),
    ("vm_area_struct", "vm_file"),
    ("vm_area_struct", "vm_flags"),
    ("vm_area_struct", "vm_end"),
    ("task_struct", "pending"),
    ("sigpending", "signal"),
];

/// The types and offsets that the programs need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KernelTypes {
    /// The type numbers of the hooks' functions.
    pub(crate) ioctl_hook: u32,
    pub(crate) protect_hook: u32,
    pub(crate) offsets: Offsets,
}

/// All types, and their offsets.
struct Types<'a> {
    bytes: &'a [u8],
    names: &'a [u8],
    /// The offset of each type, by number minus 1.
    starts: Vec<usize>,
}

/// Finds what the programs need in all types.
pub(crate) fn find(btf: &[u8]) -> Result<KernelTypes, Error> {
    let types = Types::read(btf)?;
    let (mut ioctl_hook, mut protect_hook) = (None, None);
    let mut found = [None; FIELDS.len()];
    for (id, at) in (1_u32..).zip(&types.starts) {
        match (types.kind(*at)?, types.name(*at)?) {
            (FUNCTION, IOCTL_HOOK) => ioctl_hook = Some(id),
            (FUNCTION, PROTECT_HOOK) => protect_hook = Some(id),
            (STRUCT, name) => {
                for ((of, field), found) in FIELDS.iter().zip(&mut found) {
                    if found.is_none() && of.as_bytes() == name {
                        *found = types.member(*at, field.as_bytes(), MAX_DEPTH)?;
                    }
                }
            }
            _ => {}
        }
    }
    let ioctl_hook = ioctl_hook.ok_or(Error::NoHook("bpf_lsm_file_ioctl"))?;
    let protect_hook = protect_hook.ok_or(Error::NoHook("bpf_lsm_file_mprotect"))?;
    let mut all = [0; FIELDS.len()];
    for (((of, field), found), to) in FIELDS.into_iter().zip(found).zip(&mut all) {
        *to = found.ok_or(Error::NoField { field, of })?;
    }
    let [inode, private, device, mapped, flags, end, pending, signals] = all;
    let signals = pending.checked_add(signals).ok_or(Error::Types("struct task_struct is too large"))?;
    let offsets = Offsets { inode, private, device, mapped, flags, end, signals };
    Ok(KernelTypes { ioctl_hook, protect_hook, offsets })
}

impl<'a> Types<'a> {
    fn read(btf: &'a [u8]) -> Result<Self, Error> {
        let header = |at: usize| word(btf, 4 * at).map(|word| word as usize);
        if word(btf, 0)? & 0x00ff_ffff != MAGIC {
            return Err(Error::Types("no BTF of version 1 in this machine's byte order"));
        }
        let part = |offset: usize, length: usize| {
            let start = header(1)?.checked_add(offset).ok_or(TRUNCATED)?;
            btf.get(start..start.checked_add(length).ok_or(TRUNCATED)?).ok_or(TRUNCATED)
        };
        if header(1)? < HEADER {
            return Err(TRUNCATED);
        }
        let (bytes, names) = (part(header(2)?, header(3)?)?, part(header(4)?, header(5)?)?);
        let mut types = Self { bytes, names, starts: Vec::new() };
        let mut at = 0;
        while at < bytes.len() {
            types.starts.push(at);
            at += 12 + trailing(types.kind(at)?, types.members(at)?)?;
        }
        Ok(types)
    }

    fn name(&self, at: usize) -> Result<&'a [u8], Error> {
        Ok(name(self.names, word(self.bytes, at)?))
    }

    fn kind(&self, at: usize) -> Result<u32, Error> {
        Ok(word(self.bytes, at + 4)? >> 24 & 0x1f)
    }

    fn members(&self, at: usize) -> Result<usize, Error> {
        Ok(word(self.bytes, at + 4)? as usize & 0xffff)
    }

    /// Returns the offset of a member of a struct or union in bytes, also of a member of an unnamed member.
    fn member(&self, of: usize, wanted: &[u8], deep: u32) -> Result<Option<i16>, Error> {
        // With this flag, the upper byte is the width of a bit-field.
        let mask = if word(self.bytes, of + 4)? >> 31 == 1 { 0x00ff_ffff } else { u32::MAX };
        for number in 0..self.members(of)? {
            let at = of + 12 + 12 * number;
            let start = i16::try_from((word(self.bytes, at + 8)? & mask) / 8).ok();
            let called = self.name(at)?;
            if called == wanted {
                return Ok(start);
            }
            let id = word(self.bytes, at + 4)? as usize;
            if called.is_empty()
                && deep > 0
                && let Some(inner) = id.checked_sub(1).and_then(|index| self.starts.get(index))
                && matches!(self.kind(*inner)?, STRUCT | UNION)
                && let Some(within) = self.member(*inner, wanted, deep - 1)?
            {
                return Ok(start.and_then(|start| start.checked_add(within)));
            }
        }
        Ok(None)
    }
}

const TRUNCATED: Error = Error::Types("it ends too early");

/// Returns the bytes that follow the three words of a type.
fn trailing(kind: u32, count: usize) -> Result<usize, Error> {
    Ok(match kind {
        // Pointers, forward declarations, typedefs, qualifiers, functions, floats, type tags.
        2 | 7..=12 | 16 | 18 => 0,
        // Integers, variables, declaration tags.
        1 | 14 | 17 => 4,
        // Enumerations of 4 bytes, and prototypes.
        6 | 13 => 8 * count,
        3 => 12,
        // Structs and unions, sections, enumerations of 8 bytes.
        4 | 5 | 15 | 19 => 12 * count,
        _ => return Err(Error::Types("it has types of a kind that is not known here")),
    })
}

fn word(bytes: &[u8], at: usize) -> Result<u32, Error> {
    let word = at.checked_add(4).and_then(|end| bytes.get(at..end)).and_then(|word| word.try_into().ok());
    word.map(u32::from_ne_bytes).ok_or(TRUNCATED)
}

fn name(names: &[u8], at: u32) -> &[u8] {
    let rest = names.get(at as usize..).unwrap_or_default();
    rest.split(|byte| *byte == 0).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Creates types with hooks as numbers 7 and 8, after a struct with a bit-field, and one with a member in
    /// an unnamed union.
    fn btf(hook: &str) -> Vec<u8> {
        let fields = FIELDS.into_iter().flat_map(|(of, field)| [of, field]);
        let names: String =
            fields.chain([hook, "bpf_lsm_file_mprotect"]).map(|name| format!("\0{name}")).collect();
        let names = names + "\0";
        let at = |name: &str| u32::try_from(names.find(&format!("\0{name}\0")).unwrap() + 1).unwrap();
        let member = |name: u32, id: u32, bits: u32| [name, id, bits];
        let types = [
            vec![at("file"), STRUCT << 24 | 2, 48],
            [member(at("f_inode"), 0, 256), member(at("private_data"), 0, 320)].concat(),
            vec![at("inode"), STRUCT << 24 | 1 << 31 | 2, 80],
            [member(0, 0, 3 << 24), member(at("i_rdev"), 0, 32 << 24 | 608)].concat(),
            vec![0, UNION << 24 | 1, 8],
            member(at("vm_flags"), 0, 0).to_vec(),
            vec![at("vm_area_struct"), STRUCT << 24 | 3, 96],
            [member(at("vm_end"), 0, 64), member(0, 3, 128), member(at("vm_file"), 0, 640)].concat(),
            vec![at("task_struct"), STRUCT << 24 | 1, 4000],
            member(at("pending"), 0, 7040).to_vec(),
            vec![at("sigpending"), STRUCT << 24 | 1, 24],
            member(at("signal"), 0, 128).to_vec(),
            vec![at(hook), FUNCTION << 24, 3],
            vec![at("bpf_lsm_file_mprotect"), FUNCTION << 24, 3],
        ]
        .concat();
        let (types_len, names_len) =
            (u32::try_from(types.len() * 4).unwrap(), u32::try_from(names.len()).unwrap());
        let header = [MAGIC, 24, 0, types_len, types_len, names_len];
        let words = header.iter().chain(&types).flat_map(|word| word.to_ne_bytes());
        words.chain(names.bytes()).collect()
    }

    #[test]
    fn the_hooks_and_the_members_are_found() {
        let offsets =
            Offsets { inode: 32, private: 40, device: 76, mapped: 80, flags: 16, end: 8, signals: 896 };
        let found = find(&btf("bpf_lsm_file_ioctl")).unwrap();
        assert_eq!(found, KernelTypes { ioctl_hook: 7, protect_hook: 8, offsets });
    }

    #[test]
    fn a_missing_hook_is_reported() {
        let error = find(&btf("bpf_lsm_file_close")).unwrap_err().to_string();
        assert_eq!(error, "the kernel has no function bpf_lsm_file_ioctl: it needs CONFIG_BPF_LSM");
    }

    #[test]
    fn a_missing_field_is_not_reported_as_a_missing_hook() {
        let renamed = |field: &str| {
            let mut btf = btf("bpf_lsm_file_ioctl");
            let name = format!("\0{field}\0");
            let at = btf.windows(name.len()).position(|bytes| bytes == name.as_bytes()).unwrap();
            btf[at + 1] = b'_';
            find(&btf).unwrap_err().to_string()
        };
        for (of, field) in FIELDS {
            let error = renamed(field);
            let wanted = format!("the kernel has no {field} in struct {of}, as ");
            assert!(error.starts_with(&wanted) && !error.contains("CONFIG"), "{error}");
        }
        assert!(renamed("bpf_lsm_file_mprotect").contains("it needs CONFIG_BPF_LSM"));
    }

    #[test]
    fn the_running_kernels_types_can_be_read() {
        match std::fs::read(PATH) {
            Ok(btf) => match find(&btf) {
                Ok(KernelTypes { offsets, .. }) => {
                    let Offsets { inode, private, device, mapped, flags, end, signals } = offsets;
                    let all = [inode, private, device, mapped, flags, end, signals];
                    assert!(all.into_iter().all(|offset| offset > 0), "{all:?}");
                }
                Err(error) => assert!(matches!(error, Error::NoHook(_)), "{error}"),
            },
            Err(error) => rewake_skip::report(format_args!("{PATH}: {error}")),
        }
    }

    proptest! {
        #[test]
        fn damaged_types_are_refused_or_read(at in 0_usize..400, bytes: [u8; 4], end in 0_usize..600) {
            let mut btf = btf("bpf_lsm_file_ioctl");
            let at = at.min(btf.len() - 4);
            btf[at..at + 4].copy_from_slice(&bytes);
            btf.truncate(end);
            let _ = find(&btf);
        }
    }
}
