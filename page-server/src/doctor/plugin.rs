// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks whether CRIU loads `rewake_plugin.so` when a user or a container engine calls it.

use std::path::PathBuf;

use super::Check;

/// The plugin's file.
pub const FILE: &str = "rewake_plugin.so";

/// The folder whose plugins CRIU loads without `--libdir`.
#[derive(Debug, Clone)]
pub struct PluginFolder {
    /// `$CRIU_LIBS_DIR`, else the default that CRIU is built with.
    pub path: PathBuf,
    /// Whether it has [`FILE`].
    pub has_plugin: bool,
}

/// Returns the check.
#[must_use]
pub fn verdict(folder: &PluginFolder) -> Check {
    let (name, path) = ("rewake plugin", folder.path.display());
    if folder.has_plugin {
        return Check::ok(name, format!("{path}/{FILE}: dumps wait for missing memory"));
    }
    let found = format!(
        "{path} has no {FILE}: `criu dump` of a process with missing memory fails instead of waiting"
    );
    Check::warning(
        name,
        found,
        format!("`cargo xtask plugin` in Rewake's source tree builds {FILE}: copy it there"),
    )
}

#[cfg(test)]
mod tests {
    use super::super::CheckVerdict;
    use super::*;

    #[test]
    fn a_folder_without_the_plugin_is_named_with_advice() {
        let folder = |has_plugin| PluginFolder { path: "/usr/lib/criu".into(), has_plugin };
        let check = verdict(&folder(true));
        assert_eq!(check.verdict, CheckVerdict::Ok);
        assert!(check.found.starts_with("/usr/lib/criu/rewake_plugin.so: dumps wait"), "{check:?}");
        let check = verdict(&folder(false));
        assert_eq!(check.verdict, CheckVerdict::Warning);
        assert!(check.found.starts_with("/usr/lib/criu has no rewake_plugin.so: "), "{check:?}");
        assert!(check.advice.unwrap().ends_with("builds rewake_plugin.so: copy it there"));
    }
}
