// SPDX-License-Identifier: MIT OR Apache-2.0
//! Instructions of BPF programs (`Documentation/bpf/standardization/instruction-set.rst`), and jumps to
//! labels.

use crate::abi::Instruction;

/// A register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum BpfRegister {
    /// The result of a function.
    R0 = 0,
    /// R1 to R5: arguments, which a call overwrites.
    R1,
    R2,
    R3,
    R4,
    R5,
    /// R6 to R9: preserved by calls.
    R6 = 6,
    R7,
    R8,
    R9,
    /// The end of the stack.
    R10,
}

/// The bytes that are loaded or stored.
#[derive(Debug, Clone, Copy)]
#[repr(u8)]
pub(crate) enum Width {
    Word = 0x00,
    Double = 0x18,
}

/// The condition of a jump.
#[derive(Debug, Clone, Copy)]
#[repr(u8)]
pub(crate) enum When {
    Equal = 0x10,
    NotEqual = 0x50,
    /// Signed.
    AtMost = 0xd0,
    /// The register has a bit of the number.
    HasBit = 0x40,
}

/// A 64-bit operation on a register and a number.
#[derive(Debug, Clone, Copy)]
#[repr(u8)]
pub(crate) enum AluOp {
    Add = 0x00,
    And = 0x50,
    Set = 0xb0,
}

/// A kernel function, by its number in `bpf.h`.
#[derive(Debug, Clone, Copy)]
#[repr(i32)]
pub(crate) enum Helper {
    MapLookup = 1,
    MapUpdate = 2,
    MapDelete = 3,
    CopyFromUser = 148,
    CurrentTask = 158,
    FindVma = 180,
    Loop = 181,
}

/// The class of 64-bit operations with a number, or with [`SOURCE`] a register. For jumps, the 32-bit class.
const ALU64: u8 = 0x07;
const JUMP: u8 = 0x05;
const JUMP32: u8 = 0x06;
const LOAD: u8 = 0x61;
const STORE: u8 = 0x63;
const LOAD_IMMEDIATE: u8 = 0x18;
const SUBTRACT: u8 = 0x10;
const SOURCE: u8 = 0x08;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
/// The source of a LOAD_IMMEDIATE of a table's descriptor.
const PSEUDO_MAP: u8 = 1;
/// The source of a LOAD_IMMEDIATE of a function of the program.
const PSEUDO_FUNCTION: u8 = 4;

/// A label in the code.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Label(usize);

/// Code under construction.
#[derive(Debug, Default)]
pub(crate) struct Code {
    instructions: Vec<Instruction>,
    /// The positions of labels, once known.
    labels: Vec<Option<usize>>,
    /// Instructions that refer to labels.
    uses: Vec<(usize, Label)>,
}

impl Code {
    fn push(&mut self, code: u8, to: BpfRegister, from: u8, offset: i16, immediate: i32) {
        self.instructions.push(Instruction { code, registers: to as u8 | from << 4, offset, immediate });
    }

    /// Creates a label, which [`Code::here`] places.
    pub(crate) fn label(&mut self) -> Label {
        self.labels.push(None);
        Label(self.labels.len() - 1)
    }

    /// Places a label at the next instruction.
    pub(crate) fn here(&mut self, label: Label) {
        self.labels[label.0] = Some(self.instructions.len());
    }

    /// `to = from`.
    pub(crate) fn copy(&mut self, to: BpfRegister, from: BpfRegister) {
        self.push(ALU64 | SOURCE | AluOp::Set as u8, to, from as u8, 0, 0);
    }

    /// `to += from`.
    pub(crate) fn add(&mut self, to: BpfRegister, from: BpfRegister) {
        self.push(ALU64 | SOURCE | AluOp::Add as u8, to, from as u8, 0, 0);
    }

    /// `to &= from`.
    pub(crate) fn and(&mut self, to: BpfRegister, from: BpfRegister) {
        self.push(ALU64 | SOURCE | AluOp::And as u8, to, from as u8, 0, 0);
    }

    /// `to -= from`.
    pub(crate) fn subtract(&mut self, to: BpfRegister, from: BpfRegister) {
        self.push(ALU64 | SOURCE | SUBTRACT, to, from as u8, 0, 0);
    }

    /// Applies an operation with a number, which is sign-extended to 64 bits.
    pub(crate) fn with(&mut self, act: AluOp, to: BpfRegister, number: i32) {
        self.push(ALU64 | act as u8, to, 0, 0, number);
    }

    /// `to = *(from + offset)`.
    pub(crate) fn load(&mut self, width: Width, to: BpfRegister, from: BpfRegister, offset: i16) {
        self.push(LOAD | width as u8, to, from as u8, offset, 0);
    }

    /// `*(to + offset) = from`.
    pub(crate) fn store(&mut self, width: Width, to: BpfRegister, offset: i16, from: BpfRegister) {
        self.push(STORE | width as u8, to, from as u8, offset, 0);
    }

    /// `to = number`, of 64 bits.
    pub(crate) fn number(&mut self, to: BpfRegister, number: u64) {
        let [a, b, c, d, e, f, g, h] = number.to_le_bytes();
        self.push(LOAD_IMMEDIATE, to, 0, 0, i32::from_le_bytes([a, b, c, d]));
        self.push(0, BpfRegister::R0, 0, 0, i32::from_le_bytes([e, f, g, h]));
    }

    /// Loads the table with that descriptor into `to`.
    pub(crate) fn table(&mut self, to: BpfRegister, descriptor: u32) {
        self.push(LOAD_IMMEDIATE, to, PSEUDO_MAP, 0, descriptor.cast_signed());
        self.push(0, BpfRegister::R0, 0, 0, 0);
    }

    /// Loads the address of a stack slot into `to`.
    pub(crate) fn stack(&mut self, to: BpfRegister, place: i16) {
        self.copy(to, BpfRegister::R10);
        self.with(AluOp::Add, to, i32::from(place));
    }

    /// Loads the function at `label` into `to`.
    pub(crate) fn function(&mut self, to: BpfRegister, label: Label) {
        self.uses.push((self.instructions.len(), label));
        self.push(LOAD_IMMEDIATE, to, PSEUDO_FUNCTION, 0, 0);
        self.push(0, BpfRegister::R0, 0, 0, 0);
    }

    /// Calls the function at `label` R1 times, with the index and the stack address in R3.
    pub(crate) fn each(&mut self, label: Label) {
        self.function(BpfRegister::R2, label);
        self.with(AluOp::Set, BpfRegister::R4, 0);
        self.call(Helper::Loop);
    }

    pub(crate) fn jump(&mut self, label: Label) {
        self.uses.push((self.instructions.len(), label));
        self.push(JUMP, BpfRegister::R0, 0, 0, 0);
    }

    /// Jumps if the register's lower 32 bits meet the condition.
    pub(crate) fn jump_if(&mut self, when: When, left: BpfRegister, number: i32, label: Label) {
        self.uses.push((self.instructions.len(), label));
        self.push(JUMP32 | when as u8, left, 0, 0, number);
    }

    /// Jumps if all 64 bits meet the condition.
    pub(crate) fn jump_if_all(&mut self, when: When, left: BpfRegister, number: i32, label: Label) {
        self.uses.push((self.instructions.len(), label));
        self.push(JUMP | when as u8, left, 0, 0, number);
    }

    /// Jumps if two registers differ in any of their 64 bits.
    pub(crate) fn jump_if_other(&mut self, left: BpfRegister, right: BpfRegister, label: Label) {
        self.uses.push((self.instructions.len(), label));
        self.push(JUMP | SOURCE | When::NotEqual as u8, left, right as u8, 0, 0);
    }

    pub(crate) fn call(&mut self, helper: Helper) {
        self.push(CALL, BpfRegister::R0, 0, 0, helper as i32);
    }

    /// Returns `number` from the function.
    pub(crate) fn exit(&mut self, number: i32) {
        self.with(AluOp::Set, BpfRegister::R0, number);
        self.push(EXIT, BpfRegister::R0, 0, 0, 0);
    }

    /// Returns the code, and the positions of the `wanted` labels.
    ///
    /// # Panics
    /// A label has no position, or is too far away.
    pub(crate) fn finish<const N: usize>(mut self, wanted: [Label; N]) -> (Vec<Instruction>, [u32; N]) {
        let place = |label: Label| self.labels[label.0].expect("every label has a position");
        for (at, label) in &self.uses {
            let distance = place(*label).cast_signed() - at.cast_signed() - 1;
            let instruction = &mut self.instructions[*at];
            if instruction.code == LOAD_IMMEDIATE {
                instruction.immediate = i32::try_from(distance).expect("a short program");
            } else {
                instruction.offset = i16::try_from(distance).expect("a short program");
            }
        }
        let places = wanted.map(|label| u32::try_from(place(label)).expect("a short program"));
        (self.instructions, places)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jumps_go_to_their_labels() {
        let mut code = Code::default();
        let (back, end) = (code.label(), code.label());
        code.here(back);
        code.jump_if(When::Equal, BpfRegister::R2, 7, end);
        code.each(end);
        code.jump(back);
        code.here(end);
        code.exit(0);
        let (code, places) = code.finish([back, end]);
        assert_eq!(places, [0, 6]);
        assert_eq!(code[0], Instruction { code: 0x16, registers: 2, offset: 5, immediate: 7 });
        assert_eq!(code[1], Instruction { code: 0x18, registers: 0x42, offset: 0, immediate: 4 });
        assert_eq!(code[4], Instruction { code: 0x85, registers: 0, offset: 0, immediate: 181 });
        assert_eq!(code[5], Instruction { code: 0x05, registers: 0, offset: -6, immediate: 0 });
        assert_eq!(code[6], Instruction { code: 0xb7, registers: 0, offset: 0, immediate: 0 });
        assert_eq!(code[7].code, 0x95);
    }

    #[test]
    fn tables_and_numbers_have_different_sources() {
        let mut code = Code::default();
        let end = code.label();
        code.table(BpfRegister::R1, 9);
        code.number(BpfRegister::R2, 0xfedc_ba98_7654_3210);
        code.jump_if_other(BpfRegister::R1, BpfRegister::R2, end);
        code.subtract(BpfRegister::R1, BpfRegister::R2);
        code.and(BpfRegister::R1, BpfRegister::R7);
        code.here(end);
        let (code, []) = code.finish([]);
        assert_eq!(code[0], Instruction { code: 0x18, registers: 0x11, offset: 0, immediate: 9 });
        assert_eq!(code[1], Instruction { code: 0, registers: 0, offset: 0, immediate: 0 });
        assert_eq!(code[2], Instruction { code: 0x18, registers: 0x02, offset: 0, immediate: 0x7654_3210 });
        assert_eq!(code[3].immediate.cast_unsigned(), 0xfedc_ba98);
        assert_eq!(code[4], Instruction { code: 0x5d, registers: 0x21, offset: 2, immediate: 0 });
        assert_eq!(code[5], Instruction { code: 0x1f, registers: 0x21, offset: 0, immediate: 0 });
        assert_eq!(code[6], Instruction { code: 0x5f, registers: 0x71, offset: 0, immediate: 0 });
    }

    #[test]
    fn memory_is_addressed_by_register_and_offset() {
        let mut code = Code::default();
        code.load(Width::Double, BpfRegister::R6, BpfRegister::R10, -8);
        code.store(Width::Word, BpfRegister::R10, -16, BpfRegister::R7);
        let (code, []) = code.finish([]);
        assert_eq!(code[0], Instruction { code: 0x79, registers: 0xa6, offset: -8, immediate: 0 });
        assert_eq!(code[1], Instruction { code: 0x63, registers: 0x7a, offset: -16, immediate: 0 });
    }
}
