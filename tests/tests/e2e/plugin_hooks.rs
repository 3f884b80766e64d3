// SPDX-License-Identifier: MIT OR Apache-2.0
//! A plugin on `rewake-criu-plugin` in the real CRIU: which hooks are called, and what becomes of their
//! errors.

use rewake_tests::plugins::{Rig, observer};
use rewake_tests::{Criu, Verdict, need};

/// A target with a device and the observer. Ends the test as skipped where there is none.
macro_rules! rig {
    ($criu:expr) => {{
        let criu = need!($criu);
        need!(Rig::new(&criu, "device", &[observer().unwrap()]).unwrap())
    }};
}

/// True from CRIU 4.2 on.
fn knows_post_forking(criu: &Criu) -> bool {
    !criu.version().unwrap().contains("4.1")
}

/// The calls without the count of threads, which is always one.
#[track_caller]
fn calls(rig: &Rig) -> Vec<String> {
    let calls = rig.calls();
    let single = |call: &String| call.strip_suffix(" threads=1").map(|call| call.trim_end().to_owned());
    calls.iter().map(|call| single(call).unwrap_or_else(|| panic!("more than one thread: {call}"))).collect()
}

fn hooks_come_in_order(mut rig: Rig, post_forking: bool) {
    let device = rig.device().display().to_string();
    rig.dump(&[]).unwrap();
    let file = format!("DUMP_EXT_FILE {device}");
    let dump = [
        "init Dump",
        "PAUSE_DEVICES",
        "CHECKPOINT_DEVICES",
        "HANDLE_DEVICE_VMA 60000",
        &file,
        "exit Dump true",
    ];
    assert_eq!(calls(&rig), dump);

    rig.restore(&[]).unwrap();
    let mut found = calls(&rig);
    // CRIU calls it while tasks are restored.
    let before = found.len();
    found.retain(|call| call != "POST_FORKING");
    assert_eq!(before - found.len(), usize::from(post_forking));
    // In the order of addresses, or of offsets: both are right.
    found[2..4].sort();
    let restore = [
        "init Restore { named: true }",
        &format!("RESTORE_EXT_FILE {device}"),
        &format!("UPDATE_VMA_MAP {device} 0x0"),
        &format!("UPDATE_VMA_MAP {device} 0x8000"),
        "RESUME_DEVICES_LATE 36",
        "exit Restore { named: true } true",
    ];
    assert_eq!(found, restore);
    assert_eq!(rig.verdict().unwrap(), Verdict::Ok);
}

#[test]
fn hooks_are_called_in_order_and_devices_are_restored() {
    let criu = need!(Criu::main());
    let post_forking = knows_post_forking(&criu);
    hooks_come_in_order(rig!(Ok::<_, String>(criu)), post_forking);
}

#[test]
fn hooks_are_called_in_order_by_another_criu_version() {
    let criu = need!(Criu::main());
    let other = need!(Criu::alternative());
    criu.ensure_differs(&other).unwrap();
    let post_forking = knows_post_forking(&other);
    hooks_come_in_order(rig!(Ok::<_, String>(other)), post_forking);
}

/// The failures of a hook: the variable that causes it, and the text that must be in the log.
const WAYS: [(&str, &str, &str); 2] =
    [("OBSERVER_FAIL", "", "asked to fail"), ("OBSERVER_PANIC", "panicked: ", ": asked to panic")];

/// Exactly one line of the plugin names the hook and the reason.
#[track_caller]
fn said_once(rig: &Rig, act: &str, hook: &str, (way, start, end): (&str, &str, &str)) {
    let lines = rig.log_lines(act, "Error (observer): ");
    assert_eq!(lines.len(), 1, "{way} {hook}: {lines:?}");
    let start = format!("Error (observer): {hook}: {start}");
    assert!(lines[0].contains(&start) && lines[0].ends_with(end), "{way} {hook}: {}", lines[0]);
}

fn errors_fail_the_dump(mut rig: Rig) {
    for hook in ["init", "PAUSE_DEVICES", "CHECKPOINT_DEVICES", "HANDLE_DEVICE_VMA", "DUMP_EXT_FILE"] {
        for way in WAYS {
            rig.dump(&[(way.0, hook)]).expect_err(hook);
            said_once(&rig, "dump", hook, way);
            let ended = calls(&rig).last().is_some_and(|call| call == "exit Dump false");
            assert_eq!(ended, hook != "init", "{hook}: {:?}", calls(&rig));
        }
    }
    assert_eq!(rig.verdict().unwrap(), Verdict::Ok, "the target continues");
}

#[test]
fn an_error_or_panic_in_a_hook_fails_the_dump() {
    errors_fail_the_dump(rig!(Criu::main()));
}

#[test]
fn an_error_or_panic_in_a_hook_fails_the_dump_of_another_criu() {
    errors_fail_the_dump(rig!(Criu::alternative()));
}

fn errors_fail_the_restore(mut rig: Rig, post_forking: bool) {
    rig.dump(&[]).unwrap();
    let hooks = ["init", "RESTORE_EXT_FILE", "UPDATE_VMA_MAP", "POST_FORKING"];
    for hook in &hooks[..3 + usize::from(post_forking)] {
        for way in WAYS {
            rig.restore(&[(way.0, hook)]).expect_err(hook);
            said_once(&rig, "restore", hook, way);
            rig.kill_restored();
        }
    }
    // CRIU ignores the result of this hook.
    for way in WAYS {
        rig.restore(&[(way.0, "RESUME_DEVICES_LATE")]).unwrap();
        said_once(&rig, "restore", "RESUME_DEVICES_LATE", way);
        assert_eq!(calls(&rig).last().unwrap(), "exit Restore { named: true } true");
        rig.kill_restored();
    }
    rig.restore(&[]).unwrap();
    assert_eq!(rig.verdict().unwrap(), Verdict::Ok);
}

#[test]
fn an_error_or_panic_in_a_hook_fails_the_restore() {
    let criu = need!(Criu::main());
    let post_forking = knows_post_forking(&criu);
    errors_fail_the_restore(rig!(Ok::<_, String>(criu)), post_forking);
}

#[test]
fn an_error_or_panic_in_a_hook_fails_the_other_criu_s_restore() {
    let criu = need!(Criu::alternative());
    let post_forking = knows_post_forking(&criu);
    errors_fail_the_restore(rig!(Ok::<_, String>(criu)), post_forking);
}
