// SPDX-License-Identifier: MIT OR Apache-2.0
//! The program for ioctls. A call of a wait rule waits until the range that it names is resident
//! ([`crate::range_walk`]). A blocked call fails.

use crate::abi::{Instruction, REQUEST_BYTES};
use crate::code::BpfRegister::{R0, R1, R2, R3, R4, R6, R7, R8, R9, R10};
use crate::code::{AluOp, Code, Helper, Label, When, Width};
use crate::offsets::Offsets;
use crate::range_walk::{self, WALK};
use crate::{DenyRule, MAX_ARGUMENT, WaitRule};

/// The stack slot of the ioctl's argument.
const ARGUMENT: i16 = WALK - MAX_ARGUMENT as i16;

/// The stack slot, in place of the walk, of the secret of a [`crate::abi::ControlRequest`], and then of the
/// file's `private_data`.
const ENTRY: i16 = -16;
pub(crate) const PART: i16 = ENTRY + 8;
const CLASSES: i16 = ENTRY + 12;
/// Bytes of the table's key: `private_data` and the part.
pub(crate) const KEY_BYTES: u32 = 12;

/// An ioctl that no driver has (`_IOW('R', 0xfe, 16)`). The program answers it if its argument, a
/// [`crate::abi::ControlRequest`], has the program's secret, and updates the file's entry.
pub(crate) const CONTROL_IOCTL: u32 = 0x4010_52fe;
/// The answer if the entry was updated.
pub(crate) const CONTROL_ACK: i32 = libc::ECANCELED;
/// The answer if the table is full.
pub(crate) const FULL: i32 = libc::ENOSPC;

/// The rules of the program.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProgramRules<'a> {
    /// Calls that wait.
    pub(crate) wait_rules: &'a [WaitRule],
    /// Calls that can be blocked.
    pub(crate) deny_rules: &'a [DenyRule],
    pub(crate) offsets: Offsets,
    /// The secret of the process that attaches the program.
    pub(crate) secret: u64,
    /// The table of blocked files.
    pub(crate) block_table: u32,
}

/// Returns the program, and the positions of its functions. The first one is the program itself.
pub(crate) fn code(plan: &ProgramRules<'_>) -> (Vec<Instruction>, [u32; 4]) {
    let mut code = Code::default();
    let [start, walk, check, control, end, step, look, page] = [(); 8].map(|()| code.label());
    code.here(start);
    // int file_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
    code.load(Width::Double, R2, R1, 0);
    code.load(Width::Double, R8, R1, 8);
    code.load(Width::Double, R9, R1, 16);
    code.load(Width::Double, R6, R2, plan.offsets.private);
    code.jump_if(When::Equal, R8, CONTROL_IOCTL.cast_signed(), control);
    code.load(Width::Double, R2, R2, plan.offsets.inode);
    code.load(Width::Word, R7, R2, plan.offsets.device);
    code.with(AluOp::And, R8, 0xff);
    for call in plan.wait_rules {
        wait_rule(&mut code, call, walk, end);
    }
    for call in plan.deny_rules {
        deny_rule(&mut code, call, check, end);
    }
    code.here(end);
    code.exit(0);
    code.here(walk);
    range_walk::walk(&mut code, step, end);
    code.here(check);
    check_block_list(&mut code, plan.block_table, end);
    code.here(control);
    handle_control(&mut code, plan, end);
    code.here(step);
    range_walk::step(&mut code, &plan.offsets, look, page);
    code.here(look);
    range_walk::look(&mut code, &plan.offsets);
    code.here(page);
    range_walk::page(&mut code, &plan.offsets);
    code.finish([start, step, look, page])
}

/// If it is this call, jumps to `check` with its class in R7 and its part on the stack. `private_data` is in
/// R6.
fn deny_rule(code: &mut Code, call: &DenyRule, check: Label, end: Label) {
    let next = code.label();
    match_ioctl(code, call.number, &call.devices, next);
    if let Some(part) = call.part {
        code.stack(R1, PART);
        code.with(AluOp::Set, R2, 4);
        code.copy(R3, R9);
        code.with(AluOp::Add, R3, i32::from(part));
        code.call(Helper::CopyFromUser);
        // The driver reports the same error.
        code.jump_if_all(When::NotEqual, R0, 0, end);
    } else {
        code.with(AluOp::Set, R1, 0);
        code.store(Width::Word, R10, PART, R1);
    }
    code.with(AluOp::Set, R7, call.class.0.cast_signed());
    code.jump(check);
    code.here(next);
}

/// Returns -EAGAIN if the table blocks a class of R7 for the `private_data` in R6 and the part on the stack.
pub(crate) fn check_block_list(code: &mut Code, block_table: u32, end: Label) {
    code.store(Width::Double, R10, ENTRY, R6);
    code.table(R1, block_table);
    code.stack(R2, ENTRY);
    code.call(Helper::MapLookup);
    code.jump_if_all(When::Equal, R0, 0, end);
    code.load(Width::Word, R1, R0, 0);
    code.and(R1, R7);
    code.jump_if_all(When::Equal, R1, 0, end);
    code.exit(-libc::EAGAIN);
}

/// Handles a control request for the file whose `private_data` is in R6.
fn handle_control(code: &mut Code, plan: &ProgramRules<'_>, end: Label) {
    let (none, done) = (code.label(), code.label());
    code.stack(R1, ENTRY);
    code.with(AluOp::Set, R2, REQUEST_BYTES);
    code.copy(R3, R9);
    code.call(Helper::CopyFromUser);
    code.jump_if_all(When::NotEqual, R0, 0, end);
    code.load(Width::Double, R1, R10, ENTRY);
    code.number(R2, plan.secret);
    code.jump_if_other(R1, R2, end);
    code.store(Width::Double, R10, ENTRY, R6);
    code.load(Width::Word, R7, R10, CLASSES);
    code.table(R1, plan.block_table);
    code.stack(R2, ENTRY);
    code.jump_if(When::Equal, R7, 0, none);
    code.stack(R3, CLASSES);
    code.with(AluOp::Set, R4, 0);
    code.call(Helper::MapUpdate);
    code.jump_if_all(When::Equal, R0, 0, done);
    code.exit(-FULL);
    code.here(none);
    // The entry need not exist.
    code.call(Helper::MapDelete);
    code.here(done);
    code.exit(-CONTROL_ACK);
}

/// Jumps to `next` unless R8 is this ioctl's number and R7 is one of the devices.
fn match_ioctl(code: &mut Code, number: u8, devices: &[libc::dev_t], next: Label) {
    let found = code.label();
    code.jump_if(When::NotEqual, R8, i32::from(number), next);
    for device in devices {
        code.jump_if(When::Equal, R7, kernel_device(*device), found);
    }
    code.jump(next);
    code.here(found);
}

/// If it is this call, jumps to `walk` with the range's address in R6 and its length in R7.
fn wait_rule(code: &mut Code, call: &WaitRule, walk: Label, end: Label) {
    let inside = |at: u8, width: u8| at.checked_add(width).is_some_and(|end| end <= call.bytes);
    let only = call.only.is_none_or(|only| inside(only.at, 4));
    let fits = inside(call.address, 8) && inside(call.length, 8) && only && call.bytes <= MAX_ARGUMENT;
    assert!(fits, "fields outside of the argument: {call:?}");
    let at = |field: u8| ARGUMENT + i16::from(field);
    let next = code.label();
    match_ioctl(code, call.number, &call.devices, next);
    code.stack(R1, ARGUMENT);
    code.with(AluOp::Set, R2, i32::from(call.bytes));
    code.copy(R3, R9);
    code.call(Helper::CopyFromUser);
    code.jump_if_all(When::NotEqual, R0, 0, end);
    if let Some(only) = call.only {
        code.load(Width::Word, R1, R10, at(only.at));
        code.with(AluOp::And, R1, only.mask);
        code.jump_if(When::NotEqual, R1, only.wanted, end);
    }
    code.load(Width::Double, R6, R10, at(call.address));
    code.load(Width::Double, R7, R10, at(call.length));
    code.jump(walk);
    code.here(next);
}

/// Returns a device's number in the kernel's encoding (`include/linux/kdev_t.h`).
fn kernel_device(device: libc::dev_t) -> i32 {
    (libc::major(device) << 20 | libc::minor(device)).cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CallClass;

    fn program(deny_rules: &[DenyRule]) -> Vec<Instruction> {
        let offsets =
            Offsets { inode: 32, private: 40, device: 76, mapped: 80, flags: 16, end: 8, signals: 900 };
        code(&ProgramRules { wait_rules: &[], deny_rules, offsets, secret: 5, block_table: 3 }).0
    }

    /// Returns all results of the program's exits.
    fn answers(code: &[Instruction]) -> Vec<i32> {
        let exits = code.windows(2).filter(|pair| pair[0].code == 0xb7 && pair[1].code == 0x95);
        exits.map(|pair| pair[0].immediate).collect()
    }

    #[test]
    fn calls_are_blocked_or_passed_to_the_driver() {
        // The callbacks return 0 and 1.
        let all = [0, 0, -libc::EAGAIN, -FULL, -CONTROL_ACK, 0, 1, 0, 0, 1];
        assert_eq!(answers(&program(&[])), all);
    }

    #[test]
    fn only_the_part_of_an_argument_is_read() {
        let call = |part| DenyRule { devices: vec![7], number: 0x24, part, class: CallClass::one(2) };
        let helpers = |part| {
            let code = program(&[call(part)]);
            code.iter().filter(|one| one.code == 0x85 && one.immediate == 148).count()
        };
        // A request, and a byte of a page.
        assert_eq!((helpers(None), helpers(Some(4))), (2, 3));
        let code = program(&[call(Some(4))]);
        let copy = code.windows(5).find(|at| at[4].immediate == 148).unwrap();
        assert_eq!([copy[1].immediate, copy[3].immediate], [4, 4]);
        let kind = |one: &Instruction| one.code == 0xb7 && one.registers == 7 && one.immediate == 4;
        assert!(code.iter().any(kind));
    }
}
