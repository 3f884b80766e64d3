// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pstree.img` and `core-PID.img`: the tasks of an image and their states.

use std::collections::HashSet;
use std::io::Read;

use crate::error::{ImageError, Result};
use crate::frame::Records;
use crate::generated::{CoreEntry, PstreeEntry};

/// The most tasks that one image may have: the kernel's limit of pids on 64-bit machines.
pub const MAX_TASKS: usize = 1 << 22;

/// The state of a task at the dump.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskState {
    /// The task ran.
    Alive,
    /// The task had ended, and its parent had not reaped it; it has no memory. CRIU 4.1 and 4.2 write
    /// zombies like this.
    Dead,
    /// CRIU's other number for a zombie.
    Zombie,
    /// The task was stopped by a signal; it has memory.
    Stopped,
    /// A number that this crate does not know.
    Unknown(u32),
}

impl TaskState {
    /// Converts the number in the image.
    #[must_use]
    pub fn from_raw(raw: u32) -> Self {
        match raw {
            1 => Self::Alive,
            2 => Self::Dead,
            3 => Self::Stopped,
            6 => Self::Zombie,
            other => Self::Unknown(other),
        }
    }

    /// Returns the number in the image.
    #[must_use]
    pub fn to_raw(self) -> u32 {
        match self {
            Self::Alive => 1,
            Self::Dead => 2,
            Self::Stopped => 3,
            Self::Zombie => 6,
            Self::Unknown(raw) => raw,
        }
    }

    /// Whether the image has memory of such a task. It is true for unknown states: then missing memory is an
    /// error, and is never left out.
    #[must_use]
    pub fn has_memory(self) -> bool {
        !matches!(self, Self::Dead | Self::Zombie)
    }
}

/// One task. All numbers are pids in the dumped pid namespace; they are part of the names of the task's
/// files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Task {
    /// Its pid.
    pub pid: u32,
    /// Its parent, 0 for the root of the tree.
    pub ppid: u32,
    /// Its process group.
    pub pgid: u32,
    /// Its session.
    pub sid: u32,
    /// All its threads, the main one included.
    pub threads: Vec<u32>,
    /// Its state at the dump.
    pub state: TaskState,
    /// Its short name: any bytes.
    pub comm: Vec<u8>,
}

/// Parses the tree, without states and names.
pub(crate) fn parse_tree<R: Read>(mut records: Records<R>) -> Result<Vec<Task>> {
    let mut tasks = Vec::new();
    let mut seen = HashSet::new();
    while let Some((offset, entry)) = records.message::<PstreeEntry>()? {
        let pid = entry.pid.unwrap_or(0);
        if pid == 0 || i32::try_from(pid).is_err() {
            return Err(records.damaged(offset, "a pid from 1 to 2^31-1", format!("{pid}")));
        }
        if !seen.insert(pid) {
            return Err(records.damaged(offset, "every pid once", format!("pid {pid} again")));
        }
        if tasks.len() == MAX_TASKS {
            return Err(ImageError::TooMany {
                file: records.file().to_path_buf(),
                offset,
                what: "tasks and more",
                found: MAX_TASKS as u64,
                limit_name: "MAX_TASKS",
                limit: MAX_TASKS as u64,
            });
        }
        tasks.push(Task {
            pid,
            ppid: entry.ppid.unwrap_or(0),
            pgid: entry.pgid.unwrap_or(0),
            sid: entry.sid.unwrap_or(0),
            threads: entry.threads,
            state: TaskState::Unknown(0),
            comm: Vec::new(),
        });
    }
    if tasks.is_empty() {
        return Err(records.no_record());
    }
    Ok(tasks)
}

/// Parses the state and the short name of a task.
pub(crate) fn parse_core<R: Read>(records: Records<R>) -> Result<(TaskState, Vec<u8>)> {
    let offset = records.offset();
    let file = records.file().to_path_buf();
    let core: CoreEntry = records.single()?;
    let state = core.tc.as_ref().and_then(|tc| tc.task_state);
    let (Some(tc), Some(state)) = (core.tc, state) else {
        let (expected, found) = ("the state of a task".into(), "none".into());
        return Err(ImageError::Damaged { file, offset, expected, found });
    };
    Ok((TaskState::from_raw(state), tc.comm.unwrap_or_default()))
}
