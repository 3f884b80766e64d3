// SPDX-License-Identifier: MIT OR Apache-2.0
//! One image, restored several times at once, each in pid and mount namespaces of its own. The programs have
//! no queues of copy engines, whose numbers the driver gives to one process only (`serve.rs`). One program
//! reads its memory by its CPU, one is a server with compute queues. Its image is in a folder, or in a store
//! that a node agent reads into its cache.

use std::fs::{self, DirEntry};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use gpu_app::shape::Shape;
use rewake_skip::need;
use rewake_testkit::daemon::{DaemonOptions, in_namespaces};
use rewake_testkit::process::output;
use rewake_testkit::programs::rewake;
use softgpu_tests::app::App;
use softgpu_tests::criu::{Criu, Plugin, Version, queues};
use softgpu_tests::dumped::{ONE_RING, soon, unreached};
use softgpu_tests::{Accessor, Daemon, DelayedCopies, Machine, REAL_GPUS, Server, isolated, server};
use tempfile::TempDir;

const REPLICAS: usize = 2;
/// GPU memory of an [`unreached`] server.
const GPU_BYTES: u64 = 12 << 20;
/// Bytes of a log that show whether CRIU has finished.
const LOG_END: usize = 4096;

/// `rewake restore` where `copy` lies over the program's files. It lasts as long as the program.
fn restore(mut command: Command, files: &Path, copy: &Path, work: &Path) -> Child {
    command.args(["--", "-v4"]);
    let errors = fs::File::create(work.join("restore.err")).unwrap();
    in_namespaces(&command, files, copy).stdout(Stdio::null()).stderr(errors).spawn().unwrap()
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
    // The log is long, and an emulated machine is slow.
    let is_last = || {
        let log = fs::read(work.join("restore.log")).unwrap_or_default();
        let end = &log[log.len().saturating_sub(LOG_END)..];
        String::from_utf8_lossy(end).contains("Restore finished successfully")
    };
    assert!(soon(is_last), "{}", logs(work));
}

#[test]
fn one_image_is_restored_twice_at_once() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("files")).unwrap();
        let mut original = Accessor::start(env!("CARGO_BIN_EXE_accessor"), &path("files"), None).unwrap();
        let criu = Criu::with(Plugin::Ours, Version::V4_2, &path("images")).unwrap();
        criu.dump(original.pid()).unwrap();
        original.was_dumped().unwrap();

        let delayed = DelayedCopies::streamers();
        let start = |number: usize| {
            let [copy, work] = folders(folder.path(), number);
            let command = criu.of_rewake_in("restore", &work).unwrap();
            (restore(command, &path("files"), &copy, &work), Accessor::in_copy(&copy), work)
        };
        let replicas: Vec<_> = (0..REPLICAS).map(start).collect();
        replicas.iter().for_each(|(_, _, work)| runs(work));
        // Each accesses missing memory.
        replicas.iter().for_each(|(_, accessor, _)| accessor.ask("check 1").unwrap());
        drop(delayed);
        for (mut child, accessor, work) in replicas {
            accessor.answer().unwrap_or_else(|error| panic!("{error:#}\n{}", logs(&work)));
            accessor.asked("check 0").unwrap();
            accessor.ask("end 0").unwrap();
            let ended = child.wait().unwrap();
            assert!(ended.success(), "{ended}: {}", logs(&work));
        }
    });
}

/// A dumped server with compute queues.
struct Replicated {
    shape: Shape,
    criu: Criu,
    folder: TempDir,
}

impl Replicated {
    fn dumped() -> Self {
        let shape = Shape { no_copiers: true, ..unreached() };
        let folder = tempfile::tempdir().unwrap();
        let files = folder.path().join("files");
        fs::create_dir(&files).unwrap();
        let mut original = Server::start(&shape, &files);
        let criu = Criu::with(Plugin::Ours, Version::V4_2, &folder.path().join("images")).unwrap();
        criu.dump(original.pid).unwrap();
        original.was_dumped(&criu);
        original.app.is_over();
        Self { shape, criu, folder }
    }

    /// Replicas with these numbers run at once before their GPU memory is resident. Then all answer, and end.
    fn restored(&self, numbers: Range<usize>, command: impl Fn(&Path) -> Command) {
        let (delayed, files) = (DelayedCopies::streamers(), self.folder.path().join("files"));
        let start = |number: usize| {
            let [copy, work] = folders(self.folder.path(), number);
            (restore(command(&work), &files, &copy, &work), App::in_copy(&self.shape, &copy), work)
        };
        let replicas: Vec<_> = numbers.map(start).collect();
        replicas.iter().for_each(|(_, _, work)| runs(work));
        drop(delayed);
        for (mut child, app, work) in replicas {
            let answered = server::answers(&app);
            answered.unwrap_or_else(|error| panic!("{error:#}\n{}", logs(&work)));
            app.quit().unwrap();
            let ended = child.wait().unwrap();
            assert!(ended.success(), "{ended}: {}", logs(&work));
        }
    }
}

#[test]
fn a_server_restored_twice_at_once_answers_twice() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        need!(queues());
        let server = Replicated::dumped();
        server.restored(0..REPLICAS, |work| server.criu.of_rewake_in("restore", work).unwrap());
    });
}

#[test]
fn replicas_of_a_stored_server_read_the_store_once() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        need!(queues());
        let server = Replicated::dumped();
        let [store, cache] = ["store", "cache"].map(|name| server.folder.path().join(name));
        let (images, url) = (server.criu.images(), format!("file://{}/server", store.display()));
        output(Command::new(rewake().unwrap()).arg("seal").arg(images)).unwrap();
        output(Command::new(rewake().unwrap()).arg("push").arg(images).arg(&url)).unwrap();
        fs::remove_dir_all(images).unwrap();
        let stored = output(Command::new("du").arg("--summarize").arg("--bytes").arg(&store)).unwrap();
        let stored: u64 = stored.split_whitespace().next().unwrap().parse().unwrap();
        let arguments = ["--cache".into(), cache.clone().into()].to_vec();
        let daemon = Daemon::with(DaemonOptions { arguments, ..DaemonOptions::default() }).unwrap();

        let command = |work: &Path| {
            let mut command = server.criu.restore_from_store(&url, work).unwrap();
            command.arg("--socket").arg(daemon.socket());
            command
        };
        server.restored(0..REPLICAS, command);
        let read = daemon.read_from_store().unwrap();
        eprintln!("{read} of {stored} bytes were read from the store for {REPLICAS} restores");
        assert!(read > GPU_BYTES && read <= stored * 11 / 10, "{read} of {stored} bytes\n{}", daemon.log());

        fs::rename(&store, server.folder.path().join("away")).unwrap();
        let name = |file: DirEntry| file.file_name().into_string().unwrap();
        let mut names = fs::read_dir(&cache).unwrap().map(|file| name(file.unwrap()));
        let id = names.find(|name| name.len() == 64).unwrap();
        server.restored(REPLICAS..REPLICAS + 1, |work| {
            let mut command = command(work);
            command.args(["--id", &id]);
            command
        });
        let served = || daemon.status().unwrap()["agent"]["sessions_served"] == REPLICAS + 1;
        assert!(soon(served), "{}", daemon.status().unwrap());
    });
}
