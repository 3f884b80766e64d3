// SPDX-License-Identifier: MIT OR Apache-2.0
//! CRIU's servers for lazy restores: `criu page-server --lazy-pages`, and `criu dump --lazy-pages`, whose
//! program waits frozen and keeps its pid. So its restore runs in a pid namespace of its own.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{sleep, spawn};
use std::time::Duration;

use anyhow::{Context, ensure};
use nix::fcntl::{Flock, FlockArg, OFlag};
use nix::unistd::pipe2;

use crate::criu::Criu;
use crate::page_server::free_port;
use crate::process::{PATIENCE, tail, until, wait_child};
use crate::scene::{ACT, END, Scene};
use crate::server::{Server, ready, with_status_fd};

const PIPE_LIMIT: &str = "/proc/sys/fs/pipe-max-size";
/// What CRIU's servers for lazy restores need (docs/diagnose.md).
const ENOUGH: u64 = 4 << 20;

/// Test programs that raise the limit of pipes wait for each other here.
const LOCK: &str = "/tmp/rewake-test-pipe-limit";

/// Raises the limit of pipes for CRIU's servers for lazy restores, until it is dropped.
#[derive(Debug)]
pub struct PipeLimit {
    before: String,
    over: Arc<AtomicBool>,
    _lock: Flock<File>,
}

/// Other programs set the limit, too: it is checked as often as this.
const PERIOD: Duration = Duration::from_millis(1);

impl PipeLimit {
    /// Raises it where it is too low.
    ///
    /// # Errors
    /// This machine does not permit it.
    pub fn raised() -> Result<Self, String> {
        let lock = File::create(LOCK).map_err(|error| format!("{LOCK}: {error}"))?;
        let lock =
            Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, error)| format!("{LOCK}: {error}"))?;
        let before = fs::read_to_string(PIPE_LIMIT).map_err(|error| format!("{PIPE_LIMIT}: {error}"))?;
        let raise = || fs::write(PIPE_LIMIT, ENOUGH.to_string());
        raise().map_err(|error| format!("raising {PIPE_LIMIT}: {error}"))?;
        let over = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&over);
        spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                if fs::read_to_string(PIPE_LIMIT).is_ok_and(|now| now.trim() != ENOUGH.to_string()) {
                    // CRIU reports it where it fails for that.
                    let _ = raise();
                }
                sleep(PERIOD);
            }
        });
        Ok(Self { before, over, _lock: lock })
    }
}

impl Drop for PipeLimit {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        sleep(PERIOD * 2);
        let _ = fs::write(PIPE_LIMIT, &self.before);
    }
}

/// `criu dump --lazy-pages` that serves the memory of its frozen program. Dropping it kills it.
#[derive(Debug)]
pub struct LazyDump {
    child: Child,
    port: u16,
    images: PathBuf,
}

impl LazyDump {
    /// Dumps a scene's target, and waits until clients can connect.
    ///
    /// # Errors
    /// CRIU failed.
    pub fn listening(scene: &Scene) -> anyhow::Result<Self> {
        Self::listening_with(scene, &[])
    }

    /// [`LazyDump::listening`] with further options.
    ///
    /// # Errors
    /// CRIU failed.
    pub fn listening_with(scene: &Scene, options: &[String]) -> anyhow::Result<Self> {
        let port = free_port()?;
        let images = scene.images();
        let mut command = scene.criu().command("dump");
        command.arg("-t").arg(scene.pid().to_string()).arg("-D").arg(&images).args(["-v4", "-o", "dump.log"]);
        command.args(["--lazy-pages", "--address", "127.0.0.1", "--port", &port.to_string()]);
        command.args(options);
        let (reader, writer) = pipe2(OFlag::O_CLOEXEC).context("status pipe")?;
        let mut command = with_status_fd(&command, writer);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().context("start criu dump")?;
        drop(command);
        let dump = Self { child, port, images };
        ensure!(ready(reader)?, "criu dump does not listen\n{}", dump.text());
        Ok(dump)
    }

    /// Dumps a scene's target, whose memory the other end of this socket gets (`--ps-socket`). Returns when
    /// the target is frozen and its images are written.
    ///
    /// # Errors
    /// CRIU failed.
    pub fn through(scene: &Scene, socket: OwnedFd) -> anyhow::Result<Self> {
        let images = scene.images();
        let mut command = scene.criu().command("dump");
        command.arg("-t").arg(scene.pid().to_string()).arg("-D").arg(&images).args(["-v4", "-o", "dump.log"]);
        // CRIU writes its log into the file.
        command.args(["--lazy-pages", "--ps-socket", "1"]).stdin(Stdio::null()).stdout(socket);
        let child = command.stderr(Stdio::null()).spawn().context("start criu dump")?;
        drop(command);
        let dump = Self { child, port: 0, images };
        let is_written = until(PATIENCE, || dump.images.join("inventory.img").exists().then_some(()));
        is_written.with_context(|| format!("criu dump wrote no image\n{}", dump.text()))?;
        Ok(dump)
    }

    /// Its port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It did not end in time.
    pub fn ended(&mut self) -> anyhow::Result<ExitStatus> {
        wait_child(&mut self.child, PATIENCE).with_context(|| format!("it did not end\n{}", self.text()))
    }

    /// The end of its log.
    #[must_use]
    pub fn text(&self) -> String {
        tail(&self.images.join("dump.log"), 40)
    }
}

impl Drop for LazyDump {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `criu restore --lazy-pages` in a pid namespace of its own, which ends with the restored program.
#[derive(Debug)]
pub struct NamespacedRestore {
    child: Child,
    work: PathBuf,
}

impl NamespacedRestore {
    /// Starts it.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(criu: &Criu, images: &Path, work: &Path) -> anyhow::Result<Self> {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--mount-proc", "--kill-child"]).arg(criu).arg("restore");
        command.arg("-D").arg(images).arg("-W").arg(work);
        command.args(["--lazy-pages", "-v4", "-o", "restore.log"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().context("start criu restore")?;
        Ok(Self { child, work: work.to_owned() })
    }

    /// Waits for the end of the restored program.
    ///
    /// # Errors
    /// It did not end in time.
    pub fn ended(&mut self) -> anyhow::Result<ExitStatus> {
        let ended = wait_child(&mut self.child, PATIENCE);
        ended.with_context(|| format!("it did not end\n{}", tail(&self.work.join("restore.log"), 40)))
    }
}

impl Drop for NamespacedRestore {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Restores a copy of the frozen program of a dump through a client of the dump's server. The frozen program
/// must be killed only when its copy has all memory.
///
/// # Panics
/// The copy reads wrong bytes, or a program does not end as it must.
pub fn take_over(scene: &Scene, dump: &mut LazyDump, client: &mut Server) {
    scene.go().unwrap();
    scene.stop().unwrap();
    let mut restore = NamespacedRestore::start(scene.criu(), &scene.images(), &scene.work()).unwrap();
    let right = until(ACT, || scene.written().contains("OK").then_some(()));
    assert!(right.is_some(), "{} {} {}", scene.written(), client.text(), dump.text());
    assert_eq!(client.ended(END).unwrap().code(), Some(0), "{}", client.text());
    assert_eq!(dump.ended().unwrap().code(), Some(0), "{}", dump.text());
    restore.ended().unwrap();
    assert!(scene.verdict(ACT).unwrap().killed(), "the source is killed");
}
