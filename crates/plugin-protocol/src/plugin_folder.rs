// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds CRIU's plugin for AMD GPUs, and knows Rewake's own from CRIU's. `docs/serve.md` has the rule for
//! users.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use rewake_criu_images::ARRIVING_NAME;

use crate::SOCKET;

/// The plugin's file: CRIU loads every `.so` of the folder that it is given.
pub const FILE: &str = "amdgpu_plugin.so";
/// CRIU's own variable for a folder of plugins.
const VARIABLE: &str = "CRIU_LIBS_DIR";
/// The folder beside this program, in a build tree.
const BUILT: &str = "criu-plugin";
/// The folder below the prefix in whose `bin` this program is installed.
const INSTALLED: &str = "lib/rewake/criu";

/// Returns the folder to give to CRIU: the `chosen` one, else the one in `$CRIU_LIBS_DIR`, else one that
/// belongs to this program. Returns `None` where none exists, or where the variable names another: CRIU uses
/// its default then.
///
/// # Errors
/// The chosen folder has no plugin.
pub fn find(chosen: Option<&Path>) -> anyhow::Result<Option<PathBuf>> {
    let program = std::env::current_exe().context("finding this program")?;
    search(chosen, variable().as_deref(), &program)
}

/// Returns the folder that CRIU's own variable names.
#[must_use]
pub fn variable() -> Option<PathBuf> {
    std::env::var_os(VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn search(chosen: Option<&Path>, variable: Option<&Path>, program: &Path) -> anyhow::Result<Option<PathBuf>> {
    if let Some(folder) = chosen {
        if !holds_plugin(folder) {
            bail!("--plugin-dir {}: there is no {FILE} in it", folder.display());
        }
        return Ok(Some(std::path::absolute(folder)?));
    }
    if let Some(folder) = variable {
        return Ok(holds_plugin(folder).then(|| folder.to_owned()));
    }
    Ok(own_folders(program).into_iter().find(|folder| holds_plugin(folder)))
}

/// Returns the folders that belong to a program at this path.
fn own_folders(program: &Path) -> Vec<PathBuf> {
    let bin = program.parent();
    let prefix = bin.and_then(Path::parent);
    [bin.map(|folder| folder.join(BUILT)), prefix.map(|folder| folder.join(INSTALLED))]
        .into_iter()
        .flatten()
        .collect()
}

fn holds_plugin(folder: &Path) -> bool {
    folder.join(FILE).is_file()
}

/// Returns whether the plugin in a folder is this project's, and waits for memory that arrives: it has the
/// names of the streamer's socket, and of the list of files that arrive. CRIU's own one checks no byte of an
/// image.
///
/// # Errors
/// The plugin cannot be read.
pub fn is_own(folder: &Path) -> io::Result<bool> {
    let plugin = std::fs::read(folder.join(FILE))?;
    let has = |name: &str| plugin.windows(name.len()).any(|bytes| bytes == name.as_bytes());
    Ok(has(SOCKET) && has(ARRIVING_NAME))
}

/// Returns whether this machine has AMD's compute driver.
#[must_use]
pub fn machine_has_gpu() -> bool {
    Path::new("/dev/kfd").exists()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Makes a folder with a plugin in each of `folders`.
    fn with_plugins(folders: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for folder in folders {
            fs::create_dir_all(root.path().join(folder)).unwrap();
            fs::write(root.path().join(folder).join(FILE), "").unwrap();
        }
        root
    }

    #[test]
    fn the_folder_is_the_chosen_one_then_the_variable_s_then_the_program_s_own() {
        let all = ["chosen", "variable", "usr/bin/criu-plugin", "usr/lib/rewake/criu"];
        for first in 0..all.len() {
            let root = with_plugins(&all[first..]);
            let at = |name: &str| root.path().join(name);
            let (chosen, variable) = (at("chosen"), at("variable"));
            let found = search(
                (first == 0).then_some(chosen.as_path()),
                (first <= 1).then_some(variable.as_path()),
                &at("usr/bin/rewake"),
            );
            assert_eq!(found.unwrap(), Some(at(all[first])));
        }
        let root = with_plugins(&[]);
        assert_eq!(search(None, None, &root.path().join("bin/rewake")).unwrap(), None);
    }

    #[test]
    fn the_own_plugin_names_the_streamer_s_socket_and_the_list() {
        let root = with_plugins(&["own", "old", "stock"]);
        fs::write(root.path().join("own").join(FILE), format!("\x7fELF{SOCKET}\0{ARRIVING_NAME}")).unwrap();
        fs::write(root.path().join("old").join(FILE), format!("\x7fELF{SOCKET}\0")).unwrap();
        let own = ["own", "old", "stock"].map(|name| is_own(&root.path().join(name)).unwrap());
        assert_eq!(own, [true, false, false]);
    }

    #[test]
    fn a_chosen_folder_without_the_plugin_is_refused_by_name() {
        let root = with_plugins(&["bin/criu-plugin", "variable"]);
        let chosen = root.path().join("empty");
        let variable = root.path().join("variable");
        let refused = search(Some(&chosen), Some(variable.as_path()), &root.path().join("bin/rewake"));
        let said = refused.unwrap_err().to_string();
        assert!(
            said.starts_with("--plugin-dir ") && said.ends_with("empty: there is no amdgpu_plugin.so in it"),
            "{said}"
        );
    }

    #[test]
    fn a_variable_that_names_other_plugins_is_left_to_criu() {
        let root = with_plugins(&["bin/criu-plugin"]);
        let found = search(None, Some(Path::new("/nowhere")), &root.path().join("bin/rewake"));
        assert_eq!(found.unwrap(), None);
    }
}
