// SPDX-License-Identifier: MIT OR Apache-2.0
//! One image, restored several times at once, each in pids and mounts of its own: programs without queues of copy engines, whose numbers the
//! driver would give back to one only (`serve.rs`).

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use softgpu_tests::criu::{Criu, Plugin, Version};
use softgpu_tests::dumped::{ONE_RING, soon};
use softgpu_tests::{Held, Machine, Toucher, isolated};

const REPLICAS: usize = 3;

/// `rewake restore` where `copy` lies over the program's files. It lasts as long as the program.
fn restore(criu: &Criu, files: &Path, copy: &Path, work: &Path) -> Child {
    let inner = criu.of_rewake_in("restore", work).unwrap();
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--fork", "--mount-proc", "sh", "-c"]);
    command.arg("mount --bind \"$0\" \"$1\" && shift && exec \"$@\"").arg(copy).arg(files);
    command.arg(inner.get_program()).args(inner.get_args()).args(["--", "-v4"]);
    let errors = fs::File::create(work.join("restore.err")).unwrap();
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors).spawn().unwrap()
}

/// All that is told of it, when something is wrong.
fn told(work: &Path) -> String {
    let text = |name: &str| fs::read_to_string(work.join(name)).unwrap_or_default();
    format!("{}\n{}", text("restore.err"), text("restore.log"))
}

#[test]
fn one_image_restored_three_times_at_once_is_there_three_times() {
    isolated("one_image_restored_three_times_at_once_is_there_three_times", 1, |_| {
        let Some(machine) = Machine::find() else { return };
        machine.becomes(&ONE_RING);
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("files")).unwrap();
        let mut original = Toucher::start(env!("CARGO_BIN_EXE_toucher"), &path("files"), None).unwrap();
        let criu = Criu::with(Plugin::Ours, Version::V4_2, &path("images")).unwrap();
        criu.dump(original.pid()).unwrap();
        original.was_dumped().unwrap();

        let held = Held::streamers();
        let start = |number: usize| {
            let [copy, work] = ["copy", "work"].map(|name| path(&format!("{name}-{number}")));
            let copied = Command::new("cp").arg("-a").arg(path("files")).arg(&copy).status().unwrap();
            assert!(copied.success());
            fs::create_dir(&work).unwrap();
            (restore(&criu, &path("files"), &copy, &work), Toucher::in_copy(&copy), work)
        };
        let replicas: Vec<_> = (0..REPLICAS).map(start).collect();
        let runs = |work: &Path| told(work).contains("Restore finished successfully");
        for (_, _, work) in &replicas {
            assert!(soon(|| runs(work)), "{}", told(work));
        }
        // Each touches what nobody has loaded yet.
        replicas.iter().for_each(|(_, toucher, _)| toucher.ask("check 1").unwrap());
        drop(held);
        for (mut child, toucher, work) in replicas {
            toucher.answer().unwrap_or_else(|error| panic!("{error:#}\n{}", told(&work)));
            toucher.asked("check 0").unwrap();
            toucher.ask("end 0").unwrap();
            let ended = child.wait().unwrap();
            assert!(ended.success(), "{ended}: {}", told(&work));
        }
    });
}
