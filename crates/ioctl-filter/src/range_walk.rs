// SPDX-License-Identifier: MIT OR Apache-2.0
//! The part of the program that waits until a range of the caller's memory is resident. It looks once at each
//! mapping, and reads a byte of each page where a userfaultfd watches. No other page can be missing.

use crate::code::BpfRegister::{R0, R1, R2, R3, R4, R5, R6, R7, R10};
use crate::code::{AluOp, BpfRegister, Code, Helper, Label, When, Width};
use crate::offsets::Offsets;

/// The most looks at mappings for one call. Distributions permit a process 65,530 to 1,048,576 mappings
/// (`vm.max_map_count`). The driver gets a call that needs more, and refuses it if memory is missing.
const MAX_LOOKS: i32 = 1 << 20;
/// The most pages of a mapping for one look: `BPF_MAX_LOOPS`, 32 GiB.
const MAX_PAGES: i32 = 1 << 23;

const PAGE: i32 = 1 << 12;
/// `VM_UFFD_MISSING`
const WATCHED: i32 = 0x200;
/// SIGKILL in a set of signals. The kernel sets it in each thread that a fatal signal ends.
const KILLED: i32 = 1 << (libc::SIGKILL - 1);

/// The walk's state on the stack: the address of the next page. 0 bytes from its start.
pub(crate) const WALK: i16 = -32;
const NEXT: i16 = 0;
/// The end of the range.
const END: i16 = 8;
/// The end of the mapping of the next page.
const MAPPING_END: i16 = 16;
/// Not 0 if a userfaultfd watches that mapping.
const IS_WATCHED: i16 = 24;

/// Walks the range at R6 with the length in R7, and ends the program.
pub(crate) fn walk(code: &mut Code, step: Label, end: Label) {
    code.add(R7, R6);
    code.with(AluOp::Add, R7, PAGE - 1);
    code.with(AluOp::And, R7, -PAGE);
    code.with(AluOp::And, R6, -PAGE);
    code.store(Width::Double, R10, WALK + NEXT, R6);
    code.store(Width::Double, R10, WALK + END, R7);
    // An empty range, or one beyond the last address.
    jump_if_at_most(code, R7, R6, end);
    code.with(AluOp::Set, R1, MAX_LOOKS);
    code.stack(R3, WALK);
    code.each(step);
    code.exit(0);
}

/// long step(u32 i, struct walk *walk): goes to the end of the next page's mapping. Returns 1 at the end of
/// the range, or where nothing is mapped: the driver refuses such a range.
pub(crate) fn step(code: &mut Code, offsets: &Offsets, look: Label, page: Label) {
    let [inside, watched, next, stop] = [(); 4].map(|()| code.label());
    code.copy(R6, R2);
    stop_if_killed(code, offsets, stop);
    // What counts if another thread has locked the mappings (EBUSY): the page may be missing.
    code.load(Width::Double, R2, R6, NEXT);
    code.copy(R1, R2);
    code.with(AluOp::Add, R1, PAGE);
    code.store(Width::Double, R6, MAPPING_END, R1);
    code.store(Width::Double, R6, IS_WATCHED, R1);
    code.copy(R1, R0);
    code.function(R3, look);
    code.copy(R4, R6);
    code.with(AluOp::Set, R5, 0);
    code.call(Helper::FindVma);
    code.jump_if(When::Equal, R0, -libc::ENOENT, stop);
    code.load(Width::Double, R1, R6, MAPPING_END);
    code.load(Width::Double, R2, R6, END);
    jump_if_at_most(code, R1, R2, inside);
    code.store(Width::Double, R6, MAPPING_END, R2);
    code.here(inside);
    code.load(Width::Double, R1, R6, IS_WATCHED);
    code.jump_if_all(When::NotEqual, R1, 0, watched);
    code.load(Width::Double, R1, R6, MAPPING_END);
    code.store(Width::Double, R6, NEXT, R1);
    code.jump(next);
    code.here(watched);
    code.with(AluOp::Set, R1, MAX_PAGES);
    code.copy(R3, R6);
    code.each(page);
    code.here(next);
    code.load(Width::Double, R1, R6, NEXT);
    code.load(Width::Double, R2, R6, END);
    jump_if_at_most(code, R2, R1, stop);
    code.exit(0);
    code.here(stop);
    code.exit(1);
}

/// long look(struct task_struct *task, struct vm_area_struct *vma, struct walk *walk): notes where the
/// mapping ends, and whether a userfaultfd watches it.
pub(crate) fn look(code: &mut Code, offsets: &Offsets) {
    code.load(Width::Double, R4, R2, offsets.end);
    code.store(Width::Double, R3, MAPPING_END, R4);
    code.load(Width::Double, R4, R2, offsets.flags);
    code.with(AluOp::And, R4, WATCHED);
    code.store(Width::Double, R3, IS_WATCHED, R4);
    code.exit(0);
}

/// long page(u32 i, struct walk *walk): reads a byte of the next page of the mapping. Ends the walk if the
/// page cannot be read, because the driver refuses it, or if the caller was killed.
pub(crate) fn page(code: &mut Code, offsets: &Offsets) {
    let [done, stop] = [(); 2].map(|()| code.label());
    code.copy(R6, R2);
    code.load(Width::Double, R7, R6, NEXT);
    code.load(Width::Double, R1, R6, MAPPING_END);
    jump_if_at_most(code, R1, R7, done);
    code.stack(R1, -8);
    code.with(AluOp::Set, R2, 1);
    code.copy(R3, R7);
    code.call(Helper::CopyFromUser);
    code.jump_if_all(When::NotEqual, R0, 0, stop);
    stop_if_killed(code, offsets, stop);
    code.with(AluOp::Add, R7, PAGE);
    code.store(Width::Double, R6, NEXT, R7);
    code.exit(0);
    code.here(stop);
    code.load(Width::Double, R1, R6, END);
    code.store(Width::Double, R6, NEXT, R1);
    code.here(done);
    code.exit(1);
}

/// Jumps if the address in `left` is not above that in `right`; overwrites R3.
///
/// It compares their difference with 0. Otherwise the verifier concludes bounds of the addresses, which grow
/// in each round of a loop, until it gives up ("The sequence of 8193 jumps is too complex").
fn jump_if_at_most(code: &mut Code, left: BpfRegister, right: BpfRegister, label: Label) {
    code.copy(R3, left);
    code.subtract(R3, right);
    code.jump_if_all(When::AtMost, R3, 0, label);
}

/// Jumps to `stop` if a fatal signal is pending for the caller, else leaves its task in R0.
fn stop_if_killed(code: &mut Code, offsets: &Offsets, stop: Label) {
    code.call(Helper::CurrentTask);
    code.load(Width::Double, R1, R0, offsets.signals);
    code.jump_if_all(When::HasBit, R1, KILLED, stop);
}
