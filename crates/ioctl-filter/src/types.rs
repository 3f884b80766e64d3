// SPDX-License-Identifier: MIT OR Apache-2.0
//! The type of the program's functions. Without it the kernel lets no loop call a function
//! (`Documentation/bpf/btf.rst`).

/// Types by number.
const INT: u32 = 1;
const POINTER: u32 = 2;
const PROTO: u32 = 3;
/// A static function `int (void *)`. The kernel knows the arguments of the program and of its callbacks
/// itself.
pub(crate) const FUNCTION: u32 = 4;

/// The names, each at its offset.
const NAMES: &[u8; NAMES_BYTES as usize] = b"\0int\0rewake_filter\0a\0";
const NAMES_BYTES: u32 = 21;
const NAME_INT: u32 = 1;
const NAME_FILTER: u32 = 5;
const NAME_A: u32 = 19;

const KIND_INT: u32 = 1 << 24;
const KIND_POINTER: u32 = 2 << 24;
const KIND_FUNCTION: u32 = 12 << 24;
const KIND_PROTO: u32 = 13 << 24;
const SIGNED_32: u32 = 1 << 24 | 32;

/// The four types, each with its name, its kind and its size or type first.
const BODY: [&[u32]; 4] = [
    &[NAME_INT, KIND_INT, 4, SIGNED_32],
    &[0, KIND_POINTER, 0],
    &[0, KIND_PROTO | 1, INT, NAME_A, POINTER],
    &[NAME_FILTER, KIND_FUNCTION, PROTO],
];
const BODY_BYTES: u32 = 60;

/// Magic and version; length of the header; offset and length of types, and of names.
const HEADER: [u32; 6] = [0x0001_eb9f, 24, 0, BODY_BYTES, BODY_BYTES, NAMES_BYTES];

/// Returns the complete BTF.
pub(crate) fn btf() -> Vec<u8> {
    let words = HEADER.iter().chain(BODY.into_iter().flatten());
    words.flat_map(|word| word.to_ne_bytes()).chain(*NAMES).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_lengths_are_right() {
        let name = |at: u32| NAMES[at as usize..].split(|byte| *byte == 0).next().unwrap();
        let names: Vec<&[u8]> = [NAME_INT, NAME_FILTER, NAME_A].map(name).to_vec();
        assert_eq!(names, [&b"int"[..], b"rewake_filter", b"a"]);
        assert_eq!(btf().len(), HEADER.len() * 4 + (BODY_BYTES + NAMES_BYTES) as usize);
    }
}
