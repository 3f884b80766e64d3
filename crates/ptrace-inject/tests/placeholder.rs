// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the kernel does to placeholders that are not made as they must be: why `docs/decisions/0009-tracer.md` asks for it.

mod support;

use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use support::memory::{FREE, PAGE, Scene, word_at};
use support::sys;

const RESULT: usize = FREE;

fn pause_for_ever() -> i32 {
    loop {
        thread::sleep(Duration::from_secs(1));
    }
}

#[test]
fn one_that_is_moved_without_an_event_for_it_is_not_watched_any_more() {
    let scene = Scene::start_with(0, 1, |hand| {
        let flags = usize::try_from(libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED).unwrap();
        let elsewhere = sys::map(0, PAGE, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
        sys::call(libc::SYS_mremap, [hand.address, PAGE, PAGE, flags, elsewhere, 0]).unwrap();
        hand.shared.set(RESULT, word_at(elsewhere).load(Ordering::SeqCst) + 1);
        pause_for_ever()
    });
    assert_eq!(scene.shared().wait(RESULT, |value| value != 0), 1, "zero, and no fault");
}

#[test]
fn one_that_forks_inherit_is_given_zeros_by_a_child_and_then_is_not_missing_in_the_parent() {
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
    assert_eq!(scene.shared().wait(RESULT + 1, |value| value != 0), 1, "zero, and no fault");
}
