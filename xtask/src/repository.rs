// SPDX-License-Identifier: MIT OR Apache-2.0
//! Paths of this repository, and cargo commands that run in it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

use crate::program;

/// The repository's root.
pub(crate) fn root() -> &'static Path {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask)
}

/// The folder of set-up and demo; ignored by git, may be deleted at any time.
pub(crate) fn scratch() -> PathBuf {
    root().join(".rewake")
}

/// Cargo (the one that runs this program), in the repository's root.
pub(crate) fn cargo() -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let mut command = Command::new(program);
    // Set by `cargo run` for this program alone. Build scripts of other packages read some of them, so that
    // these packages would be compiled again after each `cargo build` of a user's.
    let of_this_package = |name: &OsString| {
        let name = name.to_string_lossy();
        name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
    };
    for (name, _) in std::env::vars_os().filter(|(name, _)| of_this_package(name)) {
        command.env_remove(name);
    }
    command.current_dir(root());
    command
}

/// The folder that cargo builds into, whatever configuration chose it.
pub(crate) fn target() -> anyhow::Result<PathBuf> {
    let metadata = program::capture(cargo().args(["metadata", "--no-deps", "--format-version=1"]))?;
    let directory = field(&metadata, "target_directory");
    directory
        .map(PathBuf::from)
        .context("`cargo metadata` names no target_directory: is cargo 1.95 or newer?")
}

/// A release program of this workspace, built now; `package` may have several.
pub(crate) fn build_release(package: &str, program: &str) -> anyhow::Result<PathBuf> {
    program::run(cargo().args(["build", "--release", "--package", package, "--bin", program]))?;
    release(program)
}

/// Cargo's options for the programs of a demo, for which a visitor waits: without optimisation where nothing
/// is hot, and with no feature of `rewake` but those that the demo names. Cargo is quiet, because the demo
/// says how far it is.
pub(crate) const FOR_DEMO: [&str; 4] = ["--quiet", "--profile", "demo", "--no-default-features"];

/// Programs of this workspace, built now for a demo: package and name of each. One run of cargo builds them:
/// in two runs, libraries that both use would be compiled twice, with different features.
pub(crate) fn build_for_demo<const N: usize>(
    programs: [(&str, &str); N],
    features: &[&str],
) -> anyhow::Result<[PathBuf; N]> {
    let mut cargo = cargo();
    cargo.arg("build").args(FOR_DEMO);
    for feature in features {
        cargo.args(["--features", feature]);
    }
    for (package, program) in programs {
        cargo.args(["--package", package, "--bin", program]);
    }
    program::run(&mut cargo)?;
    let folder = target()?.join("demo");
    Ok(programs.map(|(_, program)| folder.join(program)))
}

/// The path of a release program, built or not.
pub(crate) fn release(program: &str) -> anyhow::Result<PathBuf> {
    Ok(target()?.join("release").join(program))
}

/// A string field of a JSON text; enough for paths, which cargo writes with `\\` and `\"` as the only
/// escapes.
pub(crate) fn field(json: &str, name: &str) -> Option<String> {
    let (_, rest) = json.split_once(&format!("\"{name}\":\""))?;
    let mut value = String::new();
    let mut characters = rest.chars();
    loop {
        match characters.next()? {
            '"' => return Some(value),
            '\\' => value.push(characters.next()?),
            other => value.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_found_with_its_escapes_undone() {
        let json = r#"{"packages":[],"target_directory":"/a b/\"c\"\\d","version":1}"#;
        assert_eq!(field(json, "target_directory").as_deref(), Some(r#"/a b/"c"\d"#));
        assert_eq!(field(json, "missing"), None);
    }

    #[test]
    fn the_root_is_the_folder_of_the_workspace() {
        assert!(root().join("Cargo.toml").is_file() && root().join("xtask").is_dir());
    }
}
