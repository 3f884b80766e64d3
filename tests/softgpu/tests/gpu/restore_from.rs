// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake restore --from`: programs run while their GPU memory arrives from `rewake export` over a slow
//! link, which is cut, or whose server has a wrong byte. They see right bytes or are killed. The copy becomes
//! an image.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_skip::need;
use rewake_testkit::export::ImageExport;
use rewake_testkit::process::{PATIENCE, children, output, processes_naming};
use rewake_testkit::programs::rewake;
use rewake_testkit::relay::SlowLink;
use rewake_testkit::{soon, until};
use softgpu_tests::accessor::{BYTES, Large};
use softgpu_tests::criu::{Criu, Plugin, Version, wait_for_the_end_of};
use softgpu_tests::dumped::{Dumped, is_paused, pages, unreached};
use softgpu_tests::streamer::recover;
use softgpu_tests::{Accessor, isolated};

/// Bytes of a slow link in a second.
const SLOW: u64 = 4 << 20;
/// GPU memory of an [`unreached`] server, and of an accessor with [`LARGE`] buffers.
const GPU_BYTES: u64 = 12 << 20;
const LARGE: Large = Large { count: 8, mib: BYTES >> 20, full: true };

/// A sealed image, its server, and a link to it.
struct Remote {
    images: PathBuf,
    server: ImageExport,
    link: SlowLink,
    folder: tempfile::TempDir,
}

impl Remote {
    fn of(images: &Path) -> Self {
        output(Command::new(rewake().unwrap()).arg("seal").arg(images)).unwrap();
        let server = ImageExport::start(images.parent().unwrap(), &[]).unwrap();
        let link = SlowLink::to(server.port(), SLOW).unwrap();
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("work")).unwrap();
        Self { images: images.to_owned(), server, link, folder }
    }

    fn copy(&self) -> PathBuf {
        self.folder.path().join("copy")
    }

    fn work(&self) -> PathBuf {
        self.folder.path().join("work")
    }

    fn name(&self) -> String {
        let name = self.images.file_name().unwrap().to_str().unwrap();
        format!("127.0.0.1:{name}")
    }

    /// Restores it. Returns when the program runs.
    fn restore(&self) {
        let copy = self.copy();
        let criu = Criu::with(Plugin::Ours, Version::V4_2, &copy).unwrap();
        let mut command = criu.of_rewake_in("restore", &self.work()).unwrap();
        command.args(["--from", &self.name(), "--port", &self.link.port().to_string(), "--wait", "alive"]);
        let messages = File::create(self.work().join("restore.err")).unwrap();
        command.args(["--", "-d", "-v4"]).stdout(Stdio::null()).stderr(messages);
        assert!(command.status().unwrap().success(), "{}", self.messages());
    }

    fn messages(&self) -> String {
        let text = |name: &str| fs::read_to_string(self.work().join(name)).unwrap_or_default();
        ["restore.log", "restore.err", "rewake-streamer.log"].map(text).join("\n")
    }

    /// Waits until another `bytes` bytes have passed the link.
    fn passes(&self, bytes: u64) {
        let end = self.link.passed() + bytes;
        assert!(soon(|| self.link.passed() >= end), "{} of {end}\n{}", self.link.passed(), self.messages());
    }

    fn fetchers(&self) -> Vec<Pid> {
        let streamers = processes_naming(&self.work().display().to_string());
        let is_fetcher = |pid: &Pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.ends_with(b"\0fetcher\0")
        };
        streamers.into_iter().flat_map(children).filter(is_fetcher).collect()
    }

    fn streamer_ends(&self) {
        let work = self.work().display().to_string();
        let ended = until(PATIENCE, || processes_naming(&work).is_empty().then_some(()));
        assert!(ended.is_some(), "the streamer does not end: {}", self.messages());
    }

    /// The copy has all files of an image, and every byte is right.
    fn is_complete(&self) {
        self.streamer_ends();
        assert!(!self.copy().join("rewake-manifest.partial").exists(), "{}", self.messages());
        output(Command::new(rewake().unwrap()).arg("verify").arg(self.copy())).unwrap();
    }
}

#[test]
fn a_server_runs_before_its_gpu_memory_has_arrived() {
    isolated(1, |_| {
        let dumped = need!(Dumped::of(&unreached(), Version::V4_2));
        let remote = Remote::of(dumped.criu.images());
        let before = remote.link.passed();
        remote.restore();
        assert!(is_paused(dumped.server.pid), "its queues wait for memory: {}", remote.messages());
        let passed = remote.link.passed() - before;
        assert!(passed < GPU_BYTES, "{passed} bytes before it runs: all of its GPU memory");
        remote.is_complete();
        dumped.server.ends_well();
    });
}

#[test]
fn after_cuts_and_dead_fetchers_queues_run_with_right_bytes() {
    isolated(1, |_| {
        let dumped = need!(Dumped::of(&unreached(), Version::V4_2));
        let remote = Remote::of(dumped.criu.images());
        remote.restore();
        for _ in 0..2 {
            remote.passes(1 << 20);
            remote.link.cut();
        }
        remote.passes(1 << 20);
        let fetchers = remote.fetchers();
        assert!(!fetchers.is_empty(), "{}", remote.messages());
        fetchers.into_iter().for_each(|pid| kill(pid, Signal::SIGKILL).unwrap());
        assert!(is_paused(dumped.server.pid), "GPU memory is missing: {}", remote.messages());
        remote.is_complete();
        assert!(remote.messages().matches("starting another fetcher").count() >= 3, "{}", remote.messages());
        dumped.server.ends_well();
    });
}

#[test]
fn a_wrong_byte_of_gpu_memory_reaches_no_queue() {
    isolated(1, |_| {
        let mut dumped = need!(Dumped::of(&unreached(), Version::V4_2));
        let remote = Remote::of(dumped.criu.images());
        // The server reads its image unchecked.
        let file = pages(&remote.images).into_iter().max_by_key(|file| fs::metadata(file).unwrap().len());
        let (path, mut byte, at) = (file.unwrap(), [0], (9 << 20) + 77);
        let file = File::options().read(true).write(true).open(&path).unwrap();
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
        remote.restore();
        remote.streamer_ends();
        let text = remote.messages();
        assert!(
            text.contains("amdgpu-pages-") && text.contains("some are not those that were sealed"),
            "{text}"
        );
        assert!(soon(|| !Path::new(&format!("/proc/{}", dumped.server.pid)).exists()), "it runs: {text}");
        dumped.server.app.is_over();

        assert!(remote.copy().join("rewake-manifest.partial").exists());
        file.write_all_at(&byte, at).unwrap();
        let mut pull = Command::new(rewake().unwrap());
        pull.args(["pull", "--port", &remote.server.port().to_string(), &remote.name()]).arg(remote.copy());
        output(&mut pull).unwrap();
        remote.is_complete();
    });
}

#[test]
fn the_next_restore_completes_the_copy_of_a_killed_session() {
    isolated(1, |_| {
        let dumped = need!(Dumped::of(&unreached(), Version::V4_2));
        let (pid, remote) = (dumped.server.pid, Remote::of(dumped.criu.images()));
        remote.restore();
        remote.passes(4 << 20);
        assert!(is_paused(pid), "GPU memory is missing: {}", remote.messages());
        let streamers = processes_naming(&remote.work().display().to_string());
        streamers.into_iter().for_each(|pid| kill(pid, Signal::SIGKILL).unwrap());
        let (_, said) = recover().unwrap();
        wait_for_the_end_of(pid).unwrap_or_else(|error| panic!("{error:#}\n{said}"));
        assert!(remote.copy().join("rewake-manifest.partial").exists());

        fs::remove_dir_all(remote.work()).unwrap();
        fs::create_dir(remote.work()).unwrap();
        remote.restore();
        remote.is_complete();
        dumped.server.ends_well();
    });
}

#[test]
fn a_buffer_that_a_cpu_reads_arrives_before_the_others() {
    isolated(1, |_| {
        let folder = tempfile::tempdir().unwrap();
        let mut accessor =
            Accessor::start(env!("CARGO_BIN_EXE_accessor"), folder.path(), Some(LARGE)).unwrap();
        let criu = accessor.dump(Version::V4_2).unwrap();
        let remote = Remote::of(criu.images());
        remote.restore();
        // Little of the others passes while the buffer is compared, which takes an emulated processor
        // seconds.
        remote.link.slow_to(SLOW / 4);
        let before = remote.link.passed();
        accessor.asked(&format!("check {}", LARGE.count - 1)).unwrap();
        let passed = remote.link.passed() - before;
        // In addition to the buffer, only what was in flight has passed.
        assert!(passed < (LARGE.count * BYTES / 2) as u64, "{passed} bytes\n{}", remote.messages());
        remote.link.slow_to(16 * SLOW);
        (0..LARGE.count).for_each(|buffer| accessor.asked(&format!("check {buffer}")).unwrap());
        remote.is_complete();
        accessor.ends();
    });
}
