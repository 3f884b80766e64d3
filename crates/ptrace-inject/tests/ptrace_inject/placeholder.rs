// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shows what the kernel does to placeholders that break the rules of `docs/decisions/0009-tracer.md`.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use crate::support::memory::{FREE, PAGE, Scene, word_at};
use crate::support::sys;

const RESULT: usize = FREE;

fn pause_for_ever() -> i32 {
    loop {
        thread::sleep(Duration::from_secs(1));
    }
}

#[test]
fn a_placeholder_moved_without_an_event_loses_its_userfaultfd() {
    let scene = Scene::start_with(0, 1, |hand| {
        let flags = usize::try_from(libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED).unwrap();
        let elsewhere = sys::map(0, PAGE, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
        sys::call(libc::SYS_mremap, [hand.address, PAGE, PAGE, flags, elsewhere, 0]).unwrap();
        hand.shared.set(RESULT, word_at(elsewhere).load(Ordering::SeqCst) + 1);
        pause_for_ever()
    });
    assert_eq!(scene.shared().wait(RESULT, |value| value != 0), 1, "zero without a page fault");
}

#[test]
fn a_child_can_fill_an_inherited_placeholder_with_zeros() {
    let scene = Scene::start(1, |hand| {
        let child = sys::fork(|| {
            hand.shared.set(RESULT, hand.word(0).load(Ordering::SeqCst) + 1);
            pause_for_ever()
        });
        hand.shared.wait(RESULT, |value| value == 1);
        sys::kill(child, libc::SIGKILL);
        hand.shared.set(RESULT + 1, hand.word(0).load(Ordering::SeqCst) + 1);
        pause_for_ever()
    });
    assert_eq!(scene.shared().wait(RESULT + 1, |value| value != 0), 1, "zero without a page fault");
}
