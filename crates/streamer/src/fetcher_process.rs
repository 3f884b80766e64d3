// SPDX-License-Identifier: MIT OR Apache-2.0
//! Starts a fetcher, for a session or for the node agent.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

use anyhow::Context as _;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use rewake_fetcher::channel;
use rewake_fetcher::plan::{FetchPlan, PagePeer};
use rewake_fetcher::process::COMMAND;

use crate::last_words::LastWords;
use crate::session::image::Image;
use crate::session::image::remote_memory::RemoteMemory;
use crate::sys;
use rewake_process::time_slice;

/// The descriptors of a fetcher that outlive it.
#[derive(Debug)]
pub(crate) struct FetchDescriptors {
    pub(crate) plan: OwnedFd,
    pub(crate) presence: OwnedFd,
    /// The files that it writes.
    pub(crate) files: Vec<OwnedFd>,
    /// What it says when it panics: a daemon's fetcher must not keep the pipe of who started the daemon.
    pub(crate) words: LastWords,
}

impl FetchDescriptors {
    /// Opens what a fetcher of this plan needs, which the file `memory` has.
    ///
    /// # Errors
    /// This user may not write to a file of the image.
    pub(crate) fn of(
        image: &Image,
        remote: &RemoteMemory,
        memory: File,
        plan: &FetchPlan,
    ) -> anyhow::Result<Self> {
        let presence = remote.presence.try_clone().context("the presence map")?;
        // The agent's fetcher writes into the files of the node's cache.
        let files = match plan.peer {
            PagePeer::Agent(_) => Vec::new(),
            _ => image.files_to_write().context("opening the files for what arrives")?,
        };
        let words = LastWords::new().context("a memory file for the fetcher")?;
        Ok(Self { plan: memory.into(), presence, files, words })
    }
}

/// Starts a fetcher. Returns it, and the socket to it.
///
/// # Errors
/// EAGAIN, ENOMEM, EMFILE; or it ends at once.
pub(crate) fn start(
    again: bool,
    files: &FetchDescriptors,
    connected: Option<BorrowedFd<'_>>,
    readers: &[OwnedFd],
) -> anyhow::Result<(Child, OwnedFd)> {
    let (ours, its) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
        .context("making a socket for the fetcher")?;
    let mut command = Command::new(sys::program()?);
    command.arg(COMMAND).env_clear().process_group(0);
    command.stdin(Stdio::from(its)).stdout(Stdio::null()).stderr(files.words.writer()?);
    time_slice::give_short_time_slices(&mut command);
    let child = command.spawn().context("starting the fetcher")?;
    let sent =
        channel::send_start(ours.as_fd(), again, [files.plan.as_fd(), files.presence.as_fd()], connected)
            .and_then(|()| channel::send_files(ours.as_fd(), &borrowed(&files.files)))
            .and_then(|()| channel::send_readers(ours.as_fd(), &borrowed(readers)));
    started(child, sent).map(|child| (child, ours))
}

/// Takes the status of a fetcher that does not get its orders: no process waits for it later.
fn started(mut child: Child, sent: io::Result<()>) -> anyhow::Result<Child> {
    if let Err(error) = sent {
        let _ = child.kill();
        let _ = child.wait();
        return Err(error).context("starting the fetcher");
    }
    Ok(child)
}

pub(crate) fn borrowed(descriptors: &[OwnedFd]) -> Vec<BorrowedFd<'_>> {
    descriptors.iter().map(|descriptor| descriptor.as_fd()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fetcher_without_orders_leaves_no_process() {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        let proc = format!("/proc/{}", child.id());
        let error = started(child, Err(io::ErrorKind::BrokenPipe.into())).unwrap_err();
        assert_eq!(format!("{error:#}"), "starting the fetcher: broken pipe");
        assert!(!std::path::Path::new(&proc).exists());
    }
}
