// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake recover`: serves the sessions of streamers all of whose processes were killed.

use std::fs::File;
use std::io::{PipeWriter, Read as _};
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, setsid};
use tracing::{error, info, warn};

use super::{detach::release_terminal, print};
use crate::cli::RecoverArgs;
use crate::logging;
use rewake_process::private_socket;
use rewake_process::ready::Ready;
use rewake_streamer::control::work_folder;
use rewake_streamer::ledger::{Folder, Ledger};
use rewake_streamer::restore::StreamedRestore;
use rewake_streamer::supervise::leftover_stores;
use rewake_streamer::supervise::recover::take_up;
use rewake_streamer::supervise::supervisor::{self, Start};

/// Descriptors of an address space: userfaultfd, journal and process. An entry may occur twice, and its
/// userfaultfds of forked children lie in messages.
const DESCRIPTORS: u64 = 6;
/// Everything else: images, three for each file, reactors, logs.
const OWN_DESCRIPTORS: u64 = 384;
/// Exit code when processes were killed, or their memory could not be loaded.
const LOST: u8 = 1;

/// Runs the command; gives the exit code: 0 when all memory is resident (with `-d`: when all sessions are
/// served).
///
/// # Errors
/// The folder of the ledgers cannot be read, or a ledger has another version.
pub fn run(options: &RecoverArgs) -> anyhow::Result<u8> {
    let log = logging::start(options.log_file.as_deref(), options.verbosity)?;
    let daemon = options.daemon.then_some(log.as_ref());
    let mut code = 0;
    let mut streamers = Vec::new();
    for path in Folder::all()? {
        match start(&path, None, daemon) {
            Ok(streamer) => streamers.extend(streamer),
            Err(error) => {
                print::say(format!("{error:#}"));
                code = LOST;
            }
        }
    }
    let sessions = streamers.len();
    for streamer in streamers {
        if !streamer.is_ready() {
            code = LOST;
        }
        // A successor that has killed some of its targets serves the others.
        if !options.daemon && !matches!(waitpid(streamer.pid, None)?, WaitStatus::Exited(_, 0)) {
            code = LOST;
        }
    }
    // Nothing is lost: a process has a descriptor too much.
    leftover_stores::take_back()?.iter().for_each(print::say);
    if code == 0 {
        print::say(match (sessions, options.daemon) {
            (0, _) => "no session waits for a streamer".to_owned(),
            (sessions, true) => format!("sessions that are served again: {sessions}"),
            (sessions, false) => format!("sessions whose memory is all resident: {sessions}"),
        });
    }
    Ok(code)
}

/// Starts a streamer for each ledger whose processes have all ended, and waits for none: `rewake serve` does
/// that when it starts. `own`: a descriptor that is for the caller alone. `daemon`: the caller's log, if it
/// becomes a daemon.
pub fn start_all(own: Option<RawFd>, daemon: Option<Option<&File>>) {
    let folders = Folder::all().unwrap_or_else(|error| {
        warn!("looking for sessions without a streamer: {error:#}");
        Vec::new()
    });
    for path in folders {
        if let Err(error) = start(&path, own, daemon) {
            error!("{error:#}");
        }
    }
}

/// A process that serves the sessions of another one's streamer.
struct Streamer {
    pid: Pid,
    ready: std::io::PipeReader,
}

impl Streamer {
    /// Waits until it serves: false when it ended before that, or has killed processes.
    fn is_ready(&self) -> bool {
        let mut byte = [0];
        (&self.ready).read(&mut byte).is_ok_and(|count| count == 1)
    }
}

/// None when nothing depends on the ledger, or its processes live.
fn start(path: &Path, own: Option<RawFd>, daemon: Option<Option<&File>>) -> anyhow::Result<Option<Streamer>> {
    let Ok((folder, ledger)) = Folder::take(path)? else { return Ok(None) };
    if !ledger.is_depended_on() {
        // What processes keep of the session is taken back later, because that may take seconds.
        leftover_stores::leave(folder, ledger.session());
        return Ok(None);
    }
    let (ready, tell) = std::io::pipe().context("making a pipe")?;
    // SAFETY: this process has one thread.
    match unsafe { fork() }.context("starting a streamer")? {
        ForkResult::Parent { child } => Ok(Some(Streamer { pid: child, ready })),
        ForkResult::Child => {
            drop(ready);
            if let Some(own) = own {
                // SAFETY: this process's copy of it; nothing here uses it.
                drop(unsafe { OwnedFd::from_raw_fd(own) });
            }
            let _ = setsid();
            let served = reporting_to(tell, daemon).and_then(|ready| serve(folder, ledger, ready));
            let code = served.unwrap_or_else(|error| {
                error!("{error:#}");
                LOST
            });
            std::process::exit(code.into());
        }
    }
}

/// What the streamer does when it serves.
fn reporting_to(tell: PipeWriter, daemon: Option<Option<&File>>) -> anyhow::Result<Ready> {
    let mut ready = Ready { waiting: vec![OwnedFd::from(tell).into()], standard_error: None };
    if let Some(log) = daemon {
        release_terminal(log.map(File::try_clone).transpose()?, &mut ready)?;
    }
    Ok(ready)
}

/// Serves the session of a ledger to its end; gives the exit code.
fn serve(mut folder: Folder, ledger: Ledger, mut ready: Ready) -> anyhow::Result<u8> {
    supervisor::raise_descriptor_limit();
    has_descriptors_for(ledger)?;
    folder.rename()?;
    let silent = ledger.silent_for();
    let found = take_up(&folder, ledger).context("opening the session's folder")?;
    for (pid, why) in &found.killed {
        print::say(format!("killed process {pid}: {why}"));
    }
    if let Some(spaces) = found.spaces {
        print::say(format!(
            "serving {} again, {:.1} s after its streamer was killed",
            ledger.session().paths().0.display(),
            silent.as_secs_f64()
        ));
        info!(spaces, "recovered");
    }
    // Closed without a byte, it says that processes were killed.
    if !found.killed.is_empty() {
        ready.waiting.clear();
    }
    let (images, work) = ledger.session().paths();
    let is_served = found.spaces.is_some();
    let restore = is_served.then(|| StreamedRestore::recovered(images, work.clone()));
    let code = supervisor::supervise_ledger(folder, ledger, true, ready, |start| match &restore {
        Some(restore) => worker_main(restore, start),
        None => {
            start.ready();
            0
        }
    })?;
    drop(restore);
    let socket = private_socket::default_socket();
    if code == 0
        && socket.is_ok_and(|socket| socket.parent().is_some_and(|of| work_folder::is_of_agent(&work, of)))
    {
        work_folder::remove_unused(&work);
    }
    Ok(if found.killed.is_empty() { code } else { LOST })
}

/// Refuses before any change if the stores' descriptors exceed this process's limit.
fn has_descriptors_for(ledger: Ledger) -> anyhow::Result<()> {
    let spaces = ledger.spaces().iter().filter(|slot| !slot.is_free()).count() as u64;
    let wanted = spaces * DESCRIPTORS + OWN_DESCRIPTORS;
    let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE).context("asking for the limit of open files")?;
    ensure!(
        limit >= wanted,
        "{spaces} address spaces wait for a streamer, and this process may open {limit} files, expected \
         {wanted}: raise RLIMIT_NOFILE and run `rewake recover` again"
    );
    Ok(())
}

fn worker_main(restore: &Arc<StreamedRestore>, start: &Start) -> u8 {
    match restore.serve_recovered(start) {
        Ok((code, None)) => code,
        Ok((_, Some(lost))) => {
            print::say(lost);
            LOST
        }
        // It is logged.
        Err(_) => LOST,
    }
}
