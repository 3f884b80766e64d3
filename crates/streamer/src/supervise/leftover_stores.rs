// SPDX-License-Identifier: MIT OR Apache-2.0
//! Fd stores of sessions that are over, which processes keep because they were frozen or traced at the end. A
//! file in the folder of the session's starter names each, in the place of the ledger, until the descriptors
//! are taken back: an agent looks for them each minute, and would map a ledger each time.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use tracing::warn;

use crate::ledger::{Folder, SessionSlot};
use crate::supervise::store_id::{StoreId, cookie_of};
use crate::supervise::{parking, processes};

/// An fd store that processes keep.
#[derive(Debug, PartialEq, Eq)]
pub struct LeftoverStore {
    /// With their cookies.
    pub ids: Vec<StoreId>,
    /// The session's image directory.
    pub images: PathBuf,
}

impl LeftoverStore {
    fn of(slot: &SessionSlot) -> Option<Self> {
        let of = |inode: u64| {
            let cookie = |pid: i32| cookie_of(pid, processes::number_of_socket(pid, inode)?);
            let cookie = processes::all().find_map(cookie)?;
            Some(StoreId { inode, cookie: Some(cookie) })
        };
        let ids: Vec<StoreId> = slot.stores.inodes().into_iter().filter_map(of).collect();
        (!ids.is_empty()).then(|| Self { ids, images: slot.paths().0 })
    }

    fn text(&self) -> Vec<u8> {
        let ids: Vec<String> = self.ids.iter().map(ToString::to_string).collect();
        [ids.join(" ").as_bytes(), b"\n", self.images.as_os_str().as_bytes()].concat()
    }

    fn parse(text: &[u8]) -> Option<Self> {
        let end = text.iter().position(|byte| *byte == b'\n')?;
        let ids = str::from_utf8(&text[..end]).ok()?.split(' ');
        let ids = ids.map(|id| StoreId::parse(id).filter(|id| id.cookie.is_some()));
        Some(Self { ids: ids.collect::<Option<_>>()?, images: OsStr::from_bytes(&text[end + 1..]).into() })
    }

    /// The processes that keep it.
    #[must_use]
    pub fn holders(&self) -> Vec<i32> {
        processes::all().filter(|pid| self.is_in(*pid)).collect()
    }

    fn is_in(&self, pid: i32) -> bool {
        self.ids.iter().any(|id| id.number_in(pid).is_some())
    }
}

/// Ends the use of a folder whose session is over: it stays as long as processes keep the session's store.
pub fn leave(folder: Folder, slot: &SessionSlot) {
    match LeftoverStore::of(slot) {
        None => folder.remove(),
        Some(left) => {
            if let Err(error) = folder.leave(&left.text()) {
                warn!("processes keep a descriptor of a session that cannot be noted: {error:#}");
            }
        }
    }
}

/// All stores that processes may keep, with their folders.
///
/// # Errors
/// The directory of the folders cannot be read.
pub fn all() -> anyhow::Result<Vec<(PathBuf, LeftoverStore)>> {
    let read = |folder: PathBuf| {
        let left = LeftoverStore::parse(&fs::read(folder.join(Folder::LEFT)).ok()?)?;
        Some((folder, left))
    };
    Ok(Folder::all_left()?.into_iter().filter_map(read).collect())
}

/// Takes back what can be taken back by now. Returns a line for each session of which a process still keeps
/// something. It may take seconds.
///
/// # Errors
/// The directory of the folders cannot be read, or no process can be started.
pub fn take_back() -> anyhow::Result<Vec<String>> {
    take_back_if(all()?, |store| !store.holders().is_empty())
}

/// [`take_back`], of the sessions of which a process of the tree below `root` keeps something: CRIU could not
/// dump it. A user whose folder of sessions cannot be read has restored nothing.
///
/// # Errors
/// No process can be started.
pub fn take_back_from(root: i32) -> anyhow::Result<Vec<String>> {
    let mut tree = processes::descendants(root);
    tree.insert(root);
    let of_tree = |store: &LeftoverStore| tree.iter().any(|pid| store.is_in(*pid));
    take_back_if(all().unwrap_or_default(), of_tree)
}

fn take_back_if(
    stores: Vec<(PathBuf, LeftoverStore)>,
    is_kept: impl Fn(&LeftoverStore) -> bool,
) -> anyhow::Result<Vec<String>> {
    let (kept, others): (Vec<_>, Vec<_>) = stores.into_iter().partition(|(_, store)| is_kept(store));
    let forgotten = others.iter().filter(|(_, store)| store.holders().is_empty());
    forgotten.for_each(|(folder, _)| remove(folder));
    let ids = kept.iter().flat_map(|(_, store)| store.ids.iter().map(|id| (*id, &*store.images)));
    let stores: Vec<_> = ids.collect();
    let mut outcomes = parking::unpark_by(&stores)?.into_iter();
    let mut lines = Vec::new();
    for (folder, store) in &kept {
        match outcomes.by_ref().take(store.ids.len()).fold(None, Option::or) {
            None => remove(folder),
            // Of all holders of a store, only a process that still makes the store count keeps it: a frozen
            // process elsewhere does not keep a tree from being dumped.
            Some(line) if is_kept(store) => lines.push(line),
            Some(_) => {}
        }
    }
    Ok(lines)
}

fn remove(folder: &Path) {
    match fs::remove_dir_all(folder) {
        // Another process was quicker.
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            warn!(%error, "removing {}", folder.display());
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;
    use std::os::unix::ffi::OsStringExt as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_note_keeps_every_byte_of_a_path() {
        let images = PathBuf::from(std::ffi::OsString::from_vec(b"/m\xe9\nmoire".to_vec()));
        let left = LeftoverStore { ids: vec![StoreId { inode: 7, cookie: Some(u64::MAX) }; 2], images };
        assert_eq!(LeftoverStore::parse(&left.text()), Some(left));
        for text in [&b""[..], b"7\n/x", b"7-x\n/x", b"7-8"] {
            assert_eq!(LeftoverStore::parse(text), None);
        }
    }

    #[test]
    fn another_socket_with_the_inode_s_number_is_not_taken() {
        let (one, _other) = UnixStream::pair().unwrap();
        let pid = std::process::id().cast_signed();
        let sockets = rewake_plugin_protocol::sockets_of(pid).unwrap();
        let (_, inode) = sockets.into_iter().find(|(number, _)| *number == one.as_raw_fd()).unwrap();
        let cookie = crate::sys::socket_cookie(&one).unwrap();
        let number_of = |cookie| StoreId { inode, cookie }.number_in(pid);
        assert_eq!([None, Some(cookie)].map(number_of), [Some(one.as_raw_fd()); 2]);
        assert_eq!(number_of(Some(cookie + 1)), None);
    }
}
