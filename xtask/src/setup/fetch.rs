// SPDX-License-Identifier: MIT OR Apache-2.0
//! Debian's own CRIU with its libraries, from the archive that this machine already uses, unpacked beside the
//! system and run through its own loader: nothing of it is installed, and it needs no library of the system.
//!
//! `.rewake/criu/<suite>/root` holds the packages' files, `.rewake/criu/<suite>/criu` is the wrapper.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail, ensure};

use super::criu::{Criu, Version, version_of};
use super::say;
use crate::{apt, files, program, repository};

/// Where Debian's packages put libraries, the loader among them.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const LOADER: &str = "ld-linux-x86-64.so.2";

/// A Debian suite that CRIU is taken from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Suite {
    /// CRIU 4.1.1: the last before the page server's message grew.
    Trixie,
    /// CRIU 4.2.1 or newer.
    Sid,
}

impl Suite {
    /// The suite of that name.
    pub(crate) fn named(name: &str) -> anyhow::Result<Self> {
        match name {
            "trixie" => Ok(Self::Trixie),
            "sid" => Ok(Self::Sid),
            other => bail!("no CRIU is known for the Debian suite {other:?}: use trixie or sid"),
        }
    }

    /// The oldest CRIU that this suite may hold.
    pub(crate) fn oldest(self) -> Version {
        match self {
            Self::Trixie => Version([4, 1, 1]),
            Self::Sid => Version([4, 2, 0]),
        }
    }
}

impl fmt::Display for Suite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Trixie => "trixie",
            Self::Sid => "sid",
        })
    }
}

/// The suite's CRIU, fetched unless an earlier set-up did so.
pub(super) fn criu(suite: Suite) -> anyhow::Result<Criu> {
    let home = repository::scratch().join("criu").join(suite.to_string());
    let wrapper = home.join("criu");
    // The wrapper names its place: it stops working, and is made again, when the repository moves.
    if version_of(Command::new(&wrapper)).is_err() {
        fetch(suite, &home)?;
    }
    Criu::probe(&wrapper, suite.oldest()).with_context(|| format!("CRIU of Debian {suite}"))
}

/// Builds everything in a temporary folder, and renames that into place after a check.
fn fetch(suite: Suite, home: &Path) -> anyhow::Result<()> {
    let candidates = super::archives()?;
    clear_partials(home)?;
    // The apt of a killed set-up may still write into its own folder.
    let partial = home.with_extension(format!("partial-{}", std::process::id()));
    let mut refusals = Vec::new();
    for archive in candidates {
        say(&format!("fetching CRIU of Debian {suite} and its libraries from {}", archive.address()));
        match download(&partial, &archive.for_suite(suite.to_string().as_str())) {
            Ok(packages) => {
                unpack(&packages, &partial)?;
                return install(suite, &partial, home);
            }
            Err(error) => refusals.push(format!("{}: {error:#}", archive.address())),
        }
        files::remove(&partial)?;
    }
    bail!(
        "cannot fetch CRIU from Debian's suite {suite}: {}. Check the network (and that \
         debian-archive-keyring is up to date, and that the mirror has {suite}), or set CRIU=/path/to/criu",
        refusals.join("; ")
    )
}

/// Removes the folders of killed set-ups.
fn clear_partials(home: &Path) -> anyhow::Result<()> {
    let Some(folder) = home.parent().filter(|folder| folder.is_dir()) else { return Ok(()) };
    for path in files::list(folder)? {
        let extension = path.extension().unwrap_or_default().to_string_lossy();
        if path.file_stem() == home.file_name() && extension.starts_with("partial-") {
            files::remove(&path)?;
        }
    }
    Ok(())
}

/// The machine's own entries for Debian's archive, the most likely first.
pub(super) fn sources(os_release: &str, etc_apt: &Path) -> anyhow::Result<Vec<apt::Entry>> {
    let field = |name: &str| {
        let value = os_release.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        value.map(|value| value.trim_matches('"').to_owned())
    };
    ensure!(
        field("ID").as_deref() == Some("debian"),
        "set-up fetches from Debian's archive only, and /etc/os-release does not say ID=debian: set \
         CRIU=/path/to/criu"
    );
    let codename = field("VERSION_CODENAME").context(
        "/etc/os-release has no VERSION_CODENAME to find Debian's archive by: set CRIU=/path/to/criu",
    )?;
    let candidates = apt::archives(&apt::read(etc_apt)?, &codename);
    ensure!(
        !candidates.is_empty(),
        "no apt entry under {} is for the suite {codename} with the component main: add Debian's, or set \
         CRIU=/path/to/criu",
        etc_apt.display()
    );
    Ok(candidates)
}

/// Downloads CRIU's package and all its dependencies down to libc into `partial/apt`. The apt shares nothing
/// with the system's except its keys, proxies and certificates.
fn download(partial: &Path, source: &str) -> anyhow::Result<Vec<PathBuf>> {
    let state = partial.join("apt");
    let archives = state.join("cache/archives");
    for directory in ["state/lists/partial", "cache/archives/partial", "sources"] {
        let path = state.join(directory);
        files::create_folder(&path)?;
    }
    files::write(state.join("status"), "")?;
    files::write(state.join("sources/debian.sources"), source)?;
    let apt_get = || {
        let mut command = Command::new("apt-get");
        command.args(["--quiet", "--yes"]).env("LC_ALL", "C").env("DEBIAN_FRONTEND", "noninteractive");
        for (option, value) in apt_options(&state) {
            command.arg("-o").arg(format!("{option}={value}"));
        }
        command
    };
    let shown = |failed: program::Failed| failed.shown("setup: apt-get");
    program::step(apt_get().arg("update")).map_err(shown)?;
    let install = ["install", "--no-install-recommends", "--download-only", "criu"];
    program::step(apt_get().args(install)).map_err(shown)?;
    let mut packages = files::list(&archives)?;
    packages.retain(|path| path.extension().is_some_and(|extension| extension == "deb"));
    ensure!(!packages.is_empty(), "apt-get left no package in {}", archives.display());
    Ok(packages)
}

/// An empty status file makes apt take every dependency; the suite is not this machine's, so its pins do not
/// count.
fn apt_options(state: &Path) -> Vec<(&'static str, String)> {
    let inside = |name: &str| state.join(name).display().to_string();
    vec![
        ("Dir::State", inside("state")),
        ("Dir::State::status", inside("status")),
        ("Dir::Cache", inside("cache")),
        ("Dir::Cache::archives", inside("cache/archives")),
        ("Dir::Etc::sourcelist", "/dev/null".to_owned()),
        ("Dir::Etc::sourceparts", inside("sources")),
        ("Dir::Etc::preferences", "/dev/null".to_owned()),
        ("Dir::Etc::preferencesparts", "/dev/null".to_owned()),
        ("APT::Default-Release", String::new()),
        ("APT::Architecture", "amd64".to_owned()),
        ("APT::Architectures", "amd64".to_owned()),
        // A failed download is an error, not a warning.
        ("APT::Update::Error-Mode", "any".to_owned()),
        ("Acquire::Languages", "none".to_owned()),
        ("Acquire::PDiffs", "false".to_owned()),
        ("Acquire::Retries", "3".to_owned()),
        // A mirror's snapshot may be older than the lifetime of its signature.
        ("Acquire::Check-Valid-Until", "false".to_owned()),
    ]
}

fn unpack(packages: &[PathBuf], partial: &Path) -> anyhow::Result<()> {
    for package in packages {
        program::capture(Command::new("dpkg-deb").arg("-x").arg(package).arg(partial.join("root")))?;
    }
    files::remove(partial.join("apt"))
}

fn install(suite: Suite, partial: &Path, home: &Path) -> anyhow::Result<()> {
    let root = partial.join("root");
    let libraries = root.join(LIBRARIES);
    let mut program = Command::new(libraries.join(LOADER));
    program.arg("--library-path").arg(&libraries).arg(root.join("usr/sbin/criu"));
    let version = version_of(program).with_context(|| format!("run the unpacked CRIU of Debian {suite}"))?;
    ensure!(
        version >= suite.oldest(),
        "Debian's suite {suite} gave CRIU {version}, expected {} or newer: does this machine's mirror keep \
         an old copy? Set CRIU=/path/to/criu",
        suite.oldest()
    );
    let wrapper = partial.join("criu");
    files::write_program(&wrapper, &wrapper_text(home)?)?;
    files::remove(home)?;
    files::rename(partial, home)
}

/// A shell script without a single fork: CRIU's start is part of what the bench times.
fn wrapper_text(home: &Path) -> anyhow::Result<String> {
    let root = home.join("root");
    let root =
        root.to_str().with_context(|| format!("{} is not UTF-8: move the repository", root.display()))?;
    let root = root.replace('\'', r"'\''");
    let libraries = format!("'{root}/{LIBRARIES}'");
    Ok(format!(
        "#!/bin/sh\n# Debian's CRIU through its own loader; made by `cargo xtask setup`.\n\
         exec {libraries}/{LOADER} --library-path {libraries} '{root}/usr/sbin/criu' \"$@\"\n"
    ))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_error_on_another_distribution_says_what_to_do() {
        let error = sources("ID=fedora\n", Path::new("/nowhere")).unwrap_err().to_string();
        assert!(error.contains("ID=debian") && error.contains("CRIU=/path/to/criu"), "{error}");
    }

    #[test]
    fn the_error_without_an_entry_for_the_suite_says_what_to_do() {
        let release = "ID=debian\nVERSION_CODENAME=bookworm\n";
        let error = sources(release, Path::new("/nowhere")).unwrap_err().to_string();
        assert!(error.contains("suite bookworm") && error.contains("CRIU=/path/to/criu"), "{error}");
    }

    #[test]
    fn only_this_suites_partials_are_cleared() {
        let folder = std::env::temp_dir().join(format!("rewake-partials-{}", std::process::id()));
        for name in ["sid", "sid.partial-1", "trixie.partial-2"] {
            fs::create_dir_all(folder.join(name)).unwrap();
        }
        clear_partials(&folder.join("sid")).unwrap();
        let left = ["sid", "sid.partial-1", "trixie.partial-2"].map(|name| folder.join(name).exists());
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(left, [true, false, true]);
    }

    #[test]
    fn suites_have_names_and_unknown_ones_are_refused() {
        assert_eq!(Suite::named("sid").unwrap(), Suite::Sid);
        assert_eq!(Suite::named(&Suite::Trixie.to_string()).unwrap(), Suite::Trixie);
        assert!(Suite::named("woody").unwrap_err().to_string().contains("trixie or sid"));
    }

    #[test]
    fn the_wrapper_survives_odd_folder_names() {
        let text = wrapper_text(Path::new("/a b/it's")).unwrap();
        let exec = text.lines().last().unwrap();
        assert!(exec.contains(r"--library-path '/a b/it'\''s/root/usr/lib/x86_64-linux-gnu' "), "{exec}");
        assert!(exec.ends_with(r#"/usr/sbin/criu' "$@""#), "{exec}");
    }
}
