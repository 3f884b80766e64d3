// SPDX-License-Identifier: MIT OR Apache-2.0
//! The session of a restore whose CPU memory CRIU loads itself.

use std::path::Path;

use anyhow::Context as _;
use rewake_plugin_protocol::{ANY_TASK, Phase, SessionNote};
use tracing::warn;

use crate::ledger::{SessionSlot, SessionState, root, session_store};
use crate::supervise::parking;
use crate::supervise::supervisor::Start;

/// A session without CPU memory: an fd store for the userfaultfds of placeholders.
#[derive(Debug)]
pub(super) struct OwnSession {
    slot: &'static SessionSlot,
    note: SessionNote,
}

impl OwnSession {
    pub(super) fn open(start: &Start, work: &Path) -> anyhow::Result<Self> {
        let slot = start.ledger.session();
        slot.set_state(SessionState::Listening);
        slot.stores.make(ANY_TASK).context("making the session's fd store")?;
        let note = session_store::note(slot, &start.starter, work, Phase::Running)?;
        note.write(&root()?).context("writing the session's note")?;
        Ok(Self { slot, note })
    }

    /// Nothing is missing any more: the targets lose the store.
    pub(super) fn close(self) {
        for (_, store) in self.slot.stores.open() {
            if let Err(error) = store.empty() {
                warn!(%error, "emptying the fd store");
            }
        }
        parking::unpark_now(self.slot);
        self.slot.free();
        if let Err(error) = root().and_then(|root| Ok(self.note.remove(&root)?)) {
            warn!("removing the session's note: {error:#}");
        }
    }
}
