// SPDX-License-Identifier: MIT OR Apache-2.0
//! Opens and closes the session on the control thread: accepts the restore, and takes the fd store back at
//! the end.

use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Context as _, bail};
use rewake_plugin_protocol::SessionNote;
use tracing::warn;

use crate::fetch::Fetch;
use crate::ledger::{NO_FD, SessionSlot, SessionState};
use crate::session::Session;
use crate::session::image::Image;
use crate::session::peer::HandshakeStep;
use crate::session::socket;
use crate::supervise::parking;
use crate::sys;
use crate::watched;

/// A session that listens or has accepted its restore.
#[derive(Debug)]
pub struct OpenSession {
    /// The state that it shares with the reactors.
    pub session: Arc<Session>,
    pub(crate) image: Image,
    pub(crate) slot: &'static SessionSlot,
    pub(crate) listener: Option<UnixListener>,
    pub(crate) connection: Option<OwnedFd>,
    /// The process that fetches memory from another host, or `None` if all bytes of the image are local.
    pub(crate) fetch: Option<Rc<Fetch>>,
    /// The note that CRIU's plugins read.
    pub(crate) note: Option<SessionNote>,
    /// Whether a dead worker has handled the message in the inbox, and died before it could note that.
    pub(crate) arrived: bool,
    /// Whether what the image still lacks is fetched when the session is closed.
    pub(crate) fetches_rest: bool,
}

impl OpenSession {
    /// Returns the number of tasks that have reported.
    #[must_use]
    pub fn tasks(&self) -> u32 {
        self.slot.tasks.load(Ordering::Relaxed)
    }

    /// Returns the current step of its handshake.
    pub(crate) fn step(&self) -> HandshakeStep {
        match () {
            () if self.slot.inbox.is_midway() => HandshakeStep::Midway,
            () if self.tasks() == 0 => HandshakeStep::First,
            () => HandshakeStep::Between,
        }
    }

    /// Returns the error text for a restore that ended before its finish notice.
    pub(crate) fn cut_short(&self) -> String {
        let (reported, all) = (self.tasks(), self.image.tasks());
        format!(
            "`criu restore` ended before it reported that it had finished ({reported} of {all} tasks had \
             reported): see its log"
        )
    }

    /// Waits for the restore, accepts its connection, and checks that it restores this session's image.
    pub(crate) async fn accept(&mut self) -> anyhow::Result<()> {
        let Some(listener) = self.listener.as_ref() else { bail!("the listening socket is lost") };
        let readable = watched::watch(listener.try_clone()?.into()).context("watching the socket")?;
        let connection = loop {
            readable.readable().await?.clear_ready();
            if let Some(connection) =
                socket::accept(listener).context("accepting the restore's connection")?
            {
                break OwnedFd::from(connection);
            }
        };
        // A process of a pid namespace that is not below this one has no pid here.
        if let Ok(pid) =
            sys::peer_process(connection.as_fd()).and_then(|peer| sys::pidfd_pid(peer.as_raw_fd()))
        {
            self.image.check_opened_by(pid)?;
        }
        sys::pass_credentials(connection.as_fd()).context("asking for the restore's pids")?;
        self.slot.connection.store(connection.as_raw_fd(), Ordering::Release);
        self.slot.set_state(SessionState::Handshake);
        self.connection = Some(connection);
        self.slot.listener.store(NO_FD, Ordering::Release);
        self.listener = None;
        Ok(())
    }

    /// Closes the sockets, takes the fd store out of the processes that have it, and frees the slot.
    pub(crate) async fn close(&mut self) {
        self.slot.listener.store(NO_FD, Ordering::Release);
        self.slot.connection.store(NO_FD, Ordering::Release);
        // From here on a successor only takes the store back.
        self.slot.set_state(SessionState::Closing);
        for store in self.session.stores() {
            // This closes userfaultfds: threads that wait for a reader of their events are released.
            if let Err(error) = store.empty() {
                warn!(%error, "emptying an fd store");
            }
        }
        parking::close_former(self.slot);
        self.slot.close_own_store();
        parking::unpark(self.slot).await;
        self.slot.end(if self.fetches_rest { SessionState::Completing } else { SessionState::Free });
    }
}

/// Takes the session's store back from processes, where a dead worker has only begun to. A thread does it,
/// because it may take seconds. `notes` has the sessions' notes, and `folder` in it is this streamer's.
pub(crate) fn finish_closing(slot: &'static SessionSlot, notes: PathBuf, folder: String) {
    std::thread::spawn(move || {
        parking::close_former(slot);
        slot.close_own_store();
        parking::unpark_now(slot);
        let left = SessionNote::all(&notes).map(|all| all.notes).unwrap_or_default();
        for note in left.iter().filter(|note| note.folder == folder) {
            if let Err(error) = note.remove(&notes) {
                warn!(%error, "removing the session's note");
            }
        }
        slot.free();
    });
}

impl Drop for OpenSession {
    /// Removes the socket of a session that no restore has connected to. A request to stop drops such a
    /// session without [`OpenSession::close`]. A killed worker drops nothing: its successor needs the socket.
    fn drop(&mut self) {
        if self.listener.take().is_none() {
            return;
        }
        let (_, work): (PathBuf, PathBuf) = self.slot.paths();
        if let Err(error) = socket::remove(&work) {
            warn!(%error, "removing the socket in {}", work.display());
        }
    }
}
