// SPDX-License-Identifier: MIT OR Apache-2.0
//! Swaps placeholders while a program runs, faults, maps, forks and dies.

use std::ops::Range;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::support::memory::{DEVICE_OFFSET, FREE, Hand, PAGE, Scene, content, count_in};
use crate::support::{sys, within};
use rewake_ptrace_inject::{Error, Reason, Stopped, populated_ranges};
use rewake_testkit::Random;
use rewake_uffd::FillPort as _;

const RESULT: usize = FREE;
const GO: usize = FREE + 1;
const END: usize = FREE + 2;
const TID: usize = FREE + 3;

fn pause_for_ever() -> i32 {
    loop {
        thread::sleep(Duration::from_secs(1));
    }
}

/// Calls `read(2)` with a buffer of four bytes in the placeholder. RESULT becomes its result plus one.
fn read_into(hand: Hand) {
    let (ours, theirs) = sys::pipe();
    let word = |fd: &dyn std::os::fd::AsRawFd| usize::try_from(fd.as_raw_fd()).unwrap();
    let text = b"ZZZZ".as_ptr().expose_provenance();
    sys::call(libc::SYS_write, [word(&theirs), text, 4, 0, 0, 0]).unwrap();
    hand.shared.set(TID, u64::try_from(sys::gettid()).unwrap());
    let result = sys::call(libc::SYS_read, [word(&ours), hand.address, 4, 0, 0, 0]).unwrap();
    hand.shared.set(RESULT, u64::try_from(result).unwrap() + 1);
}

#[test]
fn a_page_fault_in_user_code_reads_the_device_after_the_swap() {
    let scene = Scene::start(4, |hand| {
        hand.shared.set(RESULT, hand.word(PAGE).load(Ordering::SeqCst));
        pause_for_ever()
    });
    assert_eq!(scene.fault(), PAGE);
    let swapped = scene.swap();
    assert_eq!(swapped.len(), 1);
    assert_eq!((swapped[0].address, swapped[0].length), (scene.address as u64, scene.length as u64));
    assert_eq!(scene.shared().wait(RESULT, |value| value != 0), content(PAGE));
    assert_eq!(scene.target.tracer(), "0");
}

#[test]
fn another_thread_makes_calls_while_one_faults_in_the_kernel() {
    let scene = Scene::start(1, |hand| {
        thread::spawn(move || read_into(hand));
        pause_for_ever()
    });
    assert_eq!(scene.fault(), 0);
    let tid = i32::try_from(scene.shared().get(TID)).unwrap();
    let stuck = scene
        .stopped(|stopped| {
            let stuck = stopped.stuck();
            scene.swap_in(stopped, &[scene.request(0, scene.length)]).unwrap();
            stuck
        })
        .unwrap();
    assert!(stuck.len() == 1 && stuck[0].tid == tid && stuck[0].is_harmless(), "{stuck:?}");
    scene.uffd.wake(scene.address as u64, scene.length as u64).unwrap();
    assert_eq!(scene.shared().wait(RESULT, |value| value != 0), 4 + 1);
    let bytes = scene.device_word(0).to_ne_bytes();
    assert_eq!(bytes[..4], *b"ZZZZ");
    assert_eq!(bytes[4..], content(0).to_ne_bytes()[4..]);
}

#[test]
fn the_error_names_an_only_thread_that_faults_in_the_kernel() {
    let scene = Scene::start(2, |hand| {
        read_into(hand);
        hand.shared.set(END, hand.word(8).load(Ordering::SeqCst));
        pause_for_ever()
    });
    assert_eq!(scene.fault(), 0);
    let merged: Vec<Range<u64>> = scene
        .stopped(|stopped| {
            let refused = scene.swap_in(stopped, &[scene.request(0, scene.length)]).unwrap_err();
            let tid = i32::try_from(scene.shared().get(TID)).unwrap();
            let Error::Unstoppable { threads, .. } = &refused else { panic!("{refused}") };
            assert!(threads.len() == 1 && threads[0].tid == tid && threads[0].is_harmless(), "{refused}");
            let said = refused.to_string();
            assert!(said.contains("waits in the kernel for a page") || said.contains("sleeps in"), "{said}");
            // The page's bytes let the thread reach its stop.
            let mut page = [0; PAGE];
            scene.device.read_exact_at(&mut page, DEVICE_OFFSET).unwrap();
            assert!(scene.uffd.copy(scene.address as u64, &page).complete(PAGE as u64));
            stopped.settle(crate::support::STOP_TIMEOUT).unwrap();
            assert_eq!(stopped.stuck(), []);
            // The bytes that it wrote meanwhile are copied to the device.
            let pages = populated_ranges(scene.placeholder.as_fd(), 0, scene.length as u64).unwrap();
            scene.placeholder.read_exact_at(&mut page, 0).unwrap();
            scene.device.write_all_at(&page, DEVICE_OFFSET).unwrap();
            assert_eq!(scene.swap_in(stopped, &[scene.request(0, scene.length)]).unwrap().len(), 1);
            pages
        })
        .unwrap();
    assert_eq!((merged.len(), merged[0].clone()), (1, 0..PAGE as u64));
    assert_eq!(scene.shared().wait(RESULT, |value| value != 0), 4 + 1);
    assert_eq!(scene.shared().wait(END, |value| value != 0), content(8));
    assert_eq!(scene.device_word(0).to_ne_bytes()[..4], *b"ZZZZ");
}

#[test]
fn sixteen_threads_that_compute_in_a_placeholder_lose_no_value() {
    const THREADS: usize = 16;
    const PAGES: usize = 8;
    const WORDS: usize = PAGES * PAGE / 8;
    let scene = Scene::start(PAGES, |hand| {
        let one = |thread: usize| move || count_in(hand, thread..WORDS, THREADS, END);
        let threads: Vec<_> = (0..THREADS).map(|thread| thread::spawn(one(thread))).collect();
        for (thread, handle) in threads.into_iter().enumerate() {
            hand.shared.set(32 + thread, handle.join().unwrap());
        }
        hand.shared.set(RESULT, 1);
        pause_for_ever()
    });
    scene.fault();
    // One swap happens while all threads already count in device memory.
    scene.swap_part(0, scene.length / 2).unwrap();
    thread::sleep(Duration::from_millis(20));
    scene.swap_part(scene.length / 2, scene.length / 2).unwrap();
    thread::sleep(Duration::from_millis(50));
    // This is the last word of each thread's round. On a busy machine, some may not have completed one yet.
    let last = WORDS - THREADS..WORDS;
    let counted = |word: usize| scene.device_word(word * 8) != content(word * 8);
    within(|| last.clone().all(counted).then_some(()), || "some threads have not counted".to_owned());
    scene.shared().set(END, 1);
    scene.shared().wait(RESULT, |value| value != 0);
    for word in 0..WORDS {
        let rounds = scene.shared().get(32 + word % THREADS);
        assert!(rounds > 0, "thread {} has not counted", word % THREADS);
        assert_eq!(scene.device_word(word * 8), content(word * 8).wrapping_add(rounds), "word {word}");
    }
}

#[test]
fn unmapped_moved_and_protected_placeholders_are_swapped_in_place() {
    let scene = Scene::start(8, |hand| {
        let page = |number: usize| hand.address + number * PAGE;
        let elsewhere = sys::map(0, PAGE, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
        let flags = usize::try_from(libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED).unwrap();
        let moved = [page(5), PAGE, PAGE, flags, elsewhere, 0];
        sys::call(libc::SYS_munmap, [page(1), 2 * PAGE, 0, 0, 0, 0]).unwrap();
        sys::call(libc::SYS_mremap, moved).unwrap();
        let read = usize::try_from(libc::PROT_READ).unwrap();
        sys::call(libc::SYS_mprotect, [page(3), PAGE, read, 0, 0, 0]).unwrap();
        // The program maps its own memory over the placeholder.
        let own = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        sys::map(page(7), PAGE, libc::PROT_READ | libc::PROT_WRITE, own, -1, 0);
        hand.word(7 * PAGE).store(77, Ordering::SeqCst);
        hand.shared.set(GO, elsewhere as u64);
        for (slot, address) in
            [page(0), page(3), page(4), elsewhere, page(6), page(7)].into_iter().enumerate()
        {
            hand.shared.set(32 + slot, crate::support::memory::word_at(address).load(Ordering::SeqCst));
        }
        hand.shared.set(RESULT, 1);
        pause_for_ever()
    });
    scene.fault();
    let elsewhere = scene.shared().get(GO);
    let swapped = scene.swap();
    let both = libc::PROT_READ | libc::PROT_WRITE;
    let mut seen: Vec<_> = swapped
        .iter()
        .map(|part| (part.offset / PAGE as u64, part.length / PAGE as u64, part.protection))
        .collect();
    seen.sort_unstable();
    assert_eq!(seen, [(0, 1, both), (3, 1, libc::PROT_READ), (4, 1, both), (5, 1, both), (6, 1, both)]);
    assert!(swapped.iter().any(|part| part.address == elsewhere && part.offset == 5 * PAGE as u64));
    scene.shared().wait(RESULT, |value| value != 0);
    let values: Vec<u64> = (0..6).map(|slot| scene.shared().get(32 + slot)).collect();
    let page = |number: usize| content(number * PAGE);
    assert_eq!(values, [page(0), page(3), page(4), page(5), page(6), 77]);
    let line = format!("{:x}-", scene.address + 3 * PAGE);
    assert!(scene.target.maps().lines().any(|map| map.starts_with(&line) && map.contains(" r--s ")));
}

#[test]
fn nothing_is_swapped_while_a_thread_moves_a_placeholder() {
    let scene = Scene::start(2, |hand| {
        thread::spawn(move || {
            let flags = usize::try_from(libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED).unwrap();
            let elsewhere =
                sys::map(0, PAGE, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
            hand.shared.set(TID, u64::try_from(sys::gettid()).unwrap());
            sys::call(libc::SYS_mremap, [hand.address, PAGE, PAGE, flags, elsewhere, 0]).unwrap();
            hand.shared.set(RESULT, crate::support::memory::word_at(elsewhere).load(Ordering::SeqCst));
        });
        pause_for_ever()
    });
    // The mremap returns once its event is read.
    let tid = i32::try_from(scene.shared().wait(TID, |tid| tid != 0)).unwrap();
    scene.target.sleeps_in(tid, libc::SYS_mremap);
    // The stop takes this long, because one thread does not stop. The other threads stop in that time.
    let short = Duration::from_secs(10);
    rewake_ptrace_inject::with_stopped(scene.target.pid, short, |stopped| {
        let refused = scene.swap_in(stopped, &[scene.request(0, scene.length)]).unwrap_err();
        let Error::Unstoppable { threads, .. } = &refused else { panic!("{refused}") };
        assert_eq!(
            (threads.len(), threads[0].tid, threads[0].reason),
            (1, tid, Reason::Sleeps(libc::SYS_mremap))
        );
        scene.read_events();
        stopped.settle(crate::support::STOP_TIMEOUT).unwrap();
        assert_eq!(scene.swap_in(stopped, &[scene.request(0, scene.length)]).unwrap().len(), 2);
    })
    .unwrap();
    assert_eq!(scene.shared().wait(RESULT, |value| value != 0), content(0));
}

#[test]
fn nothing_is_swapped_without_placeholders() {
    let scene = Scene::start(2, |hand| {
        sys::call(libc::SYS_munmap, [hand.address, 2 * PAGE, 0, 0, 0, 0]).unwrap();
        hand.shared.set(GO, 1);
        pause_for_ever()
    });
    scene.shared().wait(GO, |value| value != 0);
    assert_eq!(scene.swap(), []);
}

/// Starts a target with `pages` placeholders of a page, which adds up their first words when GO is set.
fn adder(pages: usize) -> Scene {
    Scene::start(pages, move |hand| {
        hand.shared.wait(GO, |go| go != 0);
        let words = (0..pages).map(|page| hand.word(page * PAGE).load(Ordering::SeqCst));
        hand.shared.set(RESULT, words.fold(0, u64::wrapping_add));
        pause_for_ever()
    })
}

#[test]
fn many_placeholders_are_swapped_in_one_stop_in_any_order() {
    const PAGES: usize = 40;
    // The target inherits the open file, so it is created before the fork.
    let other = sys::memory_file((PAGES * PAGE) as u64);
    let scene = adder(PAGES);
    other.write_all_at(&1_000_u64.to_ne_bytes(), 9 * PAGE as u64).unwrap();
    let swapped = scene
        .stopped(|stopped| {
            let mut swaps: Vec<_> = (0..PAGES).rev().map(|page| scene.request(page * PAGE, PAGE)).collect();
            (swaps[7].device, swaps[7].device_offset) = (other.as_fd(), 9 * PAGE as u64);
            let swapped = scene.swap_in(stopped, &swaps).unwrap();
            // They were swapped before.
            assert_eq!(scene.swap_in(stopped, &swaps).unwrap(), []);
            swapped
        })
        .unwrap();
    let swapped: Vec<_> = swapped.iter().map(|part| (part.address, part.offset, part.length)).collect();
    let part = |offset: u64| (scene.address as u64 + offset, offset, PAGE as u64);
    let all = (0..PAGES).rev().map(|page| part((page * PAGE) as u64));
    assert_eq!(swapped, all.collect::<Vec<_>>());
    scene.shared().set(GO, 1);
    let words = (0..PAGES).map(|page| if page == PAGES - 8 { 1_000 } else { content(page * PAGE) });
    assert_eq!(scene.shared().wait(RESULT, |sum| sum != 0), words.fold(0, u64::wrapping_add));
}

#[test]
fn swaps_before_a_failed_one_are_kept_and_the_rest_can_be_retried() {
    const PAGES: usize = 5;
    let scene = adder(PAGES);
    let swaps: Vec<_> = (0..PAGES).map(|page| scene.request(page * PAGE, PAGE)).collect();
    let mut odd = swaps.clone();
    // This is not a multiple of a page.
    odd[3].device_offset += 1;
    let swap = |stopped: &mut Stopped<'_>| {
        let mut swapping = stopped.prepare_swaps(scene.placeholder.as_fd(), &odd).unwrap();
        assert!((0..3).all(|place| swapping.swap(place).unwrap().len() == 1));
        for _ in 0..2 {
            let refused = swapping.swap(3);
            assert!(matches!(refused, Err(Error::Call { .. })), "{refused:?}");
        }
    };
    scene.stopped(swap).unwrap();
    let rest = scene.stopped(|stopped| scene.swap_in(stopped, &swaps)).unwrap().unwrap();
    let offsets: Vec<u64> = rest.iter().map(|part| part.offset).collect();
    assert_eq!(offsets, [3 * PAGE as u64, 4 * PAGE as u64]);
    scene.shared().set(GO, 1);
    let words = (0..PAGES).map(|page| content(page * PAGE));
    assert_eq!(scene.shared().wait(RESULT, |sum| sum != 0), words.fold(0, u64::wrapping_add));
}

#[test]
fn a_device_that_cannot_be_mapped_leaves_the_placeholder() {
    let scene = Scene::start(2, |hand| {
        hand.shared.set(RESULT, hand.word(0).load(Ordering::SeqCst));
        pause_for_ever()
    });
    scene.fault();
    let before = scene.target.maps();
    let refused = scene
        .stopped(|stopped| {
            let mut request = scene.request(0, scene.length);
            // This is not a multiple of a page.
            request.device_offset = 1;
            scene.swap_in(stopped, &[request]).unwrap_err()
        })
        .unwrap();
    let Error::Call { source, .. } = &refused else { panic!("{refused}") };
    assert_eq!(source.raw_os_error(), Some(libc::EINVAL));
    assert_eq!(scene.target.maps(), before);
    scene.swap();
    assert_eq!(scene.shared().wait(RESULT, |value| value != 0), content(0));
}

#[test]
fn the_device_is_found_under_another_number_unless_closed() {
    let closing = |keep: bool| {
        move |hand: Hand| {
            let file = usize::try_from(hand.shared.wait(GO, |file| file != 0)).unwrap();
            if keep {
                sys::call(libc::SYS_dup, [file, 0, 0, 0, 0, 0]).unwrap();
            }
            // Another file takes the number.
            sys::call(libc::SYS_dup2, [0, file, 0, 0, 0, 0]).unwrap();
            hand.shared.set(RESULT, 1);
            pause_for_ever()
        }
    };
    for keep in [true, false] {
        let scene = Scene::start(1, closing(keep));
        scene.shared().set(GO, u64::try_from(scene.device.as_raw_fd()).unwrap());
        scene.shared().wait(RESULT, |value| value != 0);
        let result = scene.swap_part(0, scene.length);
        match keep {
            true => assert_eq!(result.unwrap().len(), 1),
            false => assert!(matches!(result, Err(Error::NotOpen { .. })), "{result:?}"),
        }
    }
}

#[test]
fn a_child_inherits_a_placeholder_and_not_the_device() {
    let fork_and_wait = |hand: Hand, word: usize| {
        let child = sys::fork(pause_for_ever);
        hand.shared.set(word, u64::try_from(child).unwrap());
    };
    let scene = Scene::start(1, |hand| {
        fork_and_wait(hand, RESULT);
        hand.shared.wait(GO, |go| go != 0);
        fork_and_wait(hand, END);
        pause_for_ever()
    });
    let maps = |pid: u64| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        let start = format!("{:x}-", scene.address);
        text.lines().find(|line| line.starts_with(&start)).map(|line| line.contains(" 00000000 "))
    };
    let before = scene.shared().wait(RESULT, |pid| pid != 0);
    assert_eq!(scene.swap().len(), 1);
    scene.shared().set(GO, 1);
    let after = scene.shared().wait(END, |pid| pid != 0);
    assert_eq!(maps(before), Some(true), "the placeholder from its start");
    assert_eq!(maps(after), None);
}

/// Accesses, moves, splits, protects and forks at random in the placeholder.
fn act_at_random(hand: Hand, seed: u64, pages: usize) -> u64 {
    let mut random = Random::new(seed);
    let mut done = 0;
    while hand.shared.get(END) == 0 {
        let page = random.below(pages);
        let address = hand.address + page * PAGE;
        match random.below(8) {
            0..=3 => {
                let offset = page * PAGE + random.below(PAGE / 8) * 8;
                let value = hand.word(offset).load(Ordering::SeqCst);
                assert_eq!(value, content(offset), "at {offset:#x} after {done}");
            }
            4 => {
                let protection = [libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE][random.below(2)];
                let protection = usize::try_from(protection).unwrap();
                sys::call(libc::SYS_mprotect, [address, PAGE, protection, 0, 0, 0]).unwrap();
            }
            5 => {
                // The page moves away and back. Only this thread uses it, as others must not access it
                // meanwhile.
                let own = hand.address + pages * PAGE;
                let free = sys::map(0, PAGE, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
                let flags = usize::try_from(libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED).unwrap();
                sys::call(libc::SYS_mremap, [own, PAGE, PAGE, flags, free, 0]).unwrap();
                let value = crate::support::memory::word_at(free).load(Ordering::SeqCst);
                assert_eq!(value, content(pages * PAGE), "moved away");
                sys::call(libc::SYS_mremap, [free, PAGE, PAGE, flags, own, 0]).unwrap();
            }
            6 => {
                let child = sys::fork(|| 7);
                let mut status = 0_i32;
                let status = (&raw mut status).expose_provenance();
                let child = usize::try_from(child).unwrap();
                sys::call(libc::SYS_wait4, [child, status, 0, 0, 0, 0]).unwrap();
            }
            _ => thread::sleep(Duration::from_micros(random.below(300))),
        }
        done += 1;
    }
    done
}

#[test]
fn two_hundred_swaps_under_random_activity_show_the_right_bytes() {
    const PAGES: usize = 12;
    let mut random = Random::new(5);
    let mut swaps = 0;
    let mut round = 0;
    while swaps < 200 {
        round += 1;
        let scene = Scene::start(PAGES + 1, |hand| {
            let readers: Vec<_> = (0..2)
                .map(|_| {
                    thread::spawn(move || {
                        while hand.shared.get(END) == 0 {
                            for offset in (0..PAGES * PAGE).step_by(808) {
                                assert_eq!(hand.word(offset).load(Ordering::SeqCst), content(offset));
                            }
                        }
                    })
                })
                .collect();
            act_at_random(hand, round, PAGES);
            i32::from(readers.into_iter().any(|reader| reader.join().is_err()))
        });
        let end = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| scene.read_until(&end));
            // The pages are swapped in a random order.
            let mut left: Vec<usize> = (0..=PAGES).collect();
            while !left.is_empty() {
                let page = left.swap_remove(random.below(left.len()));
                let swapped = scene.swap_part(page * PAGE, PAGE);
                assert!(swapped.as_ref().is_ok_and(|parts| parts.len() == 1), "{page}: {swapped:?}");
                swaps += 1;
                thread::sleep(Duration::from_micros(random.below(1500)));
            }
            end.store(true, Ordering::SeqCst);
        });
        scene.shared().set(END, 1);
        let status = scene.target.ended();
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "round {round}: {status:#x}");
    }
}
