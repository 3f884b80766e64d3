// SPDX-License-Identifier: MIT OR Apache-2.0
//! The program: which call is it, what memory does it name, and a byte of each page of that.

use crate::abi::Instruction;
use crate::code::Register::{R0, R1, R2, R3, R4, R6, R7, R8, R9, R10};
use crate::code::{Act, Code, Helper, Label, When, Width};
use crate::{Call, MAX_ARGUMENT};

/// Where the kernel has what the program looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Offsets {
    /// `f_inode` in `struct file`.
    pub(crate) inode: i16,
    /// `i_rdev` in `struct inode`.
    pub(crate) device: i16,
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

/// An ioctl that no driver has, which the program answers by itself, with [`ANSWER`], if its argument is the program's own number.
pub(crate) const QUESTION: u32 = 0x5245_5741;
pub(crate) const ANSWER: i32 = libc::ECANCELED;

/// The program for these calls, and where its second and third functions begin. `own`: see [`QUESTION`].
pub(crate) fn code(calls: &[Call], offsets: &Offsets, own: i32) -> (Vec<Instruction>, [u32; 2]) {
    let mut code = Code::default();
    let (walk, end, round, touch) = (code.label(), code.label(), code.label(), code.label());
    // int file_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
    code.load(Width::Double, R2, R1, 0);
    code.load(Width::Double, R8, R1, 8);
    code.load(Width::Double, R9, R1, 16);
    let other = code.label();
    code.jump_if(When::NotEqual, R8, QUESTION.cast_signed(), other);
    code.jump_if(When::NotEqual, R9, own, other);
    code.exit(-ANSWER);
    code.here(other);
    code.load(Width::Double, R2, R2, offsets.inode);
    code.load(Width::Word, R7, R2, offsets.device);
    code.with(Act::And, R8, 0xff);
    for call in calls {
        one(&mut code, call, walk, end);
    }
    code.here(end);
    code.exit(0);
    code.here(walk);
    pages(&mut code, round);
    code.here(round);
    one_round(&mut code, touch);
    code.here(touch);
    one_page(&mut code);
    code.finish([round, touch])
}

/// If it is this call: the range's address in R6 and its length in R7, and on to `walk`.
fn one(code: &mut Code, call: &Call, walk: Label, end: Label) {
    let inside = |at: u8, width: u8| at.checked_add(width).is_some_and(|behind| behind <= call.bytes);
    let only = call.only.is_none_or(|only| inside(only.at, 4));
    let fits = inside(call.address, 8) && inside(call.length, 8) && only && call.bytes <= MAX_ARGUMENT;
    assert!(fits, "fields outside of the argument: {call:?}");
    let at = |field: u8| ARGUMENT + i16::from(field);
    let (found, next) = (code.label(), code.label());
    code.jump_if(When::NotEqual, R8, i32::from(call.number), next);
    for device in &call.devices {
        code.jump_if(When::Equal, R7, in_kernel(*device), found);
    }
    code.jump(next);
    code.here(found);
    code.copy(R1, R10);
    code.with(Act::Add, R1, i32::from(ARGUMENT));
    code.with(Act::Set, R2, i32::from(call.bytes));
    code.copy(R3, R9);
    code.call(Helper::CopyFromUser);
    code.jump_if_all(When::NotEqual, R0, 0, end);
    if let Some(only) = call.only {
        code.load(Width::Word, R1, R10, at(only.at));
        code.with(Act::And, R1, only.mask);
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
    code.with(Act::And, R1, PAGE - 1);
    code.add(R7, R1);
    code.with(Act::Add, R7, PAGE - 1);
    code.with(Act::Right, R7, PAGE_SHIFT);
    code.with(Act::And, R6, -PAGE);
    code.store(Width::Double, R10, START, R6);
    code.store(Width::Double, R10, PAGES, R7);
    code.copy(R1, R7);
    code.with(Act::Add, R1, LOOPS - 1);
    code.with(Act::Right, R1, LOOPS_SHIFT);
    code.each(round, START);
    code.exit(0);
}

/// long round(u32 i, struct { u64 start, pages; } *range): the last one if it was not to its end.
fn one_round(code: &mut Code, touch: Label) {
    let (all, done) = (code.label(), code.label());
    code.copy(R3, R1);
    code.with(Act::Left, R3, LOOPS_SHIFT);
    // What is behind the rounds before.
    code.load(Width::Double, R1, R2, PAGES - START);
    code.copy(R4, R3);
    code.negate(R4);
    code.add(R1, R4);
    code.load(Width::Double, R4, R2, 0);
    code.with(Act::Left, R3, PAGE_SHIFT);
    code.add(R3, R4);
    code.store(Width::Double, R10, START, R3);
    code.jump_if_all(When::AtMost, R1, LOOPS, all);
    code.with(Act::Set, R1, LOOPS);
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
    code.with(Act::Left, R1, PAGE_SHIFT);
    code.add(R3, R1);
    code.copy(R1, R10);
    code.with(Act::Add, R1, -8);
    code.with(Act::Set, R2, 1);
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
