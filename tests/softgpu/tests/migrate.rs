// SPDX-License-Identifier: MIT OR Apache-2.0
//! A server with GPU memory moves between two hosts, in the middle of an answer. Both hosts have the same GPUs.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Child, Output};

use gpu_app::shape::{Mode, Shape};
use rewake_skip::need;
use rewake_testkit::hosts::{DESTINATION, HostPair};
use rewake_testkit::process::tail;
use rewake_testkit::programs::rewake;
use rewake_testkit::{MINUTE, soon, until};
use softgpu_tests::app::{App, program_for, serve};
use softgpu_tests::criu::{Version, queues};
use softgpu_tests::isolated;
use softgpu_tests::server::{answers, begin, small};

const PORT: &str = "7700";
const SERVER: &str = "gpu-app";

/// A server on the source, and `rewake receive` on the destination.
struct GpuMigration {
    hosts: HostPair,
    app: App,
    server: Child,
    receive: Child,
    folder: tempfile::TempDir,
}

impl GpuMigration {
    /// Starts both, and an answer. The destination restores by this CRIU.
    fn started(shape: &Shape, criu: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let hosts = HostPair::start(folder.path()).unwrap();
        let program = program_for(Version::V4_2, folder.path()).unwrap();
        let server = hosts.source.alone(&serve(&program, shape, folder.path())).spawn().unwrap();
        let app = App::in_copy(shape, folder.path());
        until(2 * MINUTE, || app.answers(&[1, 2, 3], 4).ok()).expect("it serves");
        let mut receive = hosts.destination.command(rewake().unwrap());
        receive.args(["receive", "--address", DESTINATION, "--port", PORT, "--insecure", "--criu", criu]);
        let log = File::create(folder.path().join("receive.log")).unwrap();
        let receive = receive.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        let migration = Self { hosts, app, server, receive, folder };
        assert!(soon(|| migration.received().contains("listening on")), "{}", migration.received());
        begin(&migration.app).unwrap();
        migration
    }

    fn migrate(&self) -> Output {
        let source = &self.hosts.source;
        let pid = source.named(SERVER).into_iter().min().expect("it runs");
        let pid = source.own_number(pid).unwrap().to_string();
        let mut migrate = source.command(rewake().unwrap());
        migrate.args(["migrate", "-t", &pid, "--to", &format!("{DESTINATION}:{PORT}")]);
        migrate.args(["--insecure", "--criu", "criu"]).output().unwrap()
    }

    fn received(&self) -> String {
        tail(&self.folder.path().join("receive.log"), 20)
    }

    /// The number of its processes on the source and on the destination.
    fn processes(&self) -> (usize, usize) {
        (self.hosts.source.named(SERVER).len(), self.hosts.destination.named(SERVER).len())
    }
}

/// No copy engine: the driver restores their queues by number, and the source has them until the end.
fn movable() -> Shape {
    Shape { mode: Mode::MidDispatch, no_copiers: true, ..small() }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

#[test]
fn a_server_moves_with_its_gpu_memory() {
    isolated(1, |_| {
        need!(queues());
        let mut migration = GpuMigration::started(&movable(), "criu");
        let migrated = migration.migrate();
        assert_eq!(migrated.status.code(), Some(0), "{}\n{}", said(&migrated), migration.received());
        assert!(said(&migrated).contains("downtime "), "{}", said(&migrated));
        let received = until(MINUTE, || migration.receive.try_wait().unwrap()).expect("it ends");
        assert_eq!(received.code(), Some(0), "{}", migration.received());
        migration.server.wait().unwrap();
        assert_eq!(migration.processes(), (0, 1));
        answers(&migration.app).unwrap();
        migration.app.quit().unwrap();
    });
}

#[test]
fn a_failed_restore_leaves_the_server_at_work() {
    isolated(1, |_| {
        need!(queues());
        // It can be compared, and its restores fail.
        let folder = tempfile::tempdir().unwrap();
        let (fails, mark) = (folder.path().join("criu"), folder.path().join("mark"));
        let script = "#!/bin/sh\n[ \"$1\" = --version ] && exec criu --version\n[ \"$1\" = restore ] && ";
        let script = format!("{script}touch {}\nexit 1\n", mark.display());
        fs::write(&fails, script).unwrap();
        fs::set_permissions(&fails, fs::Permissions::from_mode(0o700)).unwrap();
        let mut migration = GpuMigration::started(&movable(), fails.to_str().unwrap());
        let migrated = migration.migrate();
        // A restore begins when the source is frozen.
        assert!(mark.exists(), "{}\n{}", said(&migrated), migration.received());
        assert_eq!(migrated.status.code(), Some(1), "{}\n{}", said(&migrated), migration.received());
        assert!(said(&migrated).contains("runs here: "), "{}", said(&migrated));
        assert_eq!(migration.receive.wait().unwrap().code(), Some(1), "{}", migration.received());
        assert_eq!(migration.processes(), (1, 0));
        answers(&migration.app).unwrap();
        migration.app.quit().unwrap();
        migration.server.wait().unwrap();
    });
}
