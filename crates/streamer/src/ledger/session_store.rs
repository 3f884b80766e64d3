// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a session keeps in its [fd store](crate::ledger::fd_store) from the beginning, and the note by which CRIU's plugins
//! find it: a plugin parks before a target runs, and a dump waits for missing memory.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, IntoRawFd as _};
use std::path::Path;
use std::sync::atomic::Ordering;

use anyhow::Context as _;
use rewake_plugin_protocol::{FileId, Phase, ProcessId, SessionNote, Store};

use crate::ledger::SessionSlot;
use crate::ledger::fd_store::{Entry, FdStore, Kind, MAX_DESCRIPTORS, peek_all};
use crate::session::image::Image;

/// A fresh fd store, in the ledger.
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

/// The same with an image's plan and files.
///
/// # Errors
/// As of [`make`].
pub fn of_image(slot: &SessionSlot, image: &Image) -> io::Result<FdStore> {
    let store = make(slot)?;
    let (plan, files) = image.seal()?;
    store.put(Entry { kind: Kind::Plan, index: 0, life: 0 }, &[plan.as_raw_fd()])?;
    for (number, some) in files.chunks(MAX_DESCRIPTORS).enumerate() {
        let numbers: Vec<i32> = some.iter().map(BorrowedFd::as_raw_fd).collect();
        let index = u32::try_from(number * MAX_DESCRIPTORS).map_err(io::Error::other)?;
        store.put(Entry { kind: Kind::Files, index, life: 0 }, &numbers)?;
    }
    Ok(store)
}

/// The image that a session was opened with: its plan and its files, whatever is at their path now.
///
/// # Errors
/// The store has no plan, or a file changed.
pub fn image(store: &FdStore) -> anyhow::Result<Image> {
    let stored = peek_all(store.descriptor()).context("reading the session's fd store")?;
    let (mut plan, mut files) = (None, BTreeMap::new());
    for (entry, descriptors) in stored {
        match entry.kind {
            Kind::Plan => plan = descriptors.into_iter().next(),
            Kind::Files => drop(files.insert(entry.index, descriptors)),
            _ => {}
        }
    }
    let plan = plan.context("the session's fd store has no plan")?;
    Image::unseal(plan.as_fd(), files.into_values().flatten().collect())
}

/// What CRIU's plugins are to know of a session.
///
/// # Errors
/// The work directory cannot be looked at.
pub fn note(
    slot: &SessionSlot,
    store: &FdStore,
    starter: ProcessId,
    work: &Path,
    phase: Phase,
) -> io::Result<SessionNote> {
    let number = slot.store.load(Ordering::Acquire);
    let store = Store { number, inode: store.inode() };
    Ok(SessionNote { number: slot.number(), starter, work: FileId::of(work)?, store, phase })
}
