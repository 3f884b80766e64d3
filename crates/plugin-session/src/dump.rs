// SPDX-License-Identifier: MIT OR Apache-2.0
//! A dump waits until no process of its tree has missing memory.
//!
//! The wait is in the plugin's `init`: CRIU knows the tree's root by then, has stopped no process, has not
//! locked the network, and has set no alarm. Later, in `PAUSE_DEVICES`, an alarm of ten seconds is set, so
//! the plugin only checks again.

use std::collections::BTreeSet;
use std::env::{self, VarError};
use std::io;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rewake_criu_plugin::Host;
use rewake_plugin_protocol::SESSIONS;

use crate::missing::{Missing, first_missing, notes};
use crate::proc;

/// Seconds that a dump waits at most. Unset: no limit.
pub const WAIT: &str = "REWAKE_DUMP_WAIT";

/// Time between two checks, and its least multiple of a check's own time: a check of a large tree is slow.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);
const PAUSES_FOR_A_LOOK: u32 = 4;

/// A tree that is being dumped: no process of it had missing memory when this was made.
#[derive(Debug)]
pub struct Dumped {
    /// The folder of the sessions' notes.
    sessions: PathBuf,
}

/// Why no dump is made. The program continues.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DumpError {
    #[error(
        "{0}; the dump has waited {waited} s, {WAIT} allows no more: dump it later, or raise {WAIT}",
        waited = .1.as_secs()
    )]
    TooLong(Missing, Duration),
    #[error("{0} again: an image would have zeros in its place; dump it again")]
    Again(Missing),
    #[error("{WAIT}={0:?}: expected a number of seconds")]
    Limit(String),
    #[error("find missing memory of the tree of process {0}: {1}; mount /proc, and run CRIU as root")]
    Find(i32, #[source] io::Error),
}

impl Dumped {
    /// Waits until no process of the tree that CRIU will dump has missing memory. A session serves one
    /// restore, so its background load is that of the tree.
    ///
    /// # Errors
    /// The wait took longer than [`WAIT`] allows, or the state is not known. If CRIU does not report the
    /// tree, there is no wait but a warning: its dump fails later if memory is missing.
    pub fn wait(host: &Host) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let (sessions, log) = (Path::new(SESSIONS), |line: &str| host.warn(line));
        match host.root_pid() {
            Ok(root) => wait(sessions, limit(env::var(WAIT))?, || proc::tree(root), log)?,
            Err(error) => {
                host.warn(format_args!("{error}: the dump does not wait for missing memory, it fails"));
            }
        }
        Ok(Self { sessions: sessions.to_owned() })
    }

    /// Checks one process again, before CRIU stops it.
    ///
    /// # Errors
    /// It has missing memory again, because it was restored in the meantime.
    pub fn check(&self, pid: i32) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let look =
            notes(&self.sessions).and_then(|notes| first_missing(&self.sessions, &notes.notes, &[pid]));
        match look.map_err(|error| DumpError::Find(pid, error))? {
            Some(missing) => Err(DumpError::Again(missing).into()),
            None => Ok(()),
        }
    }
}

/// Waits until no process of the tree of `root` has missing memory, as [`Dumped::wait`] does. It is for a
/// program that starts CRIU. `log` gets a line when the wait begins and when it ends.
///
/// # Errors
/// The wait took longer than [`WAIT`] allows, or the state is not known.
pub fn wait_for_tree(root: i32, log: impl Fn(&str)) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    Ok(wait(Path::new(SESSIONS), limit(env::var(WAIT))?, || proc::tree(root), log)?)
}

fn limit(value: Result<String, VarError>) -> Result<Option<Duration>, DumpError> {
    match value {
        Err(VarError::NotPresent) => Ok(None),
        Err(VarError::NotUnicode(text)) => Err(DumpError::Limit(text.to_string_lossy().into_owned())),
        Ok(text) => match text.parse() {
            Ok(seconds) => Ok(Some(Duration::from_secs(seconds))),
            Err(_) => Err(DumpError::Limit(text)),
        },
    }
}

/// Waits until no process of a tree has missing memory. `tree` is called at each check, because programs may
/// have forked since the last one.
fn wait(
    sessions: &Path,
    limit: Option<Duration>,
    tree: impl Fn() -> Vec<i32>,
    log: impl Fn(&str),
) -> Result<(), DumpError> {
    let start = Instant::now();
    let mut reported = BTreeSet::new();
    let (mut waits, mut unserved) = (false, false);
    loop {
        let look = Instant::now();
        let processes = tree();
        let root = processes.first().copied().unwrap_or_default();
        let notes = notes(sessions).map_err(|error| DumpError::Find(root, error))?;
        for skipped in notes.skipped.iter().filter(|skipped| reported.insert(skipped.path.clone())) {
            log(&skipped.to_string());
        }
        let missing = first_missing(sessions, &notes.notes, &processes)
            .map_err(|error| DumpError::Find(root, error))?;
        let Some(missing) = missing else { break };
        if let Some(limit) = limit.filter(|limit| start.elapsed() >= *limit) {
            return Err(DumpError::TooLong(missing, limit));
        }
        if !waits {
            log(&format!(
                "{missing}: the dump waits until all memory of its tree is resident, nothing is stopped"
            ));
            waits = true;
        } else if missing.is_unserved() && !unserved {
            log(&missing.to_string());
        }
        unserved |= missing.is_unserved();
        let pause = CHECK_INTERVAL.max(look.elapsed() * PAUSES_FOR_A_LOOK);
        sleep(limit.map_or(pause, |limit| pause.min(limit.saturating_sub(start.elapsed()))));
    }
    if waits {
        let waited = start.elapsed().as_secs_f64();
        log(&format!("all memory of the tree is resident after {waited:.1} s: the dump begins"));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
