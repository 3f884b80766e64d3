// SPDX-License-Identifier: MIT OR Apache-2.0
//! The programs: how each is started, and its image with the answer that is right.

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde::Serialize;

use super::client::Client;
use crate::criu::{Image, quiet};
use crate::processes::Process;

/// Answers before the dump, so that code is compiled and caches are filled.
const WARMING_ANSWERS: usize = 8;
/// The longest path of a unix socket, in bytes, as its address has 108 with a zero at the end.
const SOCKET_PATH: usize = 107;
const MATRIX_SERVER: &str = include_str!("../../programs/matrix_server.py");
const BUFFER_SERVER: &str = include_str!("../../programs/buffer_server.js");
const HEAP_SERVER: &str = include_str!("../../programs/HeapServer.java");

/// A program of bench/programs, by the name of its language.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum Program {
    /// Dense matrices, multiplied by a vector for each answer
    Python,
    /// Buffers outside of V8's heap, hashed for each answer
    Node,
    /// A heap of small arrays, swept for each answer
    Java,
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Python => "python",
            Self::Node => "node",
            Self::Java => "java",
        })
    }
}

impl Program {
    pub(super) const ALL: [Self; 3] = [Self::Python, Self::Node, Self::Java];

    /// Debian's own interpreters: python3-numpy is for no other Python.
    fn interpreter(self) -> &'static str {
        match self {
            Self::Python => "/usr/bin/python3",
            Self::Node => "/usr/bin/node",
            Self::Java => "/usr/bin/java",
        }
    }

    fn package(self) -> &'static str {
        match self {
            Self::Python => "python3-numpy",
            Self::Node => "nodejs",
            Self::Java => "default-jdk-headless",
        }
    }

    /// # Errors
    /// What the program runs on is not installed.
    pub(super) fn check_installed(self) -> anyhow::Result<()> {
        let mut probe = Command::new(self.interpreter());
        match self {
            Self::Python => probe.args(["-c", "import numpy"]),
            Self::Node => probe.arg("--version"),
            Self::Java => probe.args(["--list-modules"]),
        };
        let output = probe.output().ok().filter(|output| output.status.success());
        let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
        // A Java without its compiler answers, too.
        let fine = text.is_some_and(|text| self != Self::Java || text.contains("jdk.compiler"));
        ensure!(
            fine,
            "{}: the program \"{self}\" needs the Debian package {}: install it, or leave that program out",
            self.interpreter(),
            self.package()
        );
        Ok(())
    }

    /// Writes the source into `directory` and gives the command that serves on `socket`. The child leads a session
    /// of its own, so that CRIU finds the whole session in the image.
    fn command(self, size_mib: u64, socket: &Path, directory: &Path) -> anyhow::Result<Command> {
        let (file, source) = match self {
            Self::Python => ("matrix_server.py", MATRIX_SERVER),
            Self::Node => ("buffer_server.js", BUFFER_SERVER),
            Self::Java => ("HeapServer.java", HEAP_SERVER),
        };
        let path = directory.join(file);
        std::fs::write(&path, source).with_context(|| path.display().to_string())?;
        let mut command = Command::new("setsid");
        command.arg(self.interpreter());
        if self == Self::Java {
            let compiled =
                Command::new("/usr/bin/javac").arg(&path).output().context("start /usr/bin/javac")?;
            let errors = String::from_utf8_lossy(&compiled.stderr);
            ensure!(compiled.status.success(), "javac {}: {}", path.display(), errors.trim());
            // Room for as much again, which the filling of the heap uses. Another JVM that starts removes the
            // shared file of performance data of a JVM that was dumped, and it could not be restored.
            command.arg(format!("-Xmx{}m", 2 * size_mib + 64)).arg("-XX:-UsePerfData");
            command.arg("-cp").arg(directory).arg("HeapServer");
        } else {
            command.arg(&path);
        }
        command.arg(socket).arg(size_mib.to_string()).current_dir(directory);
        Ok(command)
    }
}

/// A dumped program.
#[derive(Debug)]
pub(super) struct Dumped {
    pub(super) image: Image,
    pub(super) socket: PathBuf,
    /// What it answered before the dump.
    pub(super) answer: String,
}

impl Dumped {
    /// Starts the program, records its answer and dumps it into `directory`.
    pub(super) fn new(
        program: Program,
        size_mib: u64,
        criu: &Path,
        directory: &Path,
    ) -> anyhow::Result<Self> {
        let socket = directory.join("socket");
        let length = socket.as_os_str().len();
        if length > SOCKET_PATH {
            bail!(
                "{} has {length} bytes, {SOCKET_PATH} are possible: give a shorter --dir",
                socket.display()
            );
        }
        // Minutes where a busy disk gets 20 MB/s.
        let limit = Duration::from_secs(120 + size_mib / 16);
        let errors = directory.join("errors.log");
        let mut command = program.command(size_mib, &socket, directory)?;
        quiet(&mut command).stderr(File::create(&errors).with_context(|| errors.display().to_string())?);
        let mut process = Process::spawn(&mut command)?;
        let answer = warmed(&mut process, &socket, limit).with_context(|| {
            let said = std::fs::read_to_string(&errors).unwrap_or_default();
            format!("started with {size_mib} MiB; it wrote {:?}", said.trim())
        })?;
        let image = Image::dump(criu, &mut process, directory.join("img"), limit)?;
        Ok(Self { image, socket, answer })
    }

    /// Bytes of all `pages-*.img`.
    pub(super) fn page_bytes(&self) -> anyhow::Result<u64> {
        let mut bytes = 0;
        for file in &self.image.page_files {
            bytes += file.metadata().with_context(|| file.display().to_string())?.len();
        }
        Ok(bytes)
    }
}

/// Asks a program that has just been started, again and again.
fn warmed(process: &mut Process, socket: &Path, limit: Duration) -> anyhow::Result<String> {
    let deadline = Instant::now() + limit;
    while !socket.exists() {
        if let Ok(exit) = process.wait(Duration::from_millis(10)) {
            bail!("it ended before it listened ({}): is there memory for it?", exit.status);
        }
        ensure!(Instant::now() < deadline, "it does not listen on {} after {limit:?}", socket.display());
        crate::processes::check_interrupted()?;
    }
    let stop = AtomicBool::new(false);
    let client = Client { socket, deadline, stop: &stop };
    let (answer, _) = client.first_answer()?;
    for _ in 0..WARMING_ANSWERS {
        let (again, _) = client.first_answer()?;
        ensure!(again == answer, "it answers {again:?} after {answer:?}: its answers must be equal");
    }
    Ok(answer)
}
