// SPDX-License-Identifier: MIT OR Apache-2.0
//! The program for mprotect. It refuses to add access to an inaccessible mapping of a blocked file.

use crate::CallClass;
use crate::abi::Instruction;
use crate::code::BpfRegister::{R1, R2, R3, R6, R7, R8, R10};
use crate::code::{AluOp, Code, When, Width};
use crate::offsets::Offsets;
use crate::program::{PART, check_block_list};

/// PROT_READ, PROT_WRITE and PROT_EXEC, and VM_READ, VM_WRITE and VM_EXEC: the same bits.
const RIGHTS: i32 = 7;

/// Returns the program, which checks `class` in part 0.
pub(crate) fn code(offsets: &Offsets, block_table: u32, class: CallClass) -> Vec<Instruction> {
    let mut code = Code::default();
    let end = code.label();
    // int file_mprotect(struct vm_area_struct *vma, unsigned long reqprot, unsigned long prot)
    code.load(Width::Double, R2, R1, 0);
    code.load(Width::Double, R8, R1, 16);
    code.with(AluOp::And, R8, RIGHTS);
    code.jump_if_all(When::Equal, R8, 0, end);
    code.load(Width::Double, R3, R2, offsets.flags);
    code.with(AluOp::And, R3, RIGHTS);
    code.jump_if_all(When::NotEqual, R3, 0, end);
    code.load(Width::Double, R2, R2, offsets.mapped);
    code.jump_if_all(When::Equal, R2, 0, end);
    code.load(Width::Double, R6, R2, offsets.private);
    code.with(AluOp::Set, R1, 0);
    code.store(Width::Word, R10, PART, R1);
    code.with(AluOp::Set, R7, class.0.cast_signed());
    check_block_list(&mut code, block_table, end);
    code.here(end);
    code.exit(0);
    code.finish([]).0
}
