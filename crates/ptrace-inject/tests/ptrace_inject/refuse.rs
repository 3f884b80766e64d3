// SPDX-License-Identifier: MIT OR Apache-2.0
//! Processes that are refused, processes that only look as if they were, and tracers that are killed.

use std::arch::global_asm;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use crate::support::memory::{FREE, PAGE, Scene, content};
use crate::support::{STOP_TIMEOUT, Target, sys, within};
use rewake_ptrace_inject::{Error, with_stopped};
use rewake_testkit::Random;

const RESULT: usize = FREE;
const GO: usize = FREE + 1;
const END: usize = FREE + 2;

fn word(value: i32) -> usize {
    usize::try_from(value).unwrap()
}

fn ask(pid: i32) -> Result<u64, Error> {
    with_stopped(pid, STOP_TIMEOUT, |stopped| stopped.syscall("getpid", libc::SYS_getpid, [0; 6]))?
}

#[test]
fn a_process_is_refused_while_another_shares_its_memory() {
    let target = Target::start(|shared| {
        // The child shares all memory, even the stack. It only sleeps, in a call that does not write there.
        sys::share_memory(shared.word(GO));
        shared.set(RESULT, 1);
        loop {
            thread::sleep(Duration::from_secs(1));
        }
    });
    let children = || std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", target.pid)).unwrap();
    let child = within(|| children().trim().parse::<i32>().ok(), || "the target has no child".to_owned());
    let refused = ask(target.pid).unwrap_err();
    assert!(matches!(&refused, Error::SharedMemory { with, .. } if *with == [child]), "{refused}");
    sys::kill(child, libc::SIGKILL);
    target.shared.wait(RESULT, |result| result == 1);
    assert!(ask(target.pid).is_ok());
}

#[test]
fn a_call_that_waits_is_interrupted_and_the_process_runs_on() {
    let target = Target::start(|shared| {
        while shared.get(END) == 0 {
            shared.add(GO);
        }
        7
    });
    target.shared.wait(GO, |count| count > 0);
    let broken = with_stopped(target.pid, STOP_TIMEOUT, |stopped| {
        let broken = stopped.syscall("pause", libc::SYS_pause, [0; 6]).unwrap_err();
        assert!(stopped.syscall("getpid", libc::SYS_getpid, [0; 6]).is_ok());
        broken
    })
    .unwrap();
    let Error::Call { call: "pause", source, .. } = &broken else { panic!("{broken}") };
    assert_eq!(source.raw_os_error(), Some(libc::EINTR));
    target.shared.set(END, 1);
    assert_eq!(libc::WEXITSTATUS(target.ended()), 7);
}

#[test]
fn a_process_whose_call_cannot_be_interrupted_is_killed() {
    let scene = Scene::start(1, |_| {
        loop {
            thread::sleep(Duration::from_secs(1));
        }
    });
    let hung = with_stopped(scene.target.pid, STOP_TIMEOUT, |stopped| {
        // The kernel waits for the page, which is never filled.
        let arguments = [scene.address as u64, 0, 0, 0, 0, 0];
        stopped.syscall("uname", libc::SYS_uname, arguments).unwrap_err()
    })
    .unwrap();
    assert!(matches!(hung, Error::Hung { call: "uname", .. }), "{hung}");
    let status = scene.target.ended();
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL, "{status:#x}");
}

/// A program that only pauses: ELF header, one program header, code (System V ABI, i386 supplement).
fn i386_program() -> Vec<u8> {
    const BASE: u32 = 0x1_0000;
    let halves = |values: &[u16]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let words = |values: &[u32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    // pause(2) has number 29. The code repeats it when a signal ends it.
    let code = [0xb8, 29, 0, 0, 0, 0xcd, 0x80, 0xeb, 0xf7];
    let size = 52 + 32 + 9;
    let mut file = b"\x7fELF\x01\x01\x01".to_vec();
    file.resize(16, 0);
    file.extend(halves(&[2, 3]));
    file.extend(words(&[1, BASE + 84, 52, 0, 0]));
    file.extend(halves(&[52, 32, 1, 0, 0, 0]));
    file.extend(words(&[1, 0, BASE, BASE, size, size, 5, 0x1000]));
    file.extend(code);
    file
}

#[test]
fn an_i386_program_is_refused() {
    let path = std::env::temp_dir().join(format!("rewake-i386-{}", std::process::id()));
    std::fs::write(&path, i386_program()).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    let text = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    let target = Target::start(|_| {
        let arguments = [text.as_ptr(), std::ptr::null()];
        let path = text.as_ptr().expose_provenance();
        loop {
            let exec = [path, arguments.as_ptr().expose_provenance(), 0, 0, 0, 0];
            let error = sys::call(libc::SYS_execve, exec).unwrap_err().raw_os_error().unwrap();
            // A target of another test has it open if it was forked while the file was written.
            if error != libc::ETXTBSY {
                return error;
            }
            thread::sleep(Duration::from_millis(1));
        }
    });
    let name = || std::fs::read_link(format!("/proc/{}/exe", target.pid)).unwrap();
    within(|| (name() == path).then_some(()), || format!("{:?}; does the kernel run i386 programs?", name()));
    std::fs::remove_file(&path).unwrap();
    let refused = ask(target.pid).unwrap_err();
    assert!(matches!(refused, Error::Foreign { what: "an i386 program", .. }), "{refused}");
    assert!("SR".contains(target.state(target.pid)));
}

#[test]
fn a_strict_seccomp_filter_sees_all_calls_except_injected_ones() {
    let scene = Scene::start(1, |hand| {
        // A strict filter permits read, write, exit and sigreturn, and kills on other calls.
        let value = hand.word(8).load(Ordering::SeqCst);
        let strict = [word(libc::PR_SET_SECCOMP), 1, 0, 0, 0, 0];
        sys::call(libc::SYS_prctl, strict).unwrap();
        hand.shared.set(RESULT, value);
        while hand.shared.get(GO) == 0 {
            std::hint::spin_loop();
        }
        sys::call(libc::SYS_getpid, [0; 6]).unwrap();
        0
    });
    scene.fault();
    scene.swap();
    assert_eq!(scene.shared().wait(RESULT, |value| value != 0), content(8));
    assert_eq!(ask(scene.target.pid).unwrap(), u64::try_from(scene.target.pid).unwrap());
    scene.shared().set(GO, 1);
    let status = scene.target.ended();
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL, "{status:#x}");
}

// A restartable sequence that spins until the word at rdi is set, and its abort handler. eax says which of
// them ended it. `struct rseq_cs`: version, flags, start, length, abort. The signature is glibc's.
global_asm!(
    ".pushsection .data.rel.rewake, \"aw\"",
    ".balign 32",
    "rewake_sequence: .long 0, 0",
    ".quad 1f, 2f - 1f, 4f",
    ".popsection",
    ".globl rewake_spin",
    "rewake_spin:",
    "lea rax, [rip + rewake_sequence]",
    "mov [rsi], rax",
    "1: mov rax, [rdi]",
    "test rax, rax",
    "jz 1b",
    "2: mov eax, 1",
    "ret",
    ".byte 0x0f, 0xb9, 0x3d",
    ".long 0x53053053",
    "4: mov eax, 2",
    "ret",
);

#[test]
fn a_stop_restarts_a_restartable_sequence() {
    let target = Target::start(|shared| {
        loop {
            shared.add(GO);
            let how = sys::spin(shared.word(END));
            shared.set(RESULT, how);
            shared.add(FREE + 8 + usize::try_from(how).unwrap());
            if how == 1 {
                return 0;
            }
        }
    });
    for _ in 0..20 {
        let before = target.shared.wait(GO, |rounds| rounds > 0);
        // The thread is usually inside the sequence again. The stop is repeated until it was.
        let begun_anew = || {
            thread::sleep(Duration::from_millis(2));
            assert!(ask(target.pid).is_ok());
            (target.shared.get(GO) > before).then_some(())
        };
        within(begun_anew, || "the thread was never in its sequence".to_owned());
    }
    target.shared.set(END, 1);
    assert_eq!(libc::WEXITSTATUS(target.ended()), 0);
}

#[test]
fn a_killed_tracer_leaves_a_process_unchanged_or_killed() {
    const ROUNDS: usize = 120;
    /// The most rounds, if one of the two outcomes is missing.
    const MOST: usize = 2000;
    let mut random = Random::new(11);
    let (mut went_on, mut killed) = (0, 0);
    for round in 0..MOST {
        if round >= ROUNDS && went_on > 0 && killed > 0 {
            break;
        }
        let scene = Scene::start(4, |hand| {
            while hand.shared.get(END) == 0 {
                for offset in (0..4 * PAGE).step_by(64) {
                    if hand.word(offset).load(Ordering::SeqCst) != content(offset) {
                        return 3;
                    }
                }
                hand.shared.add(GO);
            }
            7
        });
        scene.fault();
        // The swaps cover whole pages, so that a target that continues has all of them. Then the tracer makes
        // calls without end.
        let tracer = sys::fork(|| {
            scene.swap();
            scene.shared().set(RESULT, 1);
            loop {
                let _ = ask(scene.target.pid);
            }
        });
        scene.shared().wait(RESULT, |result| result == 1);
        thread::sleep(Duration::from_micros(random.below(3000)));
        sys::kill(tracer, libc::SIGKILL);
        within(|| sys::reap(tracer), || "the tracer is alive".to_owned());
        scene.shared().set(END, 1);
        let status = scene.target.ended();
        match libc::WIFEXITED(status) {
            true => {
                assert_eq!(libc::WEXITSTATUS(status), 7, "round {round}");
                went_on += 1;
            }
            false => {
                assert_eq!(libc::WTERMSIG(status), libc::SIGKILL, "round {round}");
                killed += 1;
            }
        }
    }
    assert!(went_on > 0 && killed > 0, "{went_on} ran on, {killed} were killed");
}
