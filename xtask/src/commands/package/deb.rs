// SPDX-License-Identifier: MIT OR Apache-2.0
//! A Debian package of a tree of files, made by `dpkg-deb`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context as _;

use super::tree::{install, set_times, shipped};
use crate::{files, program};

/// Who answers for the packages.
const MAINTAINER: &str = "The Rewake authors <rewake@example.org>";

/// Scripts that dpkg runs.
pub(super) const SCRIPTS: [&str; 3] = ["postinst", "prerm", "postrm"];

/// The fields of a package.
#[derive(Debug)]
pub(super) struct Control {
    name: &'static str,
    version: &'static str,
    fields: String,
}

/// The package with the program and the plugins. `glibc` is the minor version that they need.
pub(super) fn main_control(version: &'static str, glibc: u32) -> Control {
    let fields = format!(
        "Section: admin\nPriority: optional\nDepends: libc6 (>= 2.{glibc}), libgcc-s1 (>= 4.2), \
         init-system-helpers (>= 1.52)\nSuggests: criu (>= 4.1.1), runc, rewake-dbgsym\n\
         Description: restore CRIU checkpoints on demand\n \
         Rewake restores checkpoints of CRIU so that programs run at once. A streamer\n \
         loads their memory in the background, page faults first.\n .\n \
         It takes the place of criu lazy-pages and criu page-server, has plugins for\n \
         CRIU that make restores lazy and that restore the memory of AMD GPUs, moves\n \
         running programs between hosts, and keeps images in stores.\n"
    );
    Control { name: "rewake", version, fields }
}

/// The package with debug information.
pub(super) fn debug_control(version: &'static str) -> Control {
    let fields = format!(
        "Section: debug\nPriority: optional\nAuto-Built-Package: debug-symbols\n\
         Depends: rewake (= {version})\nDescription: debug symbols for rewake\n"
    );
    Control { name: "rewake-dbgsym", version, fields }
}

/// Makes a package of the files in `tree`, in `folder`. Returns its path.
pub(super) fn make(
    tree: &Path,
    folder: &Path,
    control: &Control,
    scripts: &[&str],
    time: SystemTime,
) -> anyhow::Result<PathBuf> {
    let Control { name, version, fields } = control;
    let installed = tree_size(tree)?.div_ceil(1024);
    let meta = tree.join("DEBIAN");
    files::empty_folder(&meta)?;
    files::write(meta.join("md5sums"), md5sums(tree)?)?;
    let conffiles = conffiles(tree)?;
    if !conffiles.is_empty() {
        files::write(meta.join("conffiles"), conffiles)?;
    }
    for script in scripts {
        install(&shipped(script), &meta.join(script), 0o755)?;
    }
    let control = format!(
        "Package: {name}\nSource: rewake\nVersion: {version}\nArchitecture: amd64\nMaintainer: {MAINTAINER}\n\
         Installed-Size: {installed}\n{fields}"
    );
    files::write(meta.join("control"), control)?;
    set_times(tree, time)?;
    let package = folder.join(format!("{name}_{version}_amd64.deb"));
    let mut build = Command::new("dpkg-deb");
    build.args(["--root-owner-group", "-Zxz", "--build"]).args([tree, &package]);
    build.env("SOURCE_DATE_EPOCH", seconds(time)?.to_string());
    program::capture(&mut build)?;
    Ok(package)
}

/// The files that dpkg asks about before it replaces them.
fn conffiles(tree: &Path) -> anyhow::Result<String> {
    let files = files_below(&tree.join("etc"))?;
    let lines = files.iter().filter_map(|file| file.strip_prefix(tree).ok());
    Ok(lines.map(|file| format!("/{}\n", file.display())).collect())
}

fn md5sums(tree: &Path) -> anyhow::Result<String> {
    let files = files_below(tree)?;
    let names = files.iter().filter_map(|file| file.strip_prefix(tree).ok());
    let names = names.filter(|name| !name.starts_with("DEBIAN") && !name.starts_with("etc"));
    program::capture(Command::new("md5sum").args(names).current_dir(tree))
}

fn tree_size(tree: &Path) -> anyhow::Result<u64> {
    let sizes = files_below(tree)?.into_iter().map(|file| Ok(fs::metadata(file)?.len()));
    sizes.sum::<std::io::Result<u64>>().with_context(|| tree.display().to_string())
}

fn files_below(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    if !folder.exists() {
        return Ok(found);
    }
    for path in files::list(folder)? {
        if path.is_dir() {
            found.extend(files_below(&path)?);
        } else {
            found.push(path);
        }
    }
    Ok(found)
}

/// The minor version of glibc that a program needs at least: the newest symbol that it asks for.
pub(super) fn glibc_of(binary: &Path) -> anyhow::Result<u32> {
    let symbols = program::capture(Command::new("objdump").arg("--dynamic-syms").arg(binary))?;
    Ok(newest_glibc(&symbols))
}

fn newest_glibc(symbols: &str) -> u32 {
    let versions = symbols.split("GLIBC_2.").skip(1);
    let minor = |text: &str| text.split(|next: char| !next.is_ascii_digit()).next()?.parse().ok();
    versions.filter_map(minor).max().unwrap_or_default()
}

/// Debian's changelog.
pub(super) fn changelog(version: &str, time: SystemTime) -> anyhow::Result<String> {
    let date =
        program::capture(Command::new("date").args(["-u", "-R", "-d", &format!("@{}", seconds(time)?)]))?;
    let date = date.trim();
    let head = format!("rewake ({version}) unstable; urgency=medium");
    Ok(format!("{head}\n\n  * CHANGELOG.md has what changed.\n\n -- {MAINTAINER}  {date}\n"))
}

fn seconds(time: SystemTime) -> anyhow::Result<u64> {
    Ok(time.duration_since(UNIX_EPOCH).context("a time before 1970")?.as_secs())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const TIME: SystemTime = UNIX_EPOCH;

    #[test]
    fn the_newest_symbol_decides_which_libc_is_needed() {
        let symbols = "0000 DF *UND* 0000 (GLIBC_2.34) pthread_create\n0000 DF *UND* (GLIBC_2.2.5) read\n";
        assert_eq!(newest_glibc(symbols), 34);
        assert_eq!(newest_glibc("no symbols"), 0);
    }

    /// Makes a package of a program and a file of configuration; returns its bytes and its control fields.
    fn package(home: &Path) -> (Vec<u8>, String) {
        let tree = home.join("tree");
        files::create_folder(tree.join("usr/bin")).unwrap();
        files::create_folder(tree.join("etc/rewake")).unwrap();
        files::write_program(&tree.join("usr/bin/rewake"), "#!/bin/sh\n").unwrap();
        files::write(tree.join("etc/rewake/rewake.toml"), "[restore]\n").unwrap();
        let time = TIME + Duration::from_secs(1_000_000_000);
        let made = make(&tree, home, &main_control("1.2.3", 36), &SCRIPTS, time).unwrap();
        assert_eq!(made, home.join("rewake_1.2.3_amd64.deb"));
        let fields = program::capture(Command::new("dpkg-deb").arg("--info").arg(&made)).unwrap();
        let bytes = files::bytes(&made).unwrap();
        files::remove(home).unwrap();
        (bytes, fields)
    }

    #[test]
    fn a_package_names_its_configuration_and_two_builds_are_the_same_bytes() {
        let home =
            |name: &str| std::env::temp_dir().join(format!("rewake-deb-{name}-{}", std::process::id()));
        let ((first, fields), (second, _)) = (package(&home("first")), package(&home("second")));
        assert!(first == second, "the packages differ");
        for expected in ["conffiles", "postinst", "Version: 1.2.3", "libc6 (>= 2.36)", "Installed-Size: 1"] {
            assert!(fields.contains(expected), "{expected} is missing in {fields}");
        }
    }

    #[test]
    fn the_changelog_is_one_entry_of_the_time_of_the_commit() {
        let text = changelog("1.2.3", TIME).unwrap();
        assert!(
            text.starts_with("rewake (1.2.3) ") && text.ends_with("Thu, 01 Jan 1970 00:00:00 +0000\n"),
            "{text}"
        );
    }
}
