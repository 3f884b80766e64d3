// SPDX-License-Identifier: MIT OR Apache-2.0
//! `-d`: daemons in the background.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::Context as _;
use nix::unistd::ForkResult;

/// Becomes a background process. In the parent returns the exit code, once the daemon is ready or the child
/// has failed, and the pidfile is written; in the child returns none.
///
/// # Errors
/// No process can be made, or the pidfile exists already or cannot be written.
pub(super) fn background(pidfile: Option<&Path>, notify: &mut Vec<OwnedFd>) -> anyhow::Result<Option<u8>> {
    let (mut ready, writer) = std::io::pipe().context("making a pipe")?;
    // SAFETY: this process has one thread.
    match unsafe { nix::unistd::fork() }.context("going to the background")? {
        ForkResult::Child => {
            nix::unistd::setsid().context("leaving the session")?;
            notify.push(writer.into());
            Ok(None)
        }
        ForkResult::Parent { child } => {
            drop(writer);
            if ready.read(&mut [1]).unwrap_or(0) != 1 {
                return Ok(Some(1)); // the child has said why
            }
            if let Some(path) = pidfile {
                let file = File::create_new(path).and_then(|mut file| write!(file, "{child}"));
                file.with_context(|| format!("--pidfile {}", path.display()))?;
            }
            Ok(Some(0))
        }
    }
}
