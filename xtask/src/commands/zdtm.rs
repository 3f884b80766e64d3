// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask zdtm`: CRIU's own tests of the page server and of lazy pages, from its source tree. Each runs
//! twice: stock with itself, and stock with Rewake in the place of its servers.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail, ensure};

use crate::setup::{self, Suite};
use crate::{files, program, repository, root};

/// Tests of memory, threads and files.
const TESTS: [&str; 30] = [
    "static/env00",
    "static/maps00",
    "static/maps01",
    "static/maps02",
    "static/maps04",
    "static/maps05",
    "static/maps06",
    "static/mlock_setuid",
    "static/maps_file_prot",
    "static/shm",
    "static/shm-mp",
    "static/shm-unaligned",
    "static/mprotect00",
    "static/pthread00",
    "static/pthread01",
    "static/pthread02",
    "static/sigaltstack",
    "static/write_read00",
    "static/file_shared",
    "static/unlink_mmap00",
    "static/memfd00",
    "static/cow01",
    "static/zombie00",
    "static/mem-touch",
    "static/uffd-events",
    "transition/lazy-thp",
    "transition/thread-bomb",
    "transition/fork",
    "transition/shmem",
    "transition/maps007",
];
/// The servers' roles, in the words of zdtm.
const ROLES: [&[&str]; 4] =
    [&["--page-server"], &["--page-server", "--dedup"], &["--remote-lazy-pages"], &["--lazy-pages"]];
/// Where tests run: on the host, in namespaces, and in namespaces one of which is for users.
const FLAVOURS: [&str; 3] = ["h", "ns", "uns"];
/// Seconds that one test may take.
const LIMIT: &str = "90";
/// Without CAP_SYS_RESOURCE, stock's lazy server needs pipes of 4 MiB for its answers.
const PIPE_SIZE: &str = "/proc/sys/fs/pipe-max-size";
const LARGE_PIPES: &str = "4194304";
/// The program that runs the tests, in `test`. It starts itself again by this name.
const SCRIPT: &str = "zdtm.py";
/// What zdtm uses of CRIU's Python package: counts of pages.
const PYCRIU: &str = include_str!("zdtm_pycriu.py");

/// Runs the tests that are named, or [`TESTS`]: on the host, and with `--all` in every flavour.
///
/// # Errors
/// The tree is none of CRIU's, or a test passes with stock alone.
pub(crate) fn run(words: &[&str]) -> anyhow::Result<()> {
    let (options, names): (Vec<&str>, Vec<&str>) =
        words.iter().copied().partition(|word| word.starts_with("--"));
    let Some((source, named)) = names.split_first() else {
        bail!("zdtm: expected the source tree of CRIU 4.2.1, unpacked: `apt-get source criu` fetches it");
    };
    let known = ["--all", "--tls"];
    ensure!(options.iter().all(|option| known.contains(option)), "zdtm: {options:?}: expected {known:?}");
    let flavours = if options.contains(&"--all") { &FLAVOURS[..] } else { &FLAVOURS[..1] };
    let tls: Vec<&str> = options.into_iter().filter(|option| *option == "--tls").collect();
    let tests = if named.is_empty() { &TESTS[..] } else { named };
    root::become_root()?;
    let suite = TestSuite::build(Path::new(source), tests)?;
    let criu = [setup::run_for(Suite::Sid)?, setup::run_for(Suite::Trixie)?];
    program::run(repository::cargo().args(["build", "--package", "rewake", "--bin", "rewake"]))?;
    let rewake = repository::target()?.join("debug/rewake");
    let _pipes = LargePipes::set()?;
    let mut lost = Vec::new();
    for criu in criu {
        let ours = suite.stand_in(&criu.path, &rewake)?;
        let runs = flavours.iter().flat_map(|flavour| {
            let roles = ROLES.into_iter().filter(|role| tls.is_empty() || *role != ["--lazy-pages"]);
            roles.flat_map(move |role| tests.iter().map(move |test| (flavour, role, test)))
        });
        for (flavour, role, test) in runs {
            let mode = [&["-f", flavour], role, &tls].concat();
            let (stock, rewake) = (suite.passes(&criu.path, test, &mode)?, suite.passes(&ours, test, &mode)?);
            let name = format!("CRIU {} {} {test}", criu.version, mode.join(" "));
            println!("{name}: stock {}, rewake {}", word(stock), word(rewake));
            if stock && !rewake {
                lost.push(name);
            }
        }
    }
    ensure!(
        lost.is_empty(),
        "with stock these pass, and with rewake they do not; transition/thread-bomb sometimes fails before \
         it sends memory:\n{}",
        lost.join("\n")
    );
    Ok(())
}

fn word(passes: bool) -> &'static str {
    if passes { "passes" } else { "fails" }
}

/// CRIU's tests, built, and what they need in addition.
struct TestSuite {
    /// `test` of the source tree.
    folder: PathBuf,
}

impl TestSuite {
    /// Builds the tests, and has zdtm.py start them as root: without CAP_SYS_RESOURCE, CRIU cannot read the
    /// limits of another user's processes.
    fn build(source: &Path, tests: &[&str]) -> anyhow::Result<Self> {
        let expected = || format!("{}: expected CRIU's source tree", source.display());
        let folder = source.join("test").canonicalize().with_context(expected)?;
        let script = fs::read_to_string(folder.join(SCRIPT)).with_context(expected)?;
        let script = script.replace("= \"18943\"", "= \"0\"").replace("= \"58467\"", "= \"0\"");
        files::write(folder.join(SCRIPT), script)?;
        files::create_folder(folder.join("rewake"))?;
        files::write(folder.join("rewake/pycriu.py"), PYCRIU)?;
        let make = |folder: &Path, target: &str| {
            program::run(Command::new("make").arg("-sC").arg(folder).arg(target))
        };
        make(&folder, "zdtm_ct")?;
        make(&folder, "umount2")?;
        make(&folder.join("zdtm/lib"), "all")?;
        for test in tests {
            let (kind, name) =
                test.split_once('/').with_context(|| format!("{test}: expected static/NAME"))?;
            make(&folder.join("zdtm").join(kind), name)?;
        }
        Ok(Self { folder })
    }

    /// Makes a program that is `rewake` as a page server and for lazy pages, and CRIU for everything else.
    fn stand_in(&self, criu: &Path, rewake: &Path) -> anyhow::Result<PathBuf> {
        let path = self.folder.join("rewake/criu");
        let (rewake, criu) = (rewake.display(), criu.display());
        files::write_program(
            &path,
            &format!(
                "#!/bin/sh\ncase \"$1\" in page-server | lazy-pages) exec '{rewake}' \"$@\" ;; esac\nexec \
                 '{criu}' \"$@\"\n"
            ),
        )?;
        Ok(path)
    }

    /// Runs a test in a mode of zdtm's.
    fn passes(&self, criu: &Path, test: &str, mode: &[&str]) -> anyhow::Result<bool> {
        let mut command = Command::new("timeout");
        command.args(["-k", "5", LIMIT, "python3", SCRIPT, "run", "-t"]).arg(format!("zdtm/{test}"));
        command
            .args(["--crit-bin", "true", "--pycriu-search-path", "rewake", "--criu-bin"])
            .arg(criu)
            .args(mode);
        command.current_dir(&self.folder).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(command.status().context("start zdtm")?.success())
    }
}

/// The kernel's limit for pipes, until this is dropped.
struct LargePipes(String);

impl LargePipes {
    fn set() -> anyhow::Result<Self> {
        let before = fs::read_to_string(PIPE_SIZE).with_context(|| format!("read {PIPE_SIZE}"))?;
        fs::write(PIPE_SIZE, LARGE_PIPES).with_context(|| format!("write {PIPE_SIZE}"))?;
        Ok(Self(before))
    }
}

impl Drop for LargePipes {
    fn drop(&mut self) {
        if let Err(error) = fs::write(PIPE_SIZE, &self.0) {
            eprintln!("zdtm: {PIPE_SIZE} was {}: {error}", self.0.trim());
        }
    }
}
