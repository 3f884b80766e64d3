// SPDX-License-Identifier: MIT OR Apache-2.0
//! One dumped target and everything that belongs to it.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::criu::Criu;
use crate::process::{PATIENCE, adopt_orphans, kill_all, session, tail, until, wait_pid, write_program};
use crate::server::{Server, Setup};
use crate::verdict::Verdict;
use rewake_testkit::programs;

/// Time that a target has for its preparation, and for its act after the restore.
pub const ACT: Duration = PATIENCE;

/// Time that a server has to end once its target is done or has ended.
pub const END: Duration = PATIENCE;

/// The name of the target `odd-names`: 15 bytes, the last one the first half of a character, as the kernel
/// cuts names.
pub const ODD_NAME: &[u8] = b"serveur-\xc3\xa9l\xc3\xa9v\xc3";

/// Seeds of targets differ, so that one test's pages never look right in another's.
static SEED: AtomicU64 = AtomicU64::new(1);

/// A dumped target, in a directory of its own. Dropping it kills restored processes; when the test fails, the
/// ends of all logs are printed first.
#[derive(Debug)]
pub struct Scene {
    dir: TempDir,
    criu: Criu,
    scenario: String,
    mib: usize,
    seed: u64,
    pid: Pid,
    rounds: usize,
}

impl Scene {
    /// Starts the target `scenario` with a main region of `mib` MiB and dumps it with `criu`.
    ///
    /// # Errors
    /// The target or CRIU failed.
    pub fn dumped(criu: &Criu, scenario: &str, mib: usize) -> anyhow::Result<Self> {
        let scene = Self::started(criu, scenario, mib)?;
        scene.dump_with(&scene.images(), &[])?;
        Ok(scene)
    }

    /// Starts the target, and waits until it is ready to be dumped.
    ///
    /// # Errors
    /// The target failed.
    pub fn started(criu: &Criu, scenario: &str, mib: usize) -> anyhow::Result<Self> {
        let mut scene = Self::planned(criu, scenario, mib)?;
        let mut target = scene.target()?.spawn().context("start the target")?;
        scene.pid = Pid::from_raw(target.id().cast_signed());
        let ready = scene.files().join("ready");
        let mut ended = None;
        until(ACT, || {
            ended = target.try_wait().ok().flatten();
            (ended.is_some() || ready.exists()).then_some(())
        })
        .context("the target did not get ready in time")?;
        ensure!(ended.is_none(), "the target ended before the dump: {ended:?}\n{}", scene.written());
        Ok(scene)
    }

    /// Makes the directories of a target that the caller starts.
    ///
    /// # Errors
    /// A directory cannot be made.
    pub fn planned(criu: &Criu, scenario: &str, mib: usize) -> anyhow::Result<Self> {
        adopt_orphans()?;
        let dir = tempfile::Builder::new().prefix("rewake-e2e-").tempdir().context("make a directory")?;
        let seed = SEED.fetch_add(100, Ordering::Relaxed);
        let (scenario, pid) = (scenario.to_owned(), Pid::from_raw(0));
        let scene = Self { dir, criu: criu.clone(), scenario, mib, seed, pid, rounds: 0 };
        for folder in [scene.images(), scene.files(), scene.work()] {
            fs::create_dir(&folder).with_context(|| format!("create {}", folder.display()))?;
        }
        Ok(scene)
    }

    /// Dumps the target into `images`, with further options for CRIU; the target ends.
    ///
    /// # Errors
    /// CRIU failed.
    pub fn dump_with(&self, images: &Path, options: &[&OsStr]) -> anyhow::Result<()> {
        self.criu.dump_with(self.pid, images, options)?;
        wait_pid(self.pid, ACT).context("collect the dumped target")?;
        // Its children were killed too, and are children of this process now; their pids must be free for the
        // restore.
        self.kill_restored();
        Ok(())
    }

    /// The target's command line.
    ///
    /// # Errors
    /// The program cannot be found.
    pub fn target(&self) -> anyhow::Result<Command> {
        self.target_as(&self.scenario)
    }

    /// The target's command line, for another scenario with the same memory.
    ///
    /// # Errors
    /// The program cannot be found.
    pub fn target_as(&self, scenario: &str) -> anyhow::Result<Command> {
        let program = programs::folder()?.join("target");
        ensure!(program.exists(), "{} is not built", program.display());
        let mut command = Command::new(program);
        command.arg(scenario).arg("--dir").arg(self.files());
        command.args(["--mib", &self.mib.to_string(), "--seed", &self.seed.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(command)
    }

    /// The server's socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.work().join("lazy-pages.socket")
    }

    /// The CRIU that dumps and restores it.
    #[must_use]
    pub fn criu(&self) -> &Criu {
        &self.criu
    }

    /// The images directory.
    #[must_use]
    pub fn images(&self) -> PathBuf {
        self.dir.path().join("images")
    }

    /// The directory of ready, go, stop and verdict.
    #[must_use]
    pub fn files(&self) -> PathBuf {
        self.dir.path().join("files")
    }

    /// The work directory of the current round: socket and logs.
    #[must_use]
    pub fn work(&self) -> PathBuf {
        self.dir.path().join(format!("work-{}", self.rounds))
    }

    /// The process id of the target's first process, before the dump and after the restore.
    #[must_use]
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// The name that the target has in `/proc`.
    #[must_use]
    pub fn name(&self) -> &'static [u8] {
        if self.scenario == "odd-names" { ODD_NAME } else { b"target" }
    }

    /// The seed of the target's main region.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The usual way to start a server for this scene.
    ///
    /// # Errors
    /// No program to start.
    pub fn setup(&self) -> anyhow::Result<Setup> {
        Setup::new(&self.criu, &self.images(), &self.work())
    }

    /// Starts a server.
    ///
    /// # Errors
    /// It refused.
    pub fn serve(&self) -> anyhow::Result<Server> {
        self.setup()?.listening()
    }

    /// Lets the target act as soon as it runs.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn go(&self) -> anyhow::Result<()> {
        fs::write(self.files().join("go"), "").context("say go")
    }

    /// Lets a target that repeats itself end after the pass that it is in.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn stop(&self) -> anyhow::Result<()> {
        fs::write(self.files().join("stop"), "").context("say stop")
    }

    /// Restores the target from the scene's images.
    ///
    /// # Errors
    /// CRIU failed.
    pub fn restore(&self) -> anyhow::Result<()> {
        self.criu.restore(&self.images(), &self.work())
    }

    /// Restores the target with further options for CRIU.
    ///
    /// # Errors
    /// CRIU failed.
    pub fn restore_with(&self, options: &[&OsStr]) -> anyhow::Result<()> {
        self.criu.restore_with(&self.images(), &self.work(), options)
    }

    /// Restores the target, and stops the server before it has read that the restore has finished: the target
    /// runs then, and no memory is loaded until [`Server::continues`].
    ///
    /// # Errors
    /// CRIU failed.
    pub fn restore_and_stop(&self, server: &mut Server) -> anyhow::Result<()> {
        self.restore_and_stop_with(server, &[])
    }

    /// [`Scene::restore_and_stop`] with further options.
    ///
    /// # Errors
    /// CRIU failed.
    pub fn restore_and_stop_with(&self, server: &mut Server, options: &[&OsStr]) -> anyhow::Result<()> {
        let script = self.work().join("stop-server");
        write_program(&script, &server.stopper())?;
        let options = [options, &[OsStr::new("--action-script"), script.as_os_str()]].concat();
        self.restore_with(&options)
    }

    /// Restores with another CRIU or from another copy of the images.
    ///
    /// # Errors
    /// CRIU failed.
    pub fn restore_from(&self, criu: &Criu, images: &Path) -> anyhow::Result<()> {
        criu.restore(images, &self.work())
    }

    /// How the restored target ended.
    ///
    /// # Errors
    /// There is no restored target.
    pub fn verdict(&self, limit: Duration) -> anyhow::Result<Verdict> {
        let status = wait_pid(self.pid, limit).context("wait for the restored target")?;
        Ok(Verdict::new(status, &self.written()))
    }

    /// What the target wrote to its verdict file.
    #[must_use]
    pub fn written(&self) -> String {
        fs::read_to_string(self.files().join("verdict")).unwrap_or_default()
    }

    /// The ordinary course of things: serve, go, restore; the target must see right bytes only, and the
    /// server must end with status 0.
    ///
    /// # Errors
    /// Anything else happened.
    pub fn play(&self) -> anyhow::Result<()> {
        self.play_with(&mut self.serve()?)
    }

    /// The same, with a server that listens already.
    ///
    /// # Errors
    /// As [`Scene::play`].
    pub fn play_with(&self, server: &mut Server) -> anyhow::Result<()> {
        self.go()?;
        self.restore()?;
        self.expect_good_end(server)
    }

    /// The second half of [`Scene::play`].
    ///
    /// # Errors
    /// The target saw wrong bytes or died, or the server did not end with status 0.
    pub fn expect_good_end(&self, server: &mut Server) -> anyhow::Result<()> {
        let verdict = self.verdict(ACT)?;
        ensure!(verdict == Verdict::Ok, "the target: {verdict:?}");
        let status = server.ended(END)?;
        ensure!(status.code() == Some(0), "the server ended with {status}");
        Ok(())
    }

    /// Clears away what the last restore left, for another restore of the same images.
    ///
    /// # Errors
    /// A directory cannot be made.
    pub fn next_round(&mut self) -> anyhow::Result<()> {
        self.kill_restored();
        for name in ["verdict", "go", "stop", "answered"] {
            // Not every round makes all of them.
            let _ = fs::remove_file(self.files().join(name));
        }
        fs::remove_dir_all(self.work()).context("remove the last round's work directory")?;
        self.rounds += 1;
        fs::create_dir(self.work()).context("create the work directory")
    }

    /// Makes another work directory, for another try with the same images. No process ends.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn next_work(&mut self) -> anyhow::Result<()> {
        self.rounds += 1;
        fs::create_dir(self.work()).context("create the work directory")
    }

    /// Kills remaining processes of the target and collects them.
    pub fn kill_restored(&self) {
        if self.pid.as_raw() > 0 {
            while let members = session(self.pid)
                && !members.is_empty()
            {
                kill_all(&members);
            }
        }
    }

    /// The ends of all logs.
    #[must_use]
    pub fn logs(&self) -> String {
        let names = ["lazy.out", "lazy.log", "restore.out", "restore.log"];
        let mut text: String = names.iter().map(|name| tail(&self.work().join(name), 40)).collect();
        text.push_str(&tail(&self.files().join("verdict"), 20));
        text
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if std::thread::panicking() || env::var_os("REWAKE_TEST_LOGS").is_some() {
            eprintln!("{}: target {}\n{}", self.scenario, self.pid, self.logs());
        }
        self.kill_restored();
    }
}
