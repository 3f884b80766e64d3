// SPDX-License-Identifier: MIT OR Apache-2.0
//! A server with GPU memory moves between two hosts, in the middle of an answer. Both hosts have the same
//! GPUs.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Child, Output, Stdio};
use std::thread::sleep;
use std::time::Duration;

use gpu_app::shape::{Mode, Shape};
use rewake_criu_images::ARRIVING_NAME;
use rewake_skip::need;
use rewake_testkit::hosts::{DESTINATION, HostPair};
use rewake_testkit::process::tail;
use rewake_testkit::programs::rewake;
use rewake_testkit::relay::SlowLink;
use rewake_testkit::{PATIENCE, soon, until};
use softgpu_tests::app::{App, program_for, serve};
use softgpu_tests::criu::{Version, queues};
use softgpu_tests::isolated;
use softgpu_tests::server::{answers, begin, small};

const PORT: &str = "7700";
const SERVER: &str = "gpu-app";
/// Bytes a second of a slow link: in four minutes it brings less than half of the weights.
const RATE: u64 = 64 << 10;
const CUT: Duration = Duration::from_secs(2);

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
        until(PATIENCE, || app.answers(&[1, 2, 3], 4).ok()).expect("it serves");
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
        self.begin_migration(&format!("{DESTINATION}:{PORT}"), &[]).wait_with_output().unwrap()
    }

    fn begin_migration(&self, to: &str, options: &[&str]) -> Child {
        let source = &self.hosts.source;
        let pid = source.named(SERVER).into_iter().min().expect("it runs");
        let pid = source.own_number(pid).unwrap().to_string();
        let mut migrate = source.command(rewake().unwrap());
        migrate.args(["migrate", "-t", &pid, "--to", to]).args(options);
        migrate.args(["--insecure", "--criu", "criu"]);
        migrate.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// The destination's folder of the migration.
    fn destination_folder(&self) -> Option<PathBuf> {
        let folders = fs::read_dir(self.hosts.destination.path("/run/rewake/migrations")).ok()?;
        folders.flatten().next().map(|folder| folder.path())
    }

    /// Whether the destination has made files whose bytes it requests later.
    fn lists_arriving_files(&self) -> bool {
        self.destination_folder().is_some_and(|folder| folder.join("images").join(ARRIVING_NAME).exists())
    }

    /// Whether the destination has written RELEASE.
    fn is_released(&self) -> bool {
        let record = self.destination_folder().and_then(|at| fs::read_to_string(at.join("record")).ok());
        record.is_some_and(|text| text.contains("released"))
    }

    /// Ends well: the server has all its memory at the destination, and answers right.
    fn expect_moved(mut self, migrate: Child) -> Output {
        let migrated = migrate.wait_with_output().unwrap();
        assert_eq!(migrated.status.code(), Some(0), "{}\n{}", said(&migrated), self.received());
        let received = until(PATIENCE, || self.receive.try_wait().unwrap()).expect("it ends");
        assert_eq!(received.code(), Some(0), "{}", self.received());
        self.server.wait().unwrap();
        assert_eq!(self.processes(), (0, 1));
        answers(&self.app).unwrap();
        self.app.quit().unwrap();
        migrated
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

/// A server with weights that have no zeros, and their number of bytes. It has no other work, so the
/// registered memory of one queue alone must arrive before it runs.
fn movable_with_weights() -> (Shape, u64) {
    let shape = Shape { layers: 4, layer_kib: 8192, mode: Mode::Idle, ..movable() };
    let weights = shape.layers * shape.layer_bytes();
    (shape, weights)
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

#[test]
fn a_server_moves_with_its_gpu_memory() {
    isolated(1, |_| {
        need!(queues());
        let migration = GpuMigration::started(&movable(), "criu");
        let migrate = migration.begin_migration(&format!("{DESTINATION}:{PORT}"), &["--pre-copy-only"]);
        assert!(said(&migration.expect_moved(migrate)).contains("downtime "));
    });
}

#[test]
fn gpu_memory_arrives_while_its_server_runs() {
    isolated(1, |_| {
        need!(queues());
        let (shape, weights) = movable_with_weights();
        let migration = GpuMigration::started(&shape, "criu");
        let address = format!("{DESTINATION}:{PORT}").parse().unwrap();
        let link = SlowLink::on(&migration.hosts.source, address, u64::MAX).unwrap();
        let mut migrate = migration.begin_migration(&format!("127.0.0.1:{}", link.port()), &[]);
        let mut wait_until = |is_so: &dyn Fn() -> bool| {
            let or_ended = || is_so().then_some(None).or_else(|| migrate.try_wait().unwrap().map(Some));
            assert_eq!(until(PATIENCE, or_ended), Some(None), "{}", migration.received());
        };
        // Its CPU memory was sent before, and GPU memory is requested only after RELEASE.
        wait_until(&|| migration.lists_arriving_files());
        let sent = link.sent();
        link.slow_after(weights / 2, RATE);
        wait_until(&|| migration.is_released());
        migration.app.rounds().unwrap();
        until(PATIENCE, || migration.hosts.destination.named("criu").is_empty().then_some(()))
            .expect("criu ends");
        assert_eq!(migrate.try_wait().unwrap(), None);
        // Its CPU answers, and weights are on the other host.
        let sent = link.sent() - sent;
        assert!(sent < weights, "{sent} of {weights} bytes");
        link.part();
        sleep(CUT);
        assert_eq!(migrate.try_wait().unwrap(), None);
        migration.app.rounds().unwrap();
        link.slow_to(u64::MAX);
        link.join();
        migration.expect_moved(migrate);
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
