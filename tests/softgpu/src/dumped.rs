// SPDX-License-Identifier: MIT OR Apache-2.0
//! A workload's server that was dumped, and is restored with a background load.

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::thread;
use std::time::Duration;

use gpu_app::shape::{Mode, Shape};
use rewake_testkit::process::{children, named};

pub use rewake_testkit::process::waits_in_a_page_fault as waits_for_memory;
pub use rewake_testkit::process::{dies, signal, signal_group, streamer_of};
pub use rewake_testkit::soon;

use crate::criu::{Criu, Plugin, Version, queues, wait_for_the_end_of};
use crate::criu_leftovers::runs;
use crate::kept::{KeptDump, ServerFolder};
use crate::server::small;
use crate::{Daemon, DelayedCopies, Judge, Server, Streamer};

/// With one ring, so that copies can be [held](DelayedCopies), and run one after the other.
pub const ONE_RING: [(&str, &str); 1] = [("sdma_rings", "1")];

/// Twelve MiB that no CPU can access.
#[must_use]
pub fn unreached() -> Shape {
    Shape { mode: Mode::NoAccess, layer_kib: 4096, ..small() }
}

/// What a restore loads in the background.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Behind {
    /// GPU memory.
    Gpus,
    /// GPU and CPU memory.
    Both,
}

/// A dumped server.
#[derive(Debug)]
pub struct Dumped {
    /// The server.
    pub server: Server,
    /// CRIU with its images.
    pub criu: Criu,
    folder: ServerFolder,
}

impl Dumped {
    /// # Errors
    /// The reason why a test does not run here: queues cannot be restored. Other tests check that.
    ///
    /// # Panics
    /// It cannot be dumped.
    pub fn of(shape: &Shape, version: Version) -> Result<Self, &'static str> {
        Self::together(shape, version).map(|[dumped]| dumped)
    }

    /// Servers that ran at the same time, and can again: the driver restores queues of copy engines by
    /// number, and servers that ran one after the other have the same. The last server is dumped first: CRIU
    /// has the kernel assign pids upwards from a task's, so another process could get the pid of a later
    /// server. Tests of one machine share a dump ([`crate::kept`]).
    ///
    /// # Errors
    /// As [`Dumped::of`].
    ///
    /// # Panics
    /// One cannot be dumped.
    pub fn together<const COUNT: usize>(
        shape: &Shape,
        version: Version,
    ) -> Result<[Self; COUNT], &'static str> {
        Self::made_or_copied(shape, version, KeptDump::of(shape, version, COUNT).as_ref())
    }

    /// A server that runs next to another which was started before, and can be restored while that one runs.
    /// No other test gets its dump, because the other server has the first copy engines and this one has
    /// queues of later numbers.
    ///
    /// # Errors
    /// As [`Dumped::of`].
    ///
    /// # Panics
    /// As [`Dumped::of`].
    pub fn beside_another(shape: &Shape, version: Version) -> Result<Self, &'static str> {
        Self::made_or_copied(shape, version, None).map(|[dumped]| dumped)
    }

    fn made_or_copied<const COUNT: usize>(
        shape: &Shape,
        version: Version,
        kept: Option<&KeptDump>,
    ) -> Result<[Self; COUNT], &'static str> {
        queues()?;
        if let Some(copies) = kept.and_then(KeptDump::copies) {
            let of_copy = |(folder, pid): (ServerFolder, u32)| {
                let criu = Criu::with(Plugin::Ours, version, &folder.path().join("images")).unwrap();
                Self { server: Server::dumped(version, shape, folder.path(), pid), criu, folder }
            };
            let all: Vec<Self> = copies.into_iter().map(of_copy).collect();
            return Ok(all.try_into().expect("COUNT servers"));
        }
        let (folders, _last_pid) = match kept {
            Some(kept) => {
                let (folders, last_pid) = kept.folders(COUNT);
                (folders, Some(last_pid))
            }
            None => ((0..COUNT).map(|_| ServerFolder::new()).collect(), None),
        };
        let start = |folder: ServerFolder| (Server::start_for(version, shape, folder.path()), folder);
        let servers: Vec<_> = folders.into_iter().map(start).collect();
        let dump = |(mut server, folder): (Server, ServerFolder)| {
            let criu = Criu::with(Plugin::Ours, version, &folder.path().join("images")).unwrap();
            criu.dump(server.pid).unwrap();
            // Earlier servers are still alive.
            server.was_dumped(&criu);
            Self { server, criu, folder }
        };
        let all: Vec<Self> = servers.into_iter().rev().map(dump).collect();
        if let Some(kept) = kept {
            kept.keep(all.iter().map(|dumped| (&dumped.folder, dumped.server.pid)));
        }
        Ok(all.try_into().expect("COUNT servers"))
    }

    /// A streamer that CRIU's plugin finds.
    ///
    /// # Panics
    /// It does not start.
    #[must_use]
    pub fn streamer(&self) -> Streamer {
        Streamer::start(self.criu.images()).unwrap()
    }

    /// A streamer for the memory that this restore loads in the background.
    ///
    /// # Panics
    /// It does not start.
    #[must_use]
    pub fn streamer_of(&self, behind: Behind) -> Streamer {
        match behind {
            Behind::Gpus => self.streamer(),
            Behind::Both => Streamer::of_both(self.criu.images()).unwrap(),
        }
    }

    /// The command that restores it with such a streamer.
    #[must_use]
    pub fn restore_command(&self, behind: Behind) -> Command {
        let lazy = (behind == Behind::Both).then_some("--lazy-pages");
        let arguments: Vec<&str> = ["restore", "--restore-detached"].into_iter().chain(lazy).collect();
        self.criu.command(&arguments)
    }

    /// Restores it; it runs, and its queues stay evicted for as long as copies are held.
    ///
    /// # Panics
    /// It fails, or its gate is open.
    #[must_use]
    pub fn restores_paused(&self) -> (Streamer, DelayedCopies) {
        let (streamer, delayed) = (self.streamer(), DelayedCopies::streamers());
        self.criu.restore().unwrap();
        assert!(is_paused(self.server.pid), "{}", streamer.said());
        (streamer, delayed)
    }

    /// Restores it, and waits until its queues are resumed; returns the streamer's log.
    ///
    /// # Panics
    /// The restore or the load fails.
    pub fn restores(&self) -> String {
        let mut streamer = self.streamer();
        self.criu.restore().unwrap();
        let status = streamer.end().unwrap();
        assert!(status.success(), "{}", streamer.said());
        streamer.said()
    }

    /// Has `rewake restore` restore it; it runs, and its queues stay evicted for as long as copies are held.
    ///
    /// # Panics
    /// It fails, or its gate is open.
    #[must_use]
    pub fn restoring(&self) -> (Restoring, DelayedCopies) {
        let delayed = DelayedCopies::streamers();
        let restoring = Restoring::start(&self.criu);
        // CRIU has ended then.
        let runs = soon(|| is_paused(self.server.pid) && children(restoring.child.id()).len() == 1);
        if !runs {
            drop(delayed);
            panic!("{:?}", restoring.end());
        }
        (restoring, delayed)
    }

    /// Kills the restored server.
    ///
    /// # Panics
    /// It does not exist, or does not end.
    pub fn ends(&self) {
        dies(self.server.pid);
        wait_for_the_end_of(self.server.pid).unwrap();
    }
}

/// A running `rewake restore`, with a process group of its own.
#[derive(Debug)]
pub struct Restoring {
    child: Child,
    output: BufReader<ChildStderr>,
    said: String,
}

impl Restoring {
    /// Starts it.
    ///
    /// # Panics
    /// It does not start.
    #[must_use]
    pub fn start(criu: &Criu) -> Self {
        Self::with(criu, &["--", "-d"])
    }

    /// Starts it with further options.
    ///
    /// # Panics
    /// It does not start.
    #[must_use]
    pub fn with(criu: &Criu, options: &[&str]) -> Self {
        let mut command = criu.of_rewake("restore").unwrap();
        command.args(options).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stderr.take().unwrap());
        Self { child, output, said: String::new() }
    }

    /// Starts it with the streamers of this daemon.
    ///
    /// # Panics
    /// It does not start.
    #[must_use]
    pub fn by(daemon: &Daemon, criu: &Criu) -> Self {
        Self::with(criu, &["--socket", daemon.socket().to_str().unwrap(), "--", "-d"])
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until its CRIU has ended, which has restored this process.
    ///
    /// # Panics
    /// It does not end, or has restored no such process.
    pub fn has_restored(&self, pid: u32, criu: &Criu) {
        let restoring = || {
            let of_criu = named(criu.name());
            children(self.pid()).iter().any(|child| of_criu.contains(child))
        };
        assert!(soon(|| runs(pid) && !restoring()), "{}", criu.log("restore"));
    }

    /// Waits until it prints this text.
    ///
    /// # Panics
    /// It ends first.
    pub fn says(&mut self, what: &str) {
        loop {
            let from = self.said.len();
            let read = self.output.read_line(&mut self.said).unwrap();
            assert!(read > 0, "rewake restore does not say {what:?}: {}", self.said);
            if self.said[from..].contains(what) {
                return;
            }
        }
    }

    /// The supervisor of its streamer, and the workers, at least one.
    ///
    /// # Panics
    /// There is no streamer.
    #[must_use]
    pub fn streamer(&self) -> (u32, Vec<u32>) {
        streamer_of(self.child.id())
    }

    /// Whether it has ended.
    ///
    /// # Panics
    /// Its status cannot be read.
    #[must_use]
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits for its end: whether it succeeded, and what it printed.
    ///
    /// # Panics
    /// It does not end.
    #[must_use]
    pub fn end(self) -> (bool, String) {
        let (well, said, _) = self.ends();
        (well, said)
    }

    /// Waits for its end: whether it succeeded, what it printed, and its standard output.
    ///
    /// # Panics
    /// It does not end.
    #[must_use]
    pub fn ends(mut self) -> (bool, String, String) {
        let ended = soon(|| self.child.try_wait().unwrap().is_some());
        if !ended {
            dies(self.child.id());
        }
        self.output.read_to_string(&mut self.said).unwrap();
        assert!(ended, "rewake restore does not end: {}", self.said);
        let done = self.child.wait_with_output().unwrap();
        (done.status.success(), self.said, String::from_utf8(done.stdout).unwrap())
    }
}

/// Whether queues of the process are paused at this moment.
#[must_use]
pub fn is_paused(pid: u32) -> bool {
    let gates = Judge::find().map_or_else(Vec::new, |judge| judge.gates());
    gates.iter().any(|gate| gate.pid == pid && gate.paused)
}

/// Files that show other programs a closed gate of a process with this number.
///
/// # Panics
/// The folder does not exist.
#[must_use]
pub fn gate_files(pid: u32) -> Vec<PathBuf> {
    let files = std::fs::read_dir("/run/rewake/dump-blocks").unwrap().map(|file| file.unwrap().path());
    let of_it = format!("{pid}-");
    files.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with(&of_it)).collect()
}

/// Waits until the gate of a process is open, and its streamer's ledger has recorded that.
///
/// # Panics
/// It does not open.
pub fn gate_opens(pid: u32) {
    assert!(soon(|| gate_files(pid).is_empty()), "the gate of {pid} does not open");
    // The streamer writes the ledger a moment after it removes the file.
    thread::sleep(Duration::from_millis(10));
}

/// The files with BO contents.
///
/// # Panics
/// The folder cannot be read.
#[must_use]
pub fn pages(images: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(images).unwrap().map(|file| file.unwrap().path());
    files.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("amdgpu-pages-")).collect()
}
