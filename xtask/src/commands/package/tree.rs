// SPDX-License-Identifier: MIT OR Apache-2.0
//! The files of the packages, and where each is installed.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use anyhow::{Context as _, ensure};

use super::{VERSION, deb};
use crate::{files, program, repository};

/// What the compiler has made.
#[derive(Debug)]
pub(super) struct Built {
    pub(super) rewake: PathBuf,
    pub(super) rewake_plugin: PathBuf,
    pub(super) amdgpu_plugin: PathBuf,
}

/// All that the packages are made of.
#[derive(Debug)]
pub(super) struct PackageTree<'a> {
    pub(super) built: &'a Built,
    /// What `rewake manual` has written.
    pub(super) manual: &'a Path,
    /// The bill of materials.
    pub(super) sbom: String,
    /// Of all files.
    pub(super) time: SystemTime,
}

/// Programs and libraries, which are stripped: what is built, and its place.
fn binaries(built: &Built) -> [(&Path, &'static str, u32); 3] {
    [
        (&built.rewake, "usr/bin/rewake", 0o755),
        (&built.rewake_plugin, "usr/lib/criu/rewake_plugin.so", 0o644),
        (&built.amdgpu_plugin, "usr/lib/rewake/criu/amdgpu_plugin.so", 0o644),
    ]
}

/// Files of `page-server/package`, and their places.
const SHIPPED: [(&str, &str, u32); 8] = [
    ("rewake.service", "lib/systemd/system/rewake.service", 0o644),
    ("rewake.socket", "lib/systemd/system/rewake.socket", 0o644),
    ("rewake.tmpfiles", "usr/lib/tmpfiles.d/rewake.conf", 0o644),
    ("rewake.toml", "etc/rewake/rewake.toml", 0o644),
    ("runc", "usr/libexec/rewake/runc", 0o755),
    ("copyright", "usr/share/doc/rewake/copyright", 0o644),
    ("copyright", "usr/share/doc/rewake-dbgsym/copyright", 0o644),
    ("README.Debian", "usr/share/doc/rewake/README.Debian", 0o644),
];

/// Completions that `rewake manual` writes, and where the shells look.
const COMPLETIONS: [(&str, &str); 3] = [
    ("rewake.bash", "usr/share/bash-completion/completions/rewake"),
    ("_rewake", "usr/share/zsh/vendor-completions/_rewake"),
    ("rewake.fish", "usr/share/fish/vendor_completions.d/rewake.fish"),
];

/// Where the package with debug information has its files.
const DEBUG: &str = "usr/lib/debug";
const DEBUG_DOC: &str = "usr/share/doc/rewake-dbgsym";

impl PackageTree<'_> {
    /// Makes the packages in `folder`, and returns their paths: the program, its debug information, and their
    /// checksums.
    pub(super) fn packages(&self, folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
        let (main, debug) = (folder.join("tree"), folder.join("tree-dbgsym"));
        files::empty_folder(&main)?;
        files::empty_folder(&debug)?;
        let mut glibc = 0;
        for (built, place, mode) in binaries(self.built) {
            let to = main.join(place);
            install(built, &to, mode)?;
            separate(&to, &debug)?;
            glibc = glibc.max(deb::glibc_of(&to)?);
        }
        for (name, place, mode) in SHIPPED {
            let root = if place.starts_with(DEBUG_DOC) { &debug } else { &main };
            install(&shipped(name), &root.join(place), mode)?;
        }
        for (name, place) in COMPLETIONS {
            install(&self.manual.join(name), &main.join(place), 0o644)?;
        }
        self.install_manual(&main)?;
        let doc = main.join("usr/share/doc/rewake");
        files::write(doc.join("rewake.cdx.json"), &self.sbom)?;
        files::write(doc.join("changelog"), deb::changelog(VERSION, self.time)?)?;
        compress(&doc.join("changelog"))?;
        compress(&doc.join("rewake.cdx.json"))?;
        let debug_doc = debug.join(DEBUG_DOC);
        files::copy(&doc.join("changelog.gz"), &debug_doc.join("changelog.gz"))?;
        let packages = [
            deb::make(&main, folder, &deb::main_control(VERSION, glibc), &deb::SCRIPTS, self.time)?,
            deb::make(&debug, folder, &deb::debug_control(VERSION), &[], self.time)?,
        ];
        let sums = folder.join(format!("rewake_{VERSION}.sha256"));
        let names = packages.iter().filter_map(|package| package.file_name());
        let text = program::capture(Command::new("sha256sum").args(names).current_dir(folder))?;
        files::write(&sums, text)?;
        Ok([&packages[..], &[sums]].concat())
    }

    /// Manual pages, compressed.
    fn install_manual(&self, root: &Path) -> anyhow::Result<()> {
        let pages = files::list(self.manual)?;
        let pages = pages.iter().filter(|page| page.extension().is_some_and(|section| section == "8"));
        for page in pages.cloned().chain([shipped("rewake.toml.5")]) {
            let name = page.file_name().context("a manual page without a name")?;
            let section = page.extension().context("a manual page without a section")?;
            let to = root.join("usr/share/man").join(format!("man{}", section.display())).join(name);
            install(&page, &to, 0o644)?;
            compress(&to)?;
        }
        Ok(())
    }
}

/// A file of this repository that the package has.
pub(super) fn shipped(name: &str) -> PathBuf {
    repository::root().join("page-server/package").join(name)
}

/// Copies a file to its place.
pub(super) fn install(from: &Path, to: &Path, mode: u32) -> anyhow::Result<()> {
    files::create_folder(to.parent().context("a place without a folder")?)?;
    files::copy(from, to)?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode)).with_context(|| to.display().to_string())
}

/// Moves the debug information of a program into the folder of the other package, where debuggers find it by
/// the program's build id.
fn separate(binary: &Path, debug: &Path) -> anyhow::Result<()> {
    let notes = program::capture(Command::new("readelf").arg("--notes").arg(binary))?;
    let id = notes.lines().find_map(|line| line.trim().strip_prefix("Build ID: ")).map(str::trim);
    let id =
        id.with_context(|| format!("{} has no build id: use a linker that makes one", binary.display()))?;
    ensure!(id.len() > 2 && id.is_ascii(), "{}: build id {id}", binary.display());
    let to = debug.join(DEBUG).join(".build-id").join(&id[..2]).join(format!("{}.debug", &id[2..]));
    files::create_folder(to.parent().context("a place without a folder")?)?;
    program::run(
        Command::new("objcopy").args(["--only-keep-debug", "--compress-debug-sections"]).args([binary, &to]),
    )?;
    fs::set_permissions(&to, fs::Permissions::from_mode(0o644))?;
    program::run(Command::new("strip").args(["--strip-unneeded", "--remove-section=.comment"]).arg(binary))
}

/// Compresses a file in its place, without its name and its time.
fn compress(path: &Path) -> anyhow::Result<()> {
    program::run(Command::new("gzip").args(["-9", "--no-name", "--force"]).arg(path))
}

/// Gives all below a folder one time.
pub(super) fn set_times(folder: &Path, time: SystemTime) -> anyhow::Result<()> {
    for path in files::list(folder)? {
        if path.is_dir() {
            set_times(&path, time)?;
        } else {
            File::open(&path).and_then(|file| file.set_modified(time))?;
        }
    }
    File::open(folder).and_then(|file| file.set_modified(time)).with_context(|| folder.display().to_string())
}
