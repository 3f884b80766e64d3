// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes the session's [fd store](crate::ledger::fd_store), with the image's plan and files, and the session's
//! note.
//!
//! CRIU's plugins find the session by its note: one parks before a target runs, and a dump waits for missing
//! memory.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, IntoRawFd as _};
use std::path::Path;
use std::sync::atomic::Ordering;

use anyhow::Context as _;
use rewake_plugin_protocol::{FileId, Phase, SessionNote, Store, own_pid_namespace};

use crate::ledger::fd_store::{EntryKind, FdStore, MAX_DESCRIPTORS, StoreEntry, peek_all};
use crate::ledger::{SessionSlot, Starter};
use crate::session::image::Image;
use crate::session::image::remote_memory::RemoteMemory;

/// Makes an empty fd store, and puts its descriptors into the session's slot.
///
/// # Errors
/// EMFILE, ENOMEM.
pub fn make(slot: &SessionSlot) -> io::Result<FdStore> {
    let (store, writer) = FdStore::create()?;
    let [store, writer] = [store, writer].map(|fd| fd.into_raw_fd());
    slot.store.store(store, Ordering::Release);
    slot.writer.store(writer, Ordering::Release);
    let store = FdStore::of(store, writer)?;
    slot.inode.store(store.inode(), Ordering::Release);
    Ok(store)
}

/// Makes the session's fd store, with an image's plan and files.
///
/// # Errors
/// As for [`make`].
pub fn of_image(slot: &SessionSlot, image: &Image) -> io::Result<FdStore> {
    let store = make(slot)?;
    let (plan, files) = image.seal()?;
    store.put(StoreEntry { kind: EntryKind::Plan, index: 0, life: 0 }, &[plan.as_raw_fd()])?;
    for (number, some) in files.chunks(MAX_DESCRIPTORS).enumerate() {
        let numbers: Vec<i32> = some.iter().map(BorrowedFd::as_raw_fd).collect();
        let index = u32::try_from(number * MAX_DESCRIPTORS).map_err(io::Error::other)?;
        store.put(StoreEntry { kind: EntryKind::Files, index, life: 0 }, &numbers)?;
    }
    Ok(store)
}

/// Returns the image with which a session was opened: its own plan and files, even if their paths have others
/// now.
///
/// # Errors
/// The store has no plan, or a file changed.
pub fn image(store: &FdStore) -> anyhow::Result<Image> {
    let stored = peek_all(store.descriptor()).context("reading the session's fd store")?;
    let (mut plan, mut files, mut remote) = (None, BTreeMap::new(), None);
    for (entry, descriptors) in stored {
        match entry.kind {
            EntryKind::Plan => plan = descriptors.into_iter().next(),
            EntryKind::Files => drop(files.insert(entry.index, descriptors)),
            EntryKind::Remote => remote = Some(descriptors),
            _ => {}
        }
    }
    let plan = plan.context("the session's fd store has no plan")?;
    Image::unseal_with(plan.as_fd(), files.into_values().flatten().collect(), |draft| {
        let mut remote = remote.unwrap_or_default().into_iter().skip(1);
        let presence = remote.next().context("the session's fd store lacks the presence map")?;
        RemoteMemory::inherit(presence, remote.next(), draft)
    })
}

/// Makes the note of a session for CRIU's plugins.
///
/// # Errors
/// The work directory cannot be examined.
pub fn note(
    slot: &SessionSlot,
    store: &FdStore,
    starter: &Starter,
    work: &Path,
    phase: Phase,
) -> io::Result<SessionNote> {
    let number = slot.store.load(Ordering::Acquire);
    let store = Store { number, inode: store.inode() };
    let (folder, starter) = (starter.folder.clone(), starter.process);
    let pid_namespace = Some(own_pid_namespace()?);
    Ok(SessionNote { folder, starter, pid_namespace, work: FileId::of(work)?, store, phase })
}
