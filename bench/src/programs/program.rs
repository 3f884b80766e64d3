// SPDX-License-Identifier: MIT OR Apache-2.0
//! The programs: their runtimes, their commands and their first requests.

use std::fmt;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::Context as _;
use rewake_testkit::process::output;
use serde::Serialize;

use crate::harness::value_name;

/// Requests before the dump, so that code is compiled and caches are filled. Each has a seed of its own.
pub(crate) const WARM_UP_SEEDS: std::ops::RangeInclusive<u32> = 1..=8;
/// Seeds of the questions after a restore: no program has seen them before its dump.
const FIRST_SEED: u32 = 1001;
const WHOLE_SEED: u32 = 2002;
/// Values of 64 KiB that the first request reads from the cache of the Node program.
const FIRST_VALUES: u64 = 256;
/// Keys that the first request gets from redis.
const FIRST_KEYS: u64 = 20_000;
/// The package python3-numpy is for Debian's own Python only, so another one on the PATH does not count.
const PYTHON: &str = "/usr/bin/python3";
const NUMPY_VERSION: &str =
    "import numpy, platform; print('Python', platform.python_version(), 'numpy', numpy.__version__)";
/// redis, by Debian's package redis-tools, which starts no service: it checks a dump when it has this name,
/// and serves when it has another one.
const REDIS: &str = "/usr/bin/redis-check-rdb";
const REDIS_NAME: &str = "redis-server";
const MATRIX_SERVER: &str = include_str!("../../programs/matrix_server.py");
const CACHE_SERVER: &str = include_str!("../../programs/cache_server.js");
const PREFORK_SERVER: &str = include_str!("../../programs/prefork_server.py");
const HEAP_SERVER: &str = include_str!("../../programs/HeapServer.java");

/// redis, or a program of bench/programs, by the name of its language, or of its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Program {
    /// Multiplies a vector with dense matrices; the first answer reads all of them
    Python,
    /// The same program; the first answer reads a quarter of the matrices
    PythonQuarter,
    /// As python, with elements that do not compress
    PythonNoise,
    /// As python-quarter, with elements that do not compress
    PythonNoiseQuarter,
    /// Caches values outside of V8's heap; the first answer reads 256 values of 64 KiB
    Node,
    /// Holds a heap of small arrays; the first answer reads all of them
    Java,
    /// A tree of Python processes of 6 MiB; for the first answer all of them read all of it at once
    Prefork,
    /// redis with values of 4 KiB; the first answer is that of 20,000 requests, one after another
    Redis,
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&value_name(self))
    }
}

impl Program {
    /// Those that `bench programs` measures unless others are named. Images on its disk are not compressed.
    pub(crate) const LOCAL: [Self; 6] =
        [Self::Python, Self::PythonQuarter, Self::Node, Self::Java, Self::Prefork, Self::Redis];

    /// The elements of the matrices, of programs that have some.
    fn matrices(self) -> Option<&'static str> {
        match self {
            Self::Python | Self::PythonQuarter => Some("small"),
            Self::PythonNoise | Self::PythonNoiseQuarter => Some("noise"),
            Self::Node | Self::Java | Self::Prefork | Self::Redis => None,
        }
    }

    /// The program's runtime, with its version.
    ///
    /// # Errors
    /// The runtime is not installed.
    pub(crate) fn version(self) -> anyhow::Result<String> {
        let (name, arguments, package): (_, &[&str], _) = match self {
            Self::Prefork => (PYTHON, &["--version"], "python3"),
            Self::Redis => (REDIS, &["--version"], "redis-tools"),
            Self::Node => ("node", &["-p", "'Node ' + process.version"], "nodejs"),
            // Without its compiler, Java alone does not suffice.
            Self::Java => ("javac", &["--version"], "default-jdk-headless"),
            _ => (PYTHON, &["-c", NUMPY_VERSION], "python3-numpy"),
        };
        let mut command = Command::new(name);
        command.args(arguments);
        if self == Self::Redis {
            command.arg0(REDIS_NAME);
        }
        let version = output(&mut command).with_context(|| {
            format!(
                "the program \"{self}\" cannot run: {name} is missing or fails: install the Debian package \
                 {package}, or choose others with --program"
            )
        })?;
        Ok(version.replace("javac", "Java"))
    }

    /// The question right after a restore.
    pub(crate) fn first_question(self, mib: u64) -> Question {
        let units = self.units(mib);
        let count = match self {
            Self::Python | Self::PythonNoise | Self::Java | Self::Prefork => units,
            Self::PythonQuarter | Self::PythonNoiseQuarter => units.div_ceil(4),
            Self::Node => units.min(FIRST_VALUES),
            Self::Redis => units.min(FIRST_KEYS),
        };
        Question { seed: FIRST_SEED, count }
    }

    /// A question that reads all of the program's memory.
    pub(crate) fn whole_question(self, mib: u64) -> Question {
        Question { seed: WHOLE_SEED, count: self.units(mib) }
    }

    /// Writes the source into `directory` and gives the command that serves on `socket`. The program leads a
    /// session of its own: CRIU refuses to dump a process whose session leader is not dumped with it.
    pub(crate) fn command(self, mib: u64, socket: &Path, directory: &Path) -> anyhow::Result<Command> {
        let (runtime, file, source) = match self {
            Self::Node => ("node", "cache_server.js", CACHE_SERVER),
            Self::Java => ("java", "HeapServer.java", HEAP_SERVER),
            Self::Prefork => (PYTHON, "prefork_server.py", PREFORK_SERVER),
            Self::Redis => return redis_command(socket, directory),
            _ => (PYTHON, "matrix_server.py", MATRIX_SERVER),
        };
        let path = directory.join(file);
        std::fs::write(&path, source).with_context(|| path.display().to_string())?;
        let mut command = Command::new("setsid");
        command.arg(runtime);
        if self == Self::Java {
            output(Command::new("javac").arg(&path))?;
            // Twice the arrays, so that the heap has space while it grows. Without UsePerfData no file in
            // /tmp is mapped: another JVM deletes that file when the program has been dumped, and no restore
            // finds it.
            command.arg(format!("-Xmx{}m", 2 * mib + 64)).arg("-XX:-UsePerfData");
            command.arg("-cp").arg(directory).arg("HeapServer");
        } else {
            command.arg(&path);
        }
        command.arg(socket).arg(mib.to_string()).args(self.matrices()).current_dir(directory);
        Ok(command)
    }
}

/// redis on `socket` alone. It never writes its data to a file, and never moves them.
fn redis_command(socket: &Path, directory: &Path) -> anyhow::Result<Command> {
    let name = directory.join(REDIS_NAME);
    symlink(REDIS, &name).with_context(|| name.display().to_string())?;
    let mut command = Command::new("setsid");
    command.arg(name).args(["--port", "0", "--unixsocket"]).arg(socket);
    command.args(["--save", "", "--appendonly", "no", "--activedefrag", "no"]).current_dir(directory);
    Ok(command)
}

/// What a client asks of a program, in one request: `count` of its units, in an order that depends on `seed`.
/// Of redis it asks with `count` requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Question {
    /// The checksum starts with it, so that no question has the answer of an earlier one.
    pub(crate) seed: u32,
    /// At most the program's number of units.
    pub(crate) count: u64,
}

/// The line that a client sends.
impl fmt::Display for Question {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.seed, self.count)
    }
}
#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::*;

    #[test]
    fn a_first_question_reads_all_or_the_part_that_the_program_is_named_for() {
        let shares: Vec<_> = Program::value_variants()
            .iter()
            .map(|program| {
                let (first, whole) = (program.first_question(640), program.whole_question(640));
                assert!(first.count >= 1 && program.first_question(16).count >= 1, "{program}");
                (*program, first.count, whole.count)
            })
            .collect();
        let expected = [
            (Program::Python, 80, 80),
            (Program::PythonQuarter, 20, 80),
            (Program::PythonNoise, 80, 80),
            (Program::PythonNoiseQuarter, 20, 80),
            (Program::Node, 256, 10_240),
            (Program::Java, 163_840, 163_840),
            (Program::Prefork, 106, 106),
            (Program::Redis, 20_000, 163_840),
        ];
        assert_eq!(shares, expected);
    }
}
