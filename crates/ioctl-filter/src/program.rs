// SPDX-License-Identifier: MIT OR Apache-2.0
//! The program: which call is it? What memory does it name: a byte of each page of that. Or: is it to be kept away?

use crate::abi::{Instruction, REQUEST_BYTES};
use crate::code::Register::{R0, R1, R2, R3, R4, R6, R7, R8, R9, R10};
use crate::code::{AluOp, Code, Helper, Label, When, Width};
use crate::{DenyRule, MAX_ARGUMENT, WaitRule};

/// Where the kernel has what the programs look at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Offsets {
    /// `f_inode` in `struct file`.
    pub(crate) inode: i16,
    /// `private_data` in `struct file`.
    pub(crate) private: i16,
    /// `i_rdev` in `struct inode`.
    pub(crate) device: i16,
    /// `vm_file` in `struct vm_area_struct`.
    pub(crate) mapped: i16,
    /// `vm_flags` in the same.
    pub(crate) rights: i16,
}

const PAGE_SHIFT: i32 = 12;
const PAGE: i32 = 1 << PAGE_SHIFT;
/// `BPF_MAX_LOOPS`, a power of two: 32 GiB of pages.
const LOOPS_SHIFT: i32 = 23;
const LOOPS: i32 = 1 << LOOPS_SHIFT;

/// On the stack: the first page's address.
const START: i16 = -16;
/// How many pages there are.
const PAGES: i16 = -8;
/// The ioctl's argument.
const ARGUMENT: i16 = START - MAX_ARGUMENT as i16;

/// On the stack, in place of the range: the secret of a [`crate::abi::Request`], then the file's `private_data`.
const MARK: i16 = -16;
pub(crate) const PART: i16 = MARK + 8;
const KINDS: i16 = MARK + 12;
/// Bytes of what the table goes by: `private_data` and the part.
pub(crate) const KEY_BYTES: u32 = 12;

/// An ioctl that no driver has (`_IOW('R', 0xfe, 16)`), which the program answers by itself if its argument, a
/// [`crate::abi::Request`], has the program's secret: it marks the file.
pub(crate) const CONTROL_IOCTL: u32 = 0x4010_52fe;
/// It is marked.
pub(crate) const CONTROL_ACK: i32 = libc::ECANCELED;
/// There is no room in the table.
pub(crate) const FULL: i32 = libc::ENOSPC;

/// What there is to look for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan<'a> {
    /// Calls that wait.
    pub(crate) waits: &'a [WaitRule],
    /// Calls that are kept away.
    pub(crate) again: &'a [DenyRule],
    pub(crate) offsets: Offsets,
    /// What only who has attached the program knows.
    pub(crate) secret: u64,
    /// The table of marks.
    pub(crate) marks: u32,
}

/// The program, and where its second and third functions begin.
pub(crate) fn code(plan: &Plan<'_>) -> (Vec<Instruction>, [u32; 2]) {
    let mut code = Code::default();
    let [walk, look, told, end, round, touch] = [(); 6].map(|()| code.label());
    // int file_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
    code.load(Width::Double, R2, R1, 0);
    code.load(Width::Double, R8, R1, 8);
    code.load(Width::Double, R9, R1, 16);
    code.load(Width::Double, R6, R2, plan.offsets.private);
    code.jump_if(When::Equal, R8, CONTROL_IOCTL.cast_signed(), told);
    code.load(Width::Double, R2, R2, plan.offsets.inode);
    code.load(Width::Word, R7, R2, plan.offsets.device);
    code.with(AluOp::And, R8, 0xff);
    for call in plan.waits {
        one(&mut code, call, walk, end);
    }
    for call in plan.again {
        one_again(&mut code, call, look, end);
    }
    code.here(end);
    code.exit(0);
    code.here(walk);
    pages(&mut code, round);
    code.here(look);
    marked(&mut code, plan.marks, end);
    code.here(told);
    mark(&mut code, plan, end);
    code.here(round);
    one_round(&mut code, touch);
    code.here(touch);
    one_page(&mut code);
    code.finish([round, touch])
}

/// If it is this call: its bit in R7 and its part on the stack, and on to `look`. `private_data` is in R6.
fn one_again(code: &mut Code, call: &DenyRule, look: Label, end: Label) {
    let next = code.label();
    is_it(code, call.number, &call.devices, next);
    if let Some(part) = call.part {
        code.stack(R1, PART);
        code.with(AluOp::Set, R2, 4);
        code.copy(R3, R9);
        code.with(AluOp::Add, R3, i32::from(part));
        code.call(Helper::CopyFromUser);
        // The driver will say so.
        code.jump_if_all(When::NotEqual, R0, 0, end);
    } else {
        code.with(AluOp::Set, R1, 0);
        code.store(Width::Word, R10, PART, R1);
    }
    code.with(AluOp::Set, R7, call.kind.0.cast_signed());
    code.jump(look);
    code.here(next);
}

/// -EAGAIN if the file whose `private_data` is in R6, and the part on the stack, is marked with one of the bits in R7.
pub(crate) fn marked(code: &mut Code, marks: u32, end: Label) {
    code.store(Width::Double, R10, MARK, R6);
    code.table(R1, marks);
    code.stack(R2, MARK);
    code.call(Helper::MapLookup);
    code.jump_if_all(When::Equal, R0, 0, end);
    code.load(Width::Word, R1, R0, 0);
    code.and(R1, R7);
    code.jump_if_all(When::Equal, R1, 0, end);
    code.exit(-libc::EAGAIN);
}

/// Does what a request of the program's owner says, with the file whose `private_data` is in R6.
fn mark(code: &mut Code, plan: &Plan<'_>, end: Label) {
    let (none, done) = (code.label(), code.label());
    code.stack(R1, MARK);
    code.with(AluOp::Set, R2, REQUEST_BYTES);
    code.copy(R3, R9);
    code.call(Helper::CopyFromUser);
    code.jump_if_all(When::NotEqual, R0, 0, end);
    code.load(Width::Double, R1, R10, MARK);
    code.number(R2, plan.secret);
    code.jump_if_other(R1, R2, end);
    code.store(Width::Double, R10, MARK, R6);
    code.load(Width::Word, R7, R10, KINDS);
    code.table(R1, plan.marks);
    code.stack(R2, MARK);
    code.jump_if(When::Equal, R7, 0, none);
    code.stack(R3, KINDS);
    code.with(AluOp::Set, R4, 0);
    code.call(Helper::MapUpdate);
    code.jump_if_all(When::Equal, R0, 0, done);
    code.exit(-FULL);
    code.here(none);
    // Whether it was marked does not matter.
    code.call(Helper::MapDelete);
    code.here(done);
    code.exit(-CONTROL_ACK);
}

/// On to `next` if it is not the ioctl of that number in R8, of one of the devices in R7.
fn is_it(code: &mut Code, number: u8, devices: &[libc::dev_t], next: Label) {
    let found = code.label();
    code.jump_if(When::NotEqual, R8, i32::from(number), next);
    for device in devices {
        code.jump_if(When::Equal, R7, in_kernel(*device), found);
    }
    code.jump(next);
    code.here(found);
}

/// If it is this call: the range's address in R6 and its length in R7, and on to `walk`.
fn one(code: &mut Code, call: &WaitRule, walk: Label, end: Label) {
    let inside = |at: u8, width: u8| at.checked_add(width).is_some_and(|behind| behind <= call.bytes);
    let only = call.only.is_none_or(|only| inside(only.at, 4));
    let fits = inside(call.address, 8) && inside(call.length, 8) && only && call.bytes <= MAX_ARGUMENT;
    assert!(fits, "fields outside of the argument: {call:?}");
    let at = |field: u8| ARGUMENT + i16::from(field);
    let next = code.label();
    is_it(code, call.number, &call.devices, next);
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

/// Has each page of the range at R6 with the length in R7 touched: in rounds, as a loop has an end.
fn pages(code: &mut Code, round: Label) {
    code.copy(R1, R6);
    code.with(AluOp::And, R1, PAGE - 1);
    code.add(R7, R1);
    code.with(AluOp::Add, R7, PAGE - 1);
    code.with(AluOp::Right, R7, PAGE_SHIFT);
    code.with(AluOp::And, R6, -PAGE);
    code.store(Width::Double, R10, START, R6);
    code.store(Width::Double, R10, PAGES, R7);
    code.copy(R1, R7);
    code.with(AluOp::Add, R1, LOOPS - 1);
    code.with(AluOp::Right, R1, LOOPS_SHIFT);
    code.each(round, START);
    code.exit(0);
}

/// long round(u32 i, struct { u64 start, pages; } *range): the last one if it was not to its end.
fn one_round(code: &mut Code, touch: Label) {
    let (all, done) = (code.label(), code.label());
    code.copy(R3, R1);
    code.with(AluOp::Left, R3, LOOPS_SHIFT);
    // What is behind the rounds before.
    code.load(Width::Double, R1, R2, PAGES - START);
    code.copy(R4, R3);
    code.negate(R4);
    code.add(R1, R4);
    code.load(Width::Double, R4, R2, 0);
    code.with(AluOp::Left, R3, PAGE_SHIFT);
    code.add(R3, R4);
    code.store(Width::Double, R10, START, R3);
    code.jump_if_all(When::AtMost, R1, LOOPS, all);
    code.with(AluOp::Set, R1, LOOPS);
    code.here(all);
    code.each(touch, START);
    code.jump_if(When::Equal, R0, LOOPS, done);
    code.exit(1);
    code.here(done);
    code.exit(0);
}

/// long touch(u32 i, u64 *start): the last one if it cannot be read. It is none to the driver either, which says so itself; and a program
/// that is killed does not wait for the rest.
fn one_page(code: &mut Code) {
    let there = code.label();
    code.load(Width::Double, R3, R2, 0);
    code.with(AluOp::Left, R1, PAGE_SHIFT);
    code.add(R3, R1);
    code.stack(R1, -8);
    code.with(AluOp::Set, R2, 1);
    code.call(Helper::CopyFromUser);
    code.jump_if_all(When::Equal, R0, 0, there);
    code.exit(1);
    code.here(there);
    code.exit(0);
}

/// A device's number as the kernel has it (`include/linux/kdev_t.h`).
fn in_kernel(device: libc::dev_t) -> i32 {
    (libc::major(device) << 20 | libc::minor(device)).cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CallClass;

    fn program(again: &[DenyRule]) -> Vec<Instruction> {
        let offsets = Offsets { inode: 32, private: 40, device: 76, mapped: 80, rights: 16 };
        code(&Plan { waits: &[], again, offsets, secret: 5, marks: 3 }).0
    }

    /// What it gives in place of the driver.
    fn answers(code: &[Instruction]) -> Vec<i32> {
        let exits = code.windows(2).filter(|pair| pair[0].code == 0xb7 && pair[1].code == 0x95);
        exits.map(|pair| pair[0].immediate).collect()
    }

    #[test]
    fn calls_are_sent_back_or_the_driver_s() {
        // Functions of loops give 0 and 1.
        let all = [0, 0, -libc::EAGAIN, -FULL, -CONTROL_ACK, 1, 0, 1, 0];
        assert_eq!(answers(&program(&[])), all);
    }

    #[test]
    fn no_more_of_an_argument_is_read_than_its_part() {
        let call = |part| DenyRule { devices: vec![7], number: 0x24, part, kind: CallClass::one(2) };
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
