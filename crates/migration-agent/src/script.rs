// SPDX-License-Identifier: MIT OR Apache-2.0
//! This program as CRIU's action script (`--action-script`).
//!
//! CRIU waits for its script. After a dump and at the end of a restore the script waits for the agent's
//! decision. If the agent dies, the script does what the agent's record says:
//!
//! * source, without GRANT: it thaws the tree, which runs on;
//! * source, with GRANT: it waits for the next agent, and the tree stays frozen;
//! * destination, without RELEASE: the restore fails, and CRIU kills its tasks;
//! * destination, with RELEASE: the tree runs.

use std::env;
use std::io::{self, BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, bail};
use rewake_migration::record::{DestinationRecord, SourceRecord};

use crate::destination_link::ACCEPT_INTERVAL;
use crate::folder::{WrittenRecord, read_record, socket};

/// The migration's folder.
const VARIABLE: &str = "REWAKE_MIGRATION";
/// CRIU says here at which moment it runs the script.
const ACTION: &str = "CRTOOLS_SCRIPT_ACTION";
/// Pause between two looks for an agent that continues a migration.
const AGENT_INTERVAL: Duration = Duration::from_millis(100);
/// Time after which a caller is shown that an abort takes long.
const LONG: Duration = Duration::from_secs(2);
/// Time that an abort may take then: CRIU finishes its dump first.
const ABORT_LIMIT: Duration = Duration::from_secs(600);
/// The line of [`AgentCall::Abort`].
const ABORT: &str = "abort";
const CONTINUE: u8 = b'1';
const FAIL: u8 = b'0';

/// A moment at which the agent acts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CriuMoment {
    /// CRIU is about to stop the tree.
    PreDump,
    /// The image is written, and the tree is stopped.
    PostDump,
    /// All tasks are restored, and none runs.
    PostRestore,
    /// The restored tasks run.
    PostResume,
}

impl CriuMoment {
    const ALL: [(&'static str, Self); 4] = [
        ("pre-dump", Self::PreDump),
        ("post-dump", Self::PostDump),
        ("post-restore", Self::PostRestore),
        ("post-resume", Self::PostResume),
    ];

    fn of(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(known, _)| *known == name).map(|(_, moment)| *moment)
    }

    /// Whether CRIU waits for the agent's decision.
    fn waits(self) -> bool {
        matches!(self, Self::PostDump | Self::PostRestore)
    }
}

/// What is asked of an agent through its socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AgentCall {
    /// By CRIU's script.
    Moment(CriuMoment),
    /// By `rewake migrate --abort`.
    Abort,
}

impl AgentCall {
    fn of(line: &str) -> Option<Self> {
        if line == ABORT { Some(Self::Abort) } else { CriuMoment::of(line).map(Self::Moment) }
    }
}

/// A script that waits for a decision. If it is dropped, the record decides.
#[derive(Debug)]
pub(crate) struct WaitingScript(UnixStream);

impl WaitingScript {
    /// Lets CRIU continue, or fails its command.
    pub(crate) fn decide(mut self, continues: bool) -> io::Result<()> {
        self.0.write_all(&[if continues { CONTINUE } else { FAIL }])
    }
}

/// Has CRIU run this program as its script.
///
/// # Errors
/// This program's own path is not known.
pub(crate) fn add_to(criu: &mut Command, folder: &Path) -> anyhow::Result<()> {
    let this = env::current_exe().context("finding this program")?;
    criu.arg("--action-script").arg(this).env(VARIABLE, folder);
    Ok(())
}

/// Receives calls, and gives each to `report`, until that returns false.
pub(crate) fn receive(listener: &UnixListener, report: impl Fn(AgentCall, WaitingScript) -> bool) {
    for stream in listener.incoming() {
        // Descriptors may be used up for a moment, and a later script must still find this agent.
        let Ok(stream) = stream else {
            sleep(ACCEPT_INTERVAL);
            continue;
        };
        let mut line = String::new();
        let read = stream.try_clone().and_then(|stream| BufReader::new(stream).read_line(&mut line));
        let Some(call) = read.ok().and_then(|_| AgentCall::of(line.trim_end())) else { continue };
        if !report(call, WaitingScript(stream)) {
            return;
        }
    }
}

/// Runs as a script if CRIU has started this program as one, and returns the exit code.
#[must_use]
pub fn run_if_called() -> Option<u8> {
    let (folder, action) = (env::var_os(VARIABLE)?, env::var(ACTION).ok()?);
    if env::args_os().len() > 1 {
        return None;
    }
    let Some(moment) = CriuMoment::of(&action) else { return Some(0) };
    match run(&PathBuf::from(folder), moment, &action) {
        Ok(continues) => Some(u8::from(!continues)),
        Err(error) => {
            // CRIU's log is standard error.
            let _ = writeln!(io::stderr(), "Error (rewake): {error:#}");
            Some(1)
        }
    }
}

fn run(folder: &Path, moment: CriuMoment, action: &str) -> anyhow::Result<bool> {
    loop {
        match ask(folder, action, moment.waits()) {
            Ok(Some(continues)) => return Ok(continues),
            Ok(None) | Err(_) if !moment.waits() => return Ok(true),
            Ok(None) | Err(_) => {}
        }
        match read_record(folder)? {
            Some(WrittenRecord::Source(entry)) if entry.record == SourceRecord::Started => {
                entry.cgroup.thaw()?;
                entry.cgroup.release();
                bail!("the agent has ended before GRANT: the tree runs on");
            }
            Some(WrittenRecord::Source(_)) => sleep(AGENT_INTERVAL),
            Some(WrittenRecord::Destination(entry)) => return Ok(entry.record == DestinationRecord::Released),
            None => bail!("the migration has ended"),
        }
    }
}

/// Asks a source's agent to end its migration. Returns whether it did, or `None` if it has died. `waits` is
/// called once if the answer takes long.
///
/// # Errors
/// The agent cannot be asked, or has not answered in time.
pub(crate) fn ask_to_abort(folder: &Path, waits: impl FnOnce()) -> io::Result<Option<bool>> {
    let mut stream = UnixStream::connect(socket(folder))?;
    stream.write_all(format!("{ABORT}\n").as_bytes())?;
    let mut answer = [0];
    stream.set_read_timeout(Some(LONG))?;
    let len = match stream.read(&mut answer) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            waits();
            stream.set_read_timeout(Some(ABORT_LIMIT))?;
            stream.read(&mut answer)?
        }
        read => read?,
    };
    Ok((len == 1).then_some(answer[0] == CONTINUE))
}

/// Asks the agent, or `None` if it has died.
fn ask(folder: &Path, action: &str, waits: bool) -> io::Result<Option<bool>> {
    let mut stream = UnixStream::connect(socket(folder))?;
    stream.write_all(format!("{action}\n").as_bytes())?;
    if !waits {
        return Ok(Some(true));
    }
    let mut answer = [0];
    let len = stream.read(&mut answer)?;
    Ok((len == 1).then_some(answer[0] == CONTINUE))
}
