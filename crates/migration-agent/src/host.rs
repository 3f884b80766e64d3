// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the hosts compare before the program is touched.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use rewake_process::proc;
use serde::{Deserialize, Serialize};

/// Names that an error shows.
const SHOWN: usize = 4;

/// What a destination must have.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HostOffer {
    architecture: String,
    /// The features of the source's CPUs.
    cpu_features: BTreeSet<String>,
    /// Pids that the tree will have.
    pids: BTreeSet<i32>,
    /// Files that the tree has open or mapped.
    files: BTreeSet<PathBuf>,
}

impl HostOffer {
    /// Describes this host, and a tree on it.
    pub(crate) fn of(processes: &[i32]) -> anyhow::Result<Self> {
        let mut pids = BTreeSet::new();
        let mut files = BTreeSet::new();
        for pid in processes {
            let number = proc::status(*pid).and_then(|status| status.own_number);
            pids.insert(number.with_context(|| format!("process {pid} has ended"))?);
            files.extend(files_of(*pid)?);
        }
        let architecture = std::env::consts::ARCH.to_owned();
        Ok(Self { architecture, cpu_features: cpu_features()?, pids, files })
    }

    /// Compares this host with an offer.
    ///
    /// # Errors
    /// What this host lacks.
    pub(crate) fn compare(text: &str) -> anyhow::Result<()> {
        let offer: Self = serde_json::from_str(text).context("reading the source's offer")?;
        let here = std::env::consts::ARCH;
        ensure!(
            offer.architecture == here,
            "the source is a {} machine, this one {here}",
            offer.architecture
        );
        let has = cpu_features()?;
        let lacks: Vec<_> = offer.cpu_features.difference(&has).cloned().collect();
        ensure!(lacks.is_empty(), "this machine's CPUs lack {}", shown(&lacks));
        let used: Vec<_> = offer.pids.iter().filter(|pid| exists(pid)).map(ToString::to_string).collect();
        ensure!(used.is_empty(), "pids of the program are in use here: {}", shown(&used));
        let absent = offer.files.iter().filter(|path| !path.exists());
        let absent: Vec<_> = absent.map(|path| path.display().to_string()).collect();
        ensure!(absent.is_empty(), "files of the program do not exist here: {}", shown(&absent));
        Ok(())
    }
}

fn exists(pid: &i32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

fn shown(names: &[String]) -> String {
    let more = names.len().saturating_sub(SHOWN);
    let first = names[..names.len() - more].join(", ");
    if more == 0 { first } else { format!("{first} and {more} more") }
}

fn cpu_features() -> anyhow::Result<BTreeSet<String>> {
    let text = fs::read_to_string("/proc/cpuinfo").context("reading /proc/cpuinfo")?;
    let list = text.lines().find_map(|line| line.strip_prefix("flags")?.split_once(':'));
    Ok(list.map_or_else(BTreeSet::new, |(_, list)| list.split_whitespace().map(str::to_owned).collect()))
}

/// Regular files that a process has open or mapped, and that have a name.
fn files_of(pid: i32) -> anyhow::Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    for folder in ["fd", "map_files"] {
        let folder = format!("/proc/{pid}/{folder}");
        for entry in fs::read_dir(&folder).with_context(|| format!("listing {folder}"))? {
            let entry = entry.with_context(|| format!("listing {folder}"))?;
            let Ok(path) = fs::read_link(entry.path()) else { continue };
            let is_named = path.is_absolute() && path.is_file();
            if is_named {
                found.insert(path);
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_can_take_its_own_files_and_features() {
        let mut offer = HostOffer::of(&[std::process::id().cast_signed()]).unwrap();
        assert!(offer.files.contains(&std::env::current_exe().unwrap()), "{:?}", offer.files);
        let refused = |offer: &HostOffer| {
            HostOffer::compare(&serde_json::to_string(offer).unwrap()).unwrap_err().to_string()
        };
        assert!(refused(&offer).starts_with("pids of the program are in use here: "));
        offer.pids.clear();
        HostOffer::compare(&serde_json::to_string(&offer).unwrap()).unwrap();
        offer.files.insert("/no/such/file".into());
        assert_eq!(refused(&offer), "files of the program do not exist here: /no/such/file");
        offer.cpu_features.insert("levitation".into());
        assert_eq!(refused(&offer), "this machine's CPUs lack levitation");
    }
}
