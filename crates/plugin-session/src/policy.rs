// SPDX-License-Identifier: MIT OR Apache-2.0
//! The host's policy: which restores become lazy without an option.
//!
//! `/etc/rewake/rewake.toml` has it, and `REWAKE_LAZY` in CRIU's environment decides against the file for one
//! restore. Without a file no restore becomes lazy.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

/// The file.
pub const FILE: &str = "/etc/rewake/rewake.toml";
/// The environment's word: 0 is never, 1 is always.
pub const VARIABLE: &str = "REWAKE_LAZY";

/// Why there is no policy.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// The file cannot be read.
    #[error("{}: {error}", .file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// It is no policy.
    #[error("{}: {error}", .file.display())]
    Wrong {
        /// The file.
        file: PathBuf,
        /// What, and where.
        error: String,
    },
    /// The variable is neither.
    #[error("{VARIABLE}: expected 0 or 1, found {0:?}")]
    Variable(String),
}

/// Which restores are lazy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Laziness {
    /// None but the restores that ask for it.
    #[default]
    Never,
    /// The restores of sealed images: each page is compared with its image's manifest.
    Sealed,
    /// All.
    Always,
}

/// What to do when a restore should be lazy and cannot be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnRefusal {
    /// CRIU restores as it would have done.
    #[default]
    Eager,
    /// The restore fails.
    Fail,
}

/// The policy of a host.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Policy {
    /// Which restores are lazy.
    pub lazy: Laziness,
    /// Images with less memory are restored eagerly: in MiB.
    pub min_size_mib: u64,
    /// Seconds in which the node agent starts a streamer. CRIU waits for that.
    pub wait_s: u64,
    /// What to do when it does not.
    pub on_refusal: OnRefusal,
}

impl Default for Policy {
    fn default() -> Self {
        Self { lazy: Laziness::Never, min_size_mib: 0, wait_s: 10, on_refusal: OnRefusal::Eager }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Tables {
    restore: Policy,
}

impl Policy {
    /// Reads the policy of this host for this restore.
    ///
    /// # Errors
    /// [`PolicyError`]: nothing is assumed in the place of a policy that cannot be read.
    pub fn of_host() -> Result<Self, PolicyError> {
        Self::of(Path::new(FILE), std::env::var_os(VARIABLE).as_deref())
    }

    fn of(file: &Path, variable: Option<&OsStr>) -> Result<Self, PolicyError> {
        let policy = match fs::read_to_string(file) {
            Ok(text) => toml::from_str::<Tables>(&text).map_err(|error| {
                // The library's own text has three lines.
                let line = error.span().map_or(0, |span| text[..span.start].matches('\n').count() + 1);
                PolicyError::Wrong {
                    file: file.to_owned(),
                    error: format!("line {line}: {}", error.message()),
                }
            })?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Tables::default(),
            Err(error) => return Err(PolicyError::Unreadable { file: file.to_owned(), error }),
        };
        let policy = policy.restore;
        match &*variable.unwrap_or_default().to_string_lossy() {
            "" => Ok(policy),
            "0" => Ok(Self { lazy: Laziness::Never, ..policy }),
            "1" => Ok(Self { lazy: Laziness::Always, min_size_mib: 0, ..policy }),
            other => Err(PolicyError::Variable(other.to_owned())),
        }
    }

    /// Time in which the node agent starts a streamer.
    #[must_use]
    pub fn wait(&self) -> Duration {
        Duration::from_secs(self.wait_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(text: &str, variable: Option<&str>) -> Result<Policy, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        Policy::of(file.path(), variable.map(OsStr::new)).map_err(|error| error.to_string())
    }

    #[test]
    fn without_a_file_no_restore_becomes_lazy() {
        assert_eq!(Policy::of(Path::new("/nonexistent"), None).unwrap(), Policy::default());
        assert_eq!(Policy::default().lazy, Laziness::Never);
        assert_eq!(policy("", None).unwrap(), Policy::default());
    }

    #[test]
    fn the_file_decides_and_the_environment_against_it() {
        let text = "[restore]\nlazy = \"sealed\"\nmin_size_mib = 64\nwait_s = 9\non_refusal = \"fail\"\n";
        let sealed =
            Policy { lazy: Laziness::Sealed, min_size_mib: 64, wait_s: 9, on_refusal: OnRefusal::Fail };
        assert_eq!(policy(text, None).unwrap(), sealed);
        assert_eq!(policy(text, Some("")).unwrap(), sealed);
        assert_eq!(policy(text, Some("0")).unwrap(), Policy { lazy: Laziness::Never, ..sealed.clone() });
        let always = Policy { lazy: Laziness::Always, min_size_mib: 0, ..sealed };
        assert_eq!(policy(text, Some("1")).unwrap(), always);
    }

    #[test]
    fn the_file_of_the_package_is_read_and_no_restore_becomes_lazy_by_it() {
        let shipped = policy(include_str!("../../../page-server/package/rewake.toml"), None).unwrap();
        assert_eq!(shipped, Policy { min_size_mib: 64, ..Policy::default() });
    }

    #[test]
    fn a_mistake_is_named_with_its_line() {
        let unknown = policy("[restore]\nlazy = \"sealed\"\nlazyness = 1\n", None).unwrap_err();
        assert!(unknown.contains("line 3: unknown field `lazyness`, expected one of `lazy`"), "{unknown}");
        let wrong = policy("[restore]\nlazy = \"often\"\n", None).unwrap_err();
        assert!(wrong.contains("line 2: ") && wrong.contains("`never`, `sealed`"), "{wrong}");
        assert_eq!(policy("", Some("yes")).unwrap_err(), "REWAKE_LAZY: expected 0 or 1, found \"yes\"");
    }
}
