// SPDX-License-Identifier: MIT OR Apache-2.0
//! The types of the program's functions. Without them the kernel lets no loop call a function
//! (`Documentation/bpf/btf.rst`).

/// Types by number.
const INT: u32 = 1;
const POINTER: u32 = 2;
const HOOK_PROTO: u32 = 3;
/// The program.
pub(crate) const HOOK: u32 = 4;
const EACH_PROTO: u32 = 5;
/// Its other, static functions, which loops call.
pub(crate) const ROUND: u32 = 6;
pub(crate) const PROBE: u32 = 7;

/// The names, each at its offset.
const NAMES: &[u8; NAMES_BYTES as usize] = b"\0int\0hook\0probe\0a\0b\0round\0";
const NAMES_BYTES: u32 = 26;
const NAME_INT: u32 = 1;
const NAME_HOOK: u32 = 5;
const NAME_PROBE: u32 = 10;
const NAME_A: u32 = 16;
const NAME_B: u32 = 18;
const NAME_ROUND: u32 = 20;

const KIND_INT: u32 = 1 << 24;
const KIND_POINTER: u32 = 2 << 24;
const KIND_FUNCTION: u32 = 12 << 24;
const KIND_PROTO: u32 = 13 << 24;
/// The linkage in a function's length field; 0 is static.
const GLOBAL: u32 = 1;
const SIGNED_32: u32 = 1 << 24 | 32;

/// The seven types.
const BODY: [u32; 28] = [
    NAME_INT,
    KIND_INT,
    4,
    SIGNED_32, //
    0,
    KIND_POINTER,
    0, //
    0,
    KIND_PROTO | 1,
    INT,
    NAME_A,
    POINTER, //
    NAME_HOOK,
    KIND_FUNCTION | GLOBAL,
    HOOK_PROTO, //
    0,
    KIND_PROTO | 2,
    INT,
    NAME_A,
    INT,
    NAME_B,
    POINTER, //
    NAME_ROUND,
    KIND_FUNCTION,
    EACH_PROTO, //
    NAME_PROBE,
    KIND_FUNCTION,
    EACH_PROTO,
];

/// Magic and version; length of the header; offset and length of types, and of names.
const HEADER: [u32; 6] = [0x0001_eb9f, 24, 0, BODY_BYTES, BODY_BYTES, NAMES_BYTES];
const BODY_BYTES: u32 = 112;
const HEADER_LENGTH: usize = 4 * HEADER.len();
const LENGTH: usize = HEADER_LENGTH + 4 * BODY.len() + NAMES.len();
const _: () = assert!(BODY_BYTES as usize == 4 * BODY.len());

/// The complete BTF.
pub(crate) static TYPES: [u8; LENGTH] = bytes();

const fn bytes() -> [u8; LENGTH] {
    let mut all = [0; LENGTH];
    put(&mut all, 0, &HEADER);
    put(&mut all, HEADER_LENGTH, &BODY);
    let names = LENGTH - NAMES.len();
    let mut at = 0;
    while at < NAMES.len() {
        all[names + at] = NAMES[at];
        at += 1;
    }
    all
}

const fn put(all: &mut [u8], start: usize, words: &[u32]) {
    let mut word = 0;
    while word < words.len() {
        let bytes = words[word].to_ne_bytes();
        let mut byte = 0;
        while byte < 4 {
            all[start + 4 * word + byte] = bytes[byte];
            byte += 1;
        }
        word += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_begin_at_their_offsets() {
        let name = |at: u32| NAMES[at as usize..].split(|byte| *byte == 0).next().unwrap();
        let names: Vec<&[u8]> =
            [NAME_INT, NAME_HOOK, NAME_PROBE, NAME_A, NAME_B, NAME_ROUND].map(name).to_vec();
        assert_eq!(names, [&b"int"[..], b"hook", b"probe", b"a", b"b", b"round"]);
    }
}
