// SPDX-License-Identifier: MIT OR Apache-2.0
//! What all comparisons have in common: their programs and folders, the machine that they describe, and the
//! loop that takes samples in turn.

use std::env::temp_dir;
use std::ffi::OsStr;
use std::fmt::{self, Debug, Display};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use clap::ValueEnum;
use rewake_testkit::process::{adopt_orphans, output};
use serde::Serialize;
use tempfile::TempDir;

use crate::processes::{catch_interrupts, check_interrupted};

/// Begins a comparison: from here on an interruption makes waits fail, so that callers clean up, and this
/// process can wait for restored processes, which become its children.
///
/// # Errors
/// This process is not root.
pub(crate) fn begin(comparison: &str) -> anyhow::Result<()> {
    check_root(comparison)?;
    catch_interrupts()?;
    adopt_orphans()
}

/// # Errors
/// This process is not root.
pub(crate) fn check_root(comparison: &str) -> anyhow::Result<()> {
    ensure!(
        nix::unistd::geteuid().is_root(),
        "rewake-bench {comparison} dumps and restores processes with CRIU, or drops files from the page \
         cache: run it as root"
    );
    Ok(())
}

/// Parses the path of something that exists. It becomes absolute, because rounds have current directories of
/// their own.
pub(crate) fn existing(path: &str) -> std::io::Result<PathBuf> {
    Path::new(path).canonicalize()
}

/// Where a comparison has its files.
#[derive(Debug, clap::Args)]
pub(crate) struct Place {
    /// Where images, logs and caches lie during the run: the disk that is measured [default: the directory
    /// for temporary files]
    #[arg(long, value_parser = existing, default_value_os_t = temp_dir(), hide_default_value = true)]
    pub(crate) dir: PathBuf,
}

/// Makes a new folder for a run, which is removed when it is dropped.
pub(crate) fn run_folder(dir: &Path) -> anyhow::Result<TempDir> {
    let made = tempfile::Builder::new().prefix("rewake-bench-").tempdir_in(dir);
    made.with_context(|| format!("make a directory in {}", dir.display()))
}

/// The compared programs.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Tools {
    /// Stock criu: dumps and restores, and serves in its own rounds
    #[arg(long, value_parser = existing)]
    pub(crate) criu: PathBuf,
    /// rewake, or another release of it
    #[arg(long, value_parser = existing)]
    pub(crate) rewake: PathBuf,
}

impl Tools {
    /// `rewake` with these arguments.
    pub(crate) fn rewake(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.rewake);
        command.args(arguments);
        command
    }

    /// `rewake restore` of an image, with these arguments before it.
    pub(crate) fn restore(&self, arguments: &[&str], image: impl AsRef<OsStr>) -> Command {
        let mut command = self.rewake(&["restore", "--quiet"]);
        command.args(arguments).arg(image).arg("--criu").arg(&self.criu);
        command
    }

    /// Writes the manifest of an image.
    pub(crate) fn seal(&self, image: &Path) -> anyhow::Result<()> {
        output(self.rewake(&["seal"]).arg(image)).map(drop)
    }

    pub(crate) fn setting(&self, mib: u64) -> anyhow::Result<Setting> {
        Setting::new(&[&self.criu, &self.rewake], mib)
    }
}

/// Where and how samples are taken.
#[derive(Debug, Serialize)]
pub(crate) struct Setting {
    /// The first line of each program's `--version`.
    pub(crate) versions: Vec<String>,
    pub(crate) kernel: String,
    pub(crate) cpu: String,
    pub(crate) cpus: usize,
    /// The memory of one process.
    pub(crate) size_mib: u64,
}

impl Setting {
    /// Of this machine and these programs.
    pub(crate) fn new(programs: &[&PathBuf], size_mib: u64) -> anyhow::Result<Self> {
        let version = |program: &&PathBuf| {
            let text = output(Command::new(program).arg("--version"))?;
            Ok(text.lines().next().unwrap_or("unknown version").to_owned())
        };
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find_map(|entry| entry.strip_prefix("model name"));
        let model = model.and_then(|entry| entry.split_once(": ")).map(|(_, name)| name);
        Ok(Self {
            versions: programs.iter().map(version).collect::<anyhow::Result<_>>()?,
            kernel: kernel(),
            cpu: model.unwrap_or("unknown CPU").to_owned(),
            cpus: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            size_mib,
        })
    }
}

impl Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { versions, kernel, cpu, cpus, .. } = self;
        write!(f, "{cpus} x {cpu}, Linux {kernel}; {}", versions.join(" and "))
    }
}

/// The release of this machine's kernel.
pub(crate) fn kernel() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned()
}

/// The name of a value on the command line.
pub(crate) fn value_name(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// Makes a folder.
pub(crate) fn folder(parent: &Path, name: &str) -> anyhow::Result<PathBuf> {
    let path = parent.join(name);
    std::fs::create_dir(&path).with_context(|| path.display().to_string())?;
    Ok(path)
}

/// Writes a file that an option asks for.
pub(crate) fn write(
    path: Option<&PathBuf>,
    text: impl FnOnce() -> anyhow::Result<String>,
) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    std::fs::write(path, text()?).with_context(|| path.display().to_string())
}

/// Writes all results as JSON.
pub(crate) fn write_json(path: Option<&PathBuf>, results: &impl Serialize) -> anyhow::Result<()> {
    write(path, || Ok(serde_json::to_string_pretty(results)? + "\n"))
}

/// A sample, the way in which it was taken, and its round, from 1 on.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Taken<W, S> {
    pub(crate) way: W,
    pub(crate) round: u64,
    #[serde(flatten)]
    pub(crate) sample: S,
}

/// Takes a sample in each way, round by round, so that a machine that slows down in time slows all ways.
/// `ways` gives the order of a round.
///
/// # Errors
/// The first error of a sample, or an interruption.
pub(crate) fn in_turn<W: Copy + Debug, S>(
    rounds: u64,
    ways: impl Fn(u64) -> Vec<W>,
    mut take: impl FnMut(W, u64) -> anyhow::Result<S>,
) -> anyhow::Result<Vec<Taken<W, S>>> {
    let mut samples = Vec::new();
    for round in 1..=rounds {
        for way in ways(round) {
            check_interrupted()?;
            let what = format!("round {round} with {way:?}");
            eprintln!("{what}");
            samples.push(Taken { way, round, sample: take(way, round).context(what)? });
        }
    }
    Ok(samples)
}

/// Ways in an order in which each is the first one in some rounds.
pub(crate) fn rotated<W: Copy>(ways: &[W], round: u64) -> Vec<W> {
    let (start, length) = (round.saturating_sub(1), ways.len());
    ways.iter()
        .copied()
        .cycle()
        .skip(usize::try_from(start).unwrap_or_default() % length)
        .take(length)
        .collect()
}

/// The samples that were taken in one way.
pub(crate) fn of<W: PartialEq, S>(samples: &[Taken<W, S>], way: W) -> impl Iterator<Item = &S> {
    samples.iter().filter(move |taken| taken.way == way).map(|taken| &taken.sample)
}

/// Both ways' samples of every round that has both.
pub(crate) fn pairs<W: PartialEq + Copy, S>(
    samples: &[Taken<W, S>],
    [first, second]: [W; 2],
) -> impl Iterator<Item = (&S, &S)> {
    samples.iter().filter(move |one| one.way == first).filter_map(move |one| {
        let other = samples.iter().find(|other| other.way == second && other.round == one.round)?;
        Some((&one.sample, &other.sample))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_has_its_turn_in_each_round_and_is_the_first_one_in_some() {
        let samples = in_turn(3, |round| rotated(&["a", "b"], round), |way, round| Ok((way, round))).unwrap();
        assert!(samples.iter().all(|taken| taken.sample == (taken.way, taken.round)));
        assert_eq!(samples.iter().map(|taken| taken.way).collect::<String>(), "abbaab");
    }

    #[test]
    fn pairs_are_of_one_round() {
        let taken = |way, round, sample| Taken { way, round, sample };
        let samples =
            [taken('a', 1, 1), taken('b', 1, 2), taken('b', 2, 3), taken('a', 2, 4), taken('a', 3, 5)];
        assert_eq!(pairs(&samples, ['a', 'b']).collect::<Vec<_>>(), [(&1, &2), (&4, &3)]);
        assert_eq!(of(&samples, 'a').collect::<Vec<_>>(), [&1, &4, &5]);
    }
}
