// SPDX-License-Identifier: MIT OR Apache-2.0
//! One image, restored several times at once, each in pid and mount namespaces of its own. The programs have
//! no queues of copy engines, whose numbers the driver gives to one process only (`serve.rs`). One program
//! reads its memory by its CPU, one is a server with compute queues.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use gpu_app::shape::Shape;
use rewake_skip::need;
use softgpu_tests::app::App;
use softgpu_tests::criu::{Criu, Plugin, Version, queues};
use softgpu_tests::dumped::{ONE_RING, soon, unreached};
use softgpu_tests::{Held, Machine, REAL_GPUS, Server, Toucher, isolated, server};

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

/// The logs of a replica, for failure reports.
fn logs(work: &Path) -> String {
    let text = |name: &str| fs::read_to_string(work.join(name)).unwrap_or_default();
    format!("{}\n{}", text("restore.err"), text("restore.log"))
}

/// A copy of the original's files for replica `number`, and its work directory.
fn folders(of: &Path, number: usize) -> [PathBuf; 2] {
    let [copy, work] = ["copy", "work"].map(|name| of.join(format!("{name}-{number}")));
    let copied = Command::new("cp").arg("-a").arg(of.join("files")).arg(&copy).status().unwrap();
    assert!(copied.success());
    fs::create_dir(&work).unwrap();
    [copy, work]
}

fn runs(work: &Path) {
    assert!(soon(|| logs(work).contains("Restore finished successfully")), "{}", logs(work));
}

#[test]
fn one_image_is_restored_three_times_at_once() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("files")).unwrap();
        let mut original = Toucher::start(env!("CARGO_BIN_EXE_toucher"), &path("files"), None).unwrap();
        let criu = Criu::with(Plugin::Ours, Version::V4_2, &path("images")).unwrap();
        criu.dump(original.pid()).unwrap();
        original.was_dumped().unwrap();

        let held = Held::streamers();
        let start = |number: usize| {
            let [copy, work] = folders(folder.path(), number);
            (restore(&criu, &path("files"), &copy, &work), Toucher::in_copy(&copy), work)
        };
        let replicas: Vec<_> = (0..REPLICAS).map(start).collect();
        replicas.iter().for_each(|(_, _, work)| runs(work));
        // Each accesses missing memory.
        replicas.iter().for_each(|(_, toucher, _)| toucher.ask("check 1").unwrap());
        drop(held);
        for (mut child, toucher, work) in replicas {
            toucher.answer().unwrap_or_else(|error| panic!("{error:#}\n{}", logs(&work)));
            toucher.asked("check 0").unwrap();
            toucher.ask("end 0").unwrap();
            let ended = child.wait().unwrap();
            assert!(ended.success(), "{ended}: {}", logs(&work));
        }
    });
}

#[test]
fn a_server_restored_three_times_at_once_answers_three_times() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        need!(queues());
        let shape = Shape { no_copiers: true, ..unreached() };
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("files")).unwrap();
        let mut original = Server::start(&shape, &path("files"));
        let criu = Criu::with(Plugin::Ours, Version::V4_2, &path("images")).unwrap();
        criu.dump(original.pid).unwrap();
        original.was_dumped(&criu);
        original.app.is_over();

        let held = Held::streamers();
        let start = |number: usize| {
            let [copy, work] = folders(folder.path(), number);
            (restore(&criu, &path("files"), &copy, &work), App::in_copy(&shape, &copy), work)
        };
        let replicas: Vec<_> = (0..REPLICAS).map(start).collect();
        replicas.iter().for_each(|(_, _, work)| runs(work));
        drop(held);
        for (mut child, app, work) in replicas {
            let answered = server::answers(&app);
            answered.unwrap_or_else(|error| panic!("{error:#}\n{}", logs(&work)));
            app.quit().unwrap();
            let ended = child.wait().unwrap();
            assert!(ended.success(), "{ended}: {}", logs(&work));
        }
    });
}
