// SPDX-License-Identifier: MIT OR Apache-2.0
//! A dump waits until no process of its tree has missing memory.
//!
//! The wait is in the plugin's `init`: CRIU knows the tree's root by then, has stopped nothing, locked no network, and runs
//! under no alarm. Later, in `PAUSE_DEVICES`, an alarm of ten seconds runs, so there is only another look.

use std::collections::BTreeSet;
use std::env::{self, VarError};
use std::io;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rewake_criu_plugin::Host;
use rewake_handover::SESSIONS;

use crate::look::{Missing, What, first_missing, notes};
use crate::proc;

/// How many seconds a dump waits, at most. Unset: as long as it takes.
pub const WAIT: &str = "REWAKE_DUMP_WAIT";

/// Time between two looks, and how much longer than a look it is at least: a large tree takes its time.
const PAUSE: Duration = Duration::from_millis(20);
const PAUSES_FOR_A_LOOK: u32 = 4;

/// A tree that is being dumped: when this exists, no process of it had missing memory.
#[derive(Debug)]
pub struct Dumped {
    /// Where sessions' notes are.
    sessions: PathBuf,
}

/// Why a dump is not made. The program runs on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{0}; the dump has waited {waited} s, {WAIT} allows no more: dump it later, or raise {WAIT}", waited = .1.as_secs())]
    TooLong(Missing, Duration),
    #[error("{0} again: an image would have zeros in its place; dump it again")]
    Again(Missing),
    #[error("{WAIT}={0:?}: expected a number of seconds")]
    Limit(String),
    #[error("look for missing memory of the tree of process {0}: {1}; mount /proc, and run CRIU as root")]
    Look(i32, #[source] io::Error),
}

impl Dumped {
    /// Waits until no process of the tree that CRIU is about to dump has missing memory. Sessions that have some are
    /// asked to load it first.
    ///
    /// # Errors
    /// It took longer than [`WAIT`] allows, or it cannot be told. A CRIU that does not say which tree it dumps is not
    /// held up, with a warning: its dump fails later if memory is missing.
    pub fn wait(host: &Host) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let (sessions, say) = (Path::new(SESSIONS), |line: &str| host.warn(line));
        match host.root_pid() {
            Ok(root) => wait(sessions, limit(env::var(WAIT))?, || proc::tree(root), say)?,
            Err(error) => {
                host.warn(format_args!("{error}: the dump does not wait for missing memory, it fails"));
            }
        }
        Ok(Self { sessions: sessions.to_owned() })
    }

    /// Looks at one process once more, before CRIU stops it.
    ///
    /// # Errors
    /// It has missing memory again: it was restored meanwhile.
    pub fn check(&self, pid: i32) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let look =
            notes(&self.sessions).and_then(|notes| first_missing(&self.sessions, &notes.notes, &[pid]));
        match look.map_err(|error| Error::Look(pid, error))? {
            Some(missing) => Err(Error::Again(missing).into()),
            None => Ok(()),
        }
    }
}

/// Waits until no process of the tree of process `root` has missing memory, as [`Dumped::wait`] does: for a program that
/// starts CRIU. `say` gets a line when the wait begins and when it ends.
///
/// # Errors
/// It took longer than [`WAIT`] allows, or it cannot be told.
pub fn wait_for_tree(root: i32, say: impl Fn(&str)) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    Ok(wait(Path::new(SESSIONS), limit(env::var(WAIT))?, || proc::tree(root), say)?)
}

fn limit(value: Result<String, VarError>) -> Result<Option<Duration>, Error> {
    match value {
        Err(VarError::NotPresent) => Ok(None),
        Err(VarError::NotUnicode(text)) => Err(Error::Limit(text.to_string_lossy().into_owned())),
        Ok(text) => match text.parse() {
            Ok(seconds) => Ok(Some(Duration::from_secs(seconds))),
            Err(_) => Err(Error::Limit(text)),
        },
    }
}

/// Waits until no process of a tree has missing memory. `tree` is asked at each look: programs fork meanwhile.
fn wait(
    sessions: &Path,
    limit: Option<Duration>,
    tree: impl Fn() -> Vec<i32>,
    say: impl Fn(&str),
) -> Result<(), Error> {
    let start = Instant::now();
    let (mut asked, mut reported) = (BTreeSet::new(), BTreeSet::new());
    let (mut waits, mut unserved) = (false, false);
    loop {
        let look = Instant::now();
        let processes = tree();
        let root = processes.first().copied().unwrap_or_default();
        let notes = notes(sessions).map_err(|error| Error::Look(root, error))?;
        for skipped in notes.skipped.iter().filter(|skipped| reported.insert(skipped.path.clone())) {
            say(&skipped.to_string());
        }
        let missing =
            first_missing(sessions, &notes.notes, &processes).map_err(|error| Error::Look(root, error))?;
        let Some(missing) = missing else { break };
        if let Some(limit) = limit.filter(|limit| start.elapsed() >= *limit) {
            return Err(Error::TooLong(missing, limit));
        }
        if !waits {
            say(&format!(
                "{missing}: the dump waits until all memory of its tree is resident, nothing is stopped"
            ));
            waits = true;
        } else if missing.is_unserved() && !unserved {
            say(&missing.to_string());
        }
        unserved |= missing.is_unserved();
        ask(sessions, &missing, &mut asked, &say);
        let pause = PAUSE.max(look.elapsed() * PAUSES_FOR_A_LOOK);
        sleep(limit.map_or(pause, |limit| pause.min(limit.saturating_sub(start.elapsed()))));
    }
    if waits {
        let waited = start.elapsed().as_secs_f64();
        say(&format!("all memory of the tree is resident after {waited:.1} s: the dump begins"));
    }
    Ok(())
}

/// Asks the session of missing memory to load it first, once.
fn ask(sessions: &Path, missing: &Missing, asked: &mut BTreeSet<(i32, u64, u64)>, say: &impl Fn(&str)) {
    let What::Memory(note, _) = &missing.what else { return };
    if !asked.insert((note.starter.pid, note.starter.started, note.number)) {
        return;
    }
    match note.ask_urgent(sessions) {
        // It has just ended.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => say(&format!("session {} cannot be asked to hurry: {error}", note.number)),
        Ok(()) => {}
    }
}

#[cfg(test)]
mod tests;
