// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keeps a session's descriptors in flight in the queue of a socket, as CRIU's own fdstore does.
//!
//! The store is one end of a SOCK_SEQPACKET pair. Each message in its queue carries one [`StoreEntry`] and
//! the descriptors that belong to it (SCM_RIGHTS). The kernel keeps these files open for as long as any
//! process has the store open.
//!
//! A session has a store for each restored task, which is *parked*: the task has it
//! (`crate::supervise::parking`), and a forked child inherits it. So a userfaultfd stays open as long as the
//! memory exists: when every process of the streamer is killed at once, page faults and events wait in the
//! kernel, and `rewake recover` takes the userfaultfds out of the stores. Targets are hostile, and receive
//! what is in their store, so a session puts nothing there that a worker or `recover` can find elsewhere, and
//! no task has the store of another. The streamer's *own* store has the rest for the next worker: the plan,
//! the image's files, the fetcher.
//!
//! The other end of a pair, which puts entries in, never leaves the streamer's processes: what is in a store
//! was put there by one of them. A target can only take entries out.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, Shutdown, SockFlag, SockType, getsockopt,
    recv, recvmsg, sendmsg, setsockopt, shutdown, socketpair, sockopt,
};
use nix::sys::stat::fstat;

use crate::ledger::MAX_SPACES;
use crate::sys;

/// Descriptors in one message. It is small, because a rotation of the queue needs as many free ones.
pub const MAX_DESCRIPTORS: usize = 8;
/// Descriptors that a message can carry (`SCM_MAX_FD`, `include/net/scm.h`).
const MOST_RECEIVED: usize = 253;
/// Bytes that the queue may hold, as the kernel counts them: about 1 KiB a message, for as many address
/// spaces as a ledger has.
const QUEUE: usize = 16 << 20;
/// Bytes of the queue that are left after a put. A rotation needs room for a mark, and for an entry that is
/// both at the head and at the tail; several reactors may put at once, after one look. A message uses less
/// than 1 KiB.
const RESERVE: usize = 32 << 10;
/// Entries of a store at most: of all address spaces, and marks and others.
const MOST_ENTRIES: usize = 2 * MAX_SPACES + 64;
/// Bytes of an entry: kind, index, life.
const ENTRY: usize = 16;

/// The kind of a message in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum EntryKind {
    /// The userfaultfd of an address space. `index` is its slot in the ledger.
    Space = 2,
    /// The session's plan, in a sealed file.
    Plan = 3,
    /// Pages files, in the plan's order. `index` is the number of the first file.
    Files = 4,
    /// The userfaultfd of a process's placeholders.
    Placeholders = 5,
    /// The end of one rotation of the queue, without descriptors. `index` counts rotations, `life` is the
    /// pid.
    Mark = 6,
    /// What a fetcher works with: its plan, the presence map, and the cache file if there is one.
    Remote = 7,
    /// The socket to a fetcher. `index` counts them.
    Fetcher = 8,
    /// A duplicate of the connection of the fetcher with the same `index`.
    Peer = 9,
}

impl EntryKind {
    const ALL: [Self; 8] = [
        Self::Space,
        Self::Plan,
        Self::Files,
        Self::Placeholders,
        Self::Mark,
        Self::Remote,
        Self::Fetcher,
        Self::Peer,
    ];
}

/// Names the descriptors that a message carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreEntry {
    /// The kind of the descriptors.
    pub kind: EntryKind,
    /// Which entry of that kind this is.
    pub index: u32,
    /// Distinguishes two users of one ledger slot: [`SpaceSlot::life`](crate::ledger::SpaceSlot::life).
    pub life: u64,
}

impl StoreEntry {
    fn encode(self) -> [u8; ENTRY] {
        let mut bytes = [0; ENTRY];
        bytes[..4].copy_from_slice(&(self.kind as u32).to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.index.to_ne_bytes());
        bytes[8..].copy_from_slice(&self.life.to_ne_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (kind, rest) = bytes.split_first_chunk()?;
        let (index, rest) = rest.split_first_chunk()?;
        let kind = u32::from_ne_bytes(*kind);
        Some(Self {
            kind: EntryKind::ALL.into_iter().find(|known| *known as u32 == kind)?,
            index: u32::from_ne_bytes(*index),
            life: u64::from_ne_bytes(rest.try_into().ok()?),
        })
    }
}

/// An entry with copies of its descriptors.
pub type Stored = (StoreEntry, Vec<OwnedFd>);

/// An fd store. The ledger owns both descriptors.
#[derive(Debug)]
pub struct FdStore {
    store: RawFd,
    writer: RawFd,
    /// The socket's inode, which identifies a target's copy in `/proc/PID/fd`.
    inode: u64,
    spare: Arc<Spare>,
    /// True if another put may find no room.
    full: AtomicBool,
    /// True if an entry may be out of date.
    stale: AtomicBool,
}

/// What all stores of a session need for the rotation of a queue. One queue at a time is rotated.
#[derive(Debug, Default)]
struct Spare {
    rotation: Mutex<Rotation>,
    /// True if descriptors are missing. Then no fork is read, because its userfaultfd would take another one.
    is_short: AtomicBool,
}

#[derive(Debug, Default)]
struct Rotation {
    /// How many rotations there were.
    count: u32,
    /// Descriptors without a use. A rotation closes them, so that it finds free numbers even when forked
    /// children have taken all others.
    descriptors: Vec<EventFd>,
}

impl Spare {
    fn rotation(&self) -> MutexGuard<'_, Rotation> {
        self.rotation.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the descriptors that are missing. Returns false if this process has too many open ones.
    fn fill(&self, rotation: &mut Rotation) -> bool {
        while rotation.descriptors.len() < MAX_DESCRIPTORS {
            let Ok(spare) = EventFd::from_flags(EfdFlags::EFD_CLOEXEC) else { break };
            rotation.descriptors.push(spare);
        }
        let is_short = rotation.descriptors.len() < MAX_DESCRIPTORS;
        self.is_short.store(is_short, Ordering::Release);
        !is_short
    }
}

impl FdStore {
    /// Makes an empty store. Returns the store and the writer.
    ///
    /// # Errors
    /// EMFILE, ENOMEM.
    pub fn create() -> io::Result<(OwnedFd, OwnedFd)> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let (store, writer) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
        // Without CAP_NET_ADMIN the queue holds some hundred entries, and a put fails when it is full.
        let _ = setsockopt(&writer, sockopt::SndBufForce, &QUEUE);
        // The target's end can send as well, to a queue that no process reads.
        shutdown(writer.as_raw_fd(), Shutdown::Read)?;
        Ok((store, writer))
    }

    /// Returns the store of these descriptors. The caller keeps them open as long as the store is used.
    ///
    /// # Errors
    /// EBADF: the store is no open file.
    pub fn of(store: RawFd, writer: RawFd) -> io::Result<Self> {
        if store < 0 || writer < 0 {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        }
        // SAFETY: the caller keeps it open, and it is borrowed for this call only.
        let inode = fstat(unsafe { BorrowedFd::borrow_raw(store) })?.st_ino;
        Ok(Self { store, writer, inode, spare: Arc::default(), full: true.into(), stale: true.into() })
    }

    /// Has this store use the spare descriptors of another store of the session.
    pub(crate) fn sharing_spare_of(self, other: &Self) -> Self {
        Self { spare: Arc::clone(&other.spare), ..self }
    }

    /// Returns the socket's inode.
    #[must_use]
    pub fn inode(&self) -> u64 {
        self.inode
    }

    /// Returns the store's descriptor, of which a target gets a copy.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: open as long as this is used, by the contract of `of`.
        unsafe { BorrowedFd::borrow_raw(self.store) }
    }

    /// Returns true if a [`FdStore::put`] finds room now.
    ///
    /// It makes a system call only after a put that used the last room, as reactors call it before each read.
    ///
    /// # Errors
    /// The kernel's.
    pub fn has_room(&self) -> io::Result<bool> {
        if !self.may_be_full() {
            return Ok(true);
        }
        // While a queue is rotated, it has no descriptor to spare.
        self.spare.rotation.try_lock().map_or(Ok(false), |mut rotation| self.measure(&mut rotation))
    }

    /// Measures the room, and notes whether a put would find some.
    fn measure(&self, rotation: &mut Rotation) -> io::Result<bool> {
        // SAFETY: open as long as this is used, by the contract of `of`.
        let writer = unsafe { BorrowedFd::borrow_raw(self.writer) };
        let has_room = sys::unread_bytes(writer)? + RESERVE < getsockopt(&writer, sockopt::SndBuf)?
            && self.spare.fill(rotation);
        self.full.store(!has_room, Ordering::Release);
        Ok(has_room)
    }

    /// Puts copies of at most [`MAX_DESCRIPTORS`] descriptors into the store.
    ///
    /// The system call that puts them is the first one unless the queue may be full, because a forked child
    /// loses its memory when all of the streamer is killed before that call ([`crate::cpu`]). A rotation in
    /// another thread does not mind: what is put comes after the rotation's mark.
    ///
    /// # Errors
    /// EAGAIN: the queue is full, or too few descriptors are free. ETOOMANYREFS: this user has too many
    /// descriptors in flight (unix(7)).
    pub fn put(&self, entry: StoreEntry, descriptors: &[RawFd]) -> io::Result<()> {
        if self.may_be_full() && !self.measure(&mut self.spare.rotation())? {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
        send(self.writer, entry, descriptors)?;
        match self.spare.rotation.try_lock() {
            Ok(mut rotation) => self.measure(&mut rotation).map(drop),
            // The next put measures.
            Err(_) => {
                self.full.store(true, Ordering::Release);
                Ok(())
            }
        }
    }

    fn may_be_full(&self) -> bool {
        self.full.load(Ordering::Acquire) || self.spare.is_short.load(Ordering::Acquire)
    }

    /// Notes that an entry is out of date: [`FdStore::retain_if_stale`] removes it.
    pub fn note_stale(&self) {
        self.stale.store(true, Ordering::Release);
    }

    /// [`FdStore::retain`], unless no entry is out of date.
    ///
    /// # Errors
    /// As for `retain`; then it may be tried again.
    pub fn retain_if_stale(&self, keep: impl Fn(StoreEntry) -> bool) -> io::Result<()> {
        if !self.stale.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        self.retain(keep).inspect_err(|_| self.note_stale())
    }

    /// Removes the entries for which `keep` is false. Their descriptors close when no other copy is left.
    ///
    /// It puts each other entry in again before it takes the entry out, so the queue holds it at every
    /// moment.
    ///
    /// # Errors
    /// The kernel refused descriptors. The other entries stay as they were, and it may be tried again.
    pub fn retain(&self, keep: impl Fn(StoreEntry) -> bool) -> io::Result<()> {
        let mut rotation = self.spare.rotation();
        rotation.count = rotation.count.wrapping_add(1);
        rotation.descriptors.clear();
        let rotated = self.rotate(rotation.count, keep);
        self.spare.fill(&mut rotation);
        rotated
    }

    fn rotate(&self, count: u32, keep: impl Fn(StoreEntry) -> bool) -> io::Result<()> {
        // A CRIU that was killed while it read the queue leaves an offset. A worker that was killed here
        // leaves a mark.
        sys::set_peek_offset(self.descriptor(), None)?;
        let mark = StoreEntry { kind: EntryKind::Mark, index: count, life: std::process::id().into() };
        send(self.writer, mark, &[])?;
        // A target that takes out the mark would have this go round for ever.
        for _ in 0..MOST_ENTRIES {
            let Some(entry) = head(self.store)? else { return Ok(()) };
            if entry.kind != EntryKind::Mark && keep(entry) {
                let Some((entry, descriptors)) = receive(self.store, MsgFlags::MSG_PEEK)? else {
                    return Ok(());
                };
                let numbers: Vec<RawFd> = descriptors.iter().map(OwnedFd::as_raw_fd).collect();
                send(self.writer, entry, &numbers)?;
            }
            // This call has no room for descriptors, so the kernel closes the message's descriptors.
            recv(self.store, &mut [0; ENTRY], MsgFlags::MSG_DONTWAIT)?;
            if entry == mark {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Removes all entries: then only this streamer holds the session's descriptors.
    ///
    /// # Errors
    /// The kernel's.
    pub fn empty(&self) -> io::Result<()> {
        let _rotation = self.spare.rotation();
        empty(self.descriptor())
    }
}

/// Removes all entries of a store that no other thread changes.
///
/// # Errors
/// The kernel's.
pub fn empty(store: BorrowedFd<'_>) -> io::Result<()> {
    sys::set_peek_offset(store, None)?;
    while head(store.as_raw_fd())?.is_some() {
        recv(store.as_raw_fd(), &mut [0; ENTRY], MsgFlags::MSG_DONTWAIT)?;
    }
    Ok(())
}

/// Returns copies of all entries in order, and leaves the store unchanged.
///
/// An entry occurs twice if a process was killed while it moved the entry from the head to the tail.
///
/// # Errors
/// This process has too many open descriptors, or the socket is no store.
pub fn peek_all(store: BorrowedFd<'_>) -> io::Result<Vec<Stored>> {
    sys::set_peek_offset(store, Some(0))?;
    let mut found = Vec::new();
    let done = loop {
        match receive(store.as_raw_fd(), MsgFlags::MSG_PEEK) {
            Ok(Some(stored)) => found.push(stored),
            Ok(None) => break Ok(found),
            Err(error) => break Err(error),
        }
    };
    sys::set_peek_offset(store, None)?;
    done
}

fn send(writer: RawFd, entry: StoreEntry, descriptors: &[RawFd]) -> io::Result<()> {
    let bytes = entry.encode();
    let rights = [ControlMessage::ScmRights(descriptors)];
    let rights = if descriptors.is_empty() { &[][..] } else { &rights[..] };
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    sendmsg::<()>(writer, &[IoSlice::new(&bytes)], rights, flags, None)?;
    Ok(())
}

/// Returns the first entry without its descriptors, or `None` if the queue is empty.
fn head(store: RawFd) -> io::Result<Option<StoreEntry>> {
    let mut bytes = [0; ENTRY];
    match recv(store, &mut bytes, MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT) {
        Ok(ENTRY) => StoreEntry::decode(&bytes).map(Some).ok_or_else(foreign_message),
        Ok(0) | Err(Errno::EAGAIN) => Ok(None),
        Ok(_) => Err(foreign_message()),
        Err(error) => Err(error.into()),
    }
}

fn receive(store: RawFd, how: MsgFlags) -> io::Result<Option<Stored>> {
    let mut bytes = [0; ENTRY];
    let mut space = nix::cmsg_space!([RawFd; MOST_RECEIVED]);
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let flags = how | MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let message = match recvmsg::<()>(store, &mut slices, Some(&mut space), flags) {
        Err(Errno::EAGAIN) => return Ok(None),
        message => message?,
    };
    let (length, flags) = (message.bytes, message.flags);
    let mut descriptors = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(numbers) = control {
            // SAFETY: the kernel has just made them for this message: open, and nothing owns them.
            descriptors.extend(numbers.into_iter().map(|number| unsafe { sys::take_over(number) }));
        }
    }
    if length == 0 && descriptors.is_empty() {
        return Ok(None);
    }
    if flags.intersects(MsgFlags::MSG_CTRUNC | MsgFlags::MSG_TRUNC) {
        return Err(io::Error::from_raw_os_error(libc::EMFILE));
    }
    let entry = StoreEntry::decode(&bytes[..length]).ok_or_else(foreign_message)?;
    Ok(Some((entry, descriptors)))
}

fn foreign_message() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the fd store holds a message that this program did not write")
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;

    fn store() -> (FdStore, OwnedFd, OwnedFd) {
        let (store, writer) = FdStore::create().unwrap();
        (FdStore::of(store.as_raw_fd(), writer.as_raw_fd()).unwrap(), store, writer)
    }

    fn file() -> OwnedFd {
        memfd_create(c"stored", MFdFlags::MFD_CLOEXEC).unwrap()
    }

    fn inode(file: &OwnedFd) -> u64 {
        fstat(file).unwrap().st_ino
    }

    fn space(index: u32) -> StoreEntry {
        StoreEntry { kind: EntryKind::Space, index, life: 7 }
    }

    /// Kinds and indices, and the inodes of all descriptors.
    fn held(store: &OwnedFd) -> Vec<(EntryKind, u32, Vec<u64>)> {
        let all = peek_all(store.as_fd()).unwrap();
        let inodes = |files: &Vec<OwnedFd>| files.iter().map(inode).collect();
        all.iter().map(|(entry, files)| (entry.kind, entry.index, inodes(files))).collect()
    }

    #[test]
    fn entries_are_found_in_order_again_and_again() {
        let (store, reading, _writer) = store();
        let (one, two) = (file(), file());
        store.put(space(1), &[one.as_raw_fd(), two.as_raw_fd()]).unwrap();
        store.put(space(2), &[two.as_raw_fd()]).unwrap();
        let expected =
            [(EntryKind::Space, 1, vec![inode(&one), inode(&two)]), (EntryKind::Space, 2, vec![inode(&two)])];
        assert_eq!(held(&reading), expected);
        assert_eq!(held(&reading), expected);
    }

    #[test]
    fn the_store_keeps_files_open_when_its_writer_is_gone_and_takes_none_from_its_holder() {
        let (store, reading, writer) = store();
        let (mut far, near) = std::io::pipe().unwrap();
        store.put(space(1), &[near.as_raw_fd()]).unwrap();
        drop(near);
        let refused = send(reading.as_raw_fd(), space(2), &[file().as_raw_fd()]).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EPIPE), "the holder sends");
        drop(writer);
        assert_eq!(held(&reading).len(), 1);
        assert!(send(reading.as_raw_fd(), space(2), &[file().as_raw_fd()]).is_err());
        assert_eq!(held(&reading).len(), 1);
        // The pipe has a writer for as long as the store is open, and none afterwards.
        drop(reading);
        assert_eq!(std::io::Read::read(&mut far, &mut [0]).unwrap(), 0);
    }

    #[test]
    fn entries_not_kept_are_closed_and_the_others_stay_in_order() {
        let (store, reading, _writer) = store();
        let (mut far, near) = std::io::pipe().unwrap();
        store.put(space(1), &[near.as_raw_fd()]).unwrap();
        store.put(space(2), &[file().as_raw_fd()]).unwrap();
        store.put(space(3), &[file().as_raw_fd()]).unwrap();
        drop(near);
        store.retain(|entry| entry != space(1)).unwrap();
        let order: Vec<(EntryKind, u32)> =
            held(&reading).iter().map(|(kind, index, _)| (*kind, *index)).collect();
        assert_eq!(order, [(EntryKind::Space, 2), (EntryKind::Space, 3)]);
        assert_eq!(std::io::Read::read(&mut far, &mut [0]).unwrap(), 0, "its file is closed");
        store.empty().unwrap();
        assert_eq!(held(&reading), []);
    }

    #[test]
    fn a_full_store_refuses_a_put_and_still_removes_entries() {
        let (store, reading, writer) = store();
        setsockopt(&writer, sockopt::SndBuf, &(32 << 10)).unwrap();
        let (mut far, near) = std::io::pipe().unwrap();
        store.put(space(0), &[near.as_raw_fd()]).unwrap();
        drop(near);
        let file = file();
        let full = (1..1000).find_map(|index| store.put(space(index), &[file.as_raw_fd()]).err());
        assert_eq!(full.unwrap().raw_os_error(), Some(libc::EAGAIN));
        assert!(!store.has_room().unwrap());
        let before = held(&reading).len();
        store.retain(|entry| entry != space(0)).unwrap();
        assert_eq!(std::io::Read::read(&mut far, &mut [0]).unwrap(), 0, "its file is closed");
        assert_eq!(held(&reading).len(), before - 1);
        store.put(space(0), &[file.as_raw_fd()]).unwrap();
    }

    #[test]
    fn an_old_mark_or_peek_offset_does_not_end_a_rotation_early() {
        let (store, reading, _writer) = store();
        let file = file();
        for index in 0..3 {
            store.put(space(index), &[file.as_raw_fd()]).unwrap();
            let mark = StoreEntry { kind: EntryKind::Mark, index: 0, life: 5 };
            send(store.writer, mark, &[]).unwrap();
        }
        sys::set_peek_offset(reading.as_fd(), Some(2 * i32::try_from(ENTRY).unwrap())).unwrap();
        store.retain(|entry| entry != space(2)).unwrap();
        let order: Vec<(EntryKind, u32)> =
            held(&reading).iter().map(|(kind, index, _)| (*kind, *index)).collect();
        assert_eq!(order, [(EntryKind::Space, 0), (EntryKind::Space, 1)]);
    }

    #[test]
    fn a_negative_number_is_no_store() {
        let (_store, reading, _writer) = store();
        for (store, writer) in [(-1, -1), (reading.as_raw_fd(), -1), (-1, reading.as_raw_fd())] {
            assert_eq!(FdStore::of(store, writer).unwrap_err().raw_os_error(), Some(libc::EBADF));
        }
    }

    #[test]
    fn the_store_holds_the_descriptors_of_all_spaces_of_a_ledger() {
        let (store, reading, _writer) = store();
        let file = file();
        for index in 0..u32::try_from(crate::ledger::MAX_SPACES).unwrap() {
            store.put(space(index), &[file.as_raw_fd(), file.as_raw_fd()]).unwrap();
        }
        store.retain(|entry| entry.kind != EntryKind::Space || entry.index % 2 == 0).unwrap();
        drop(file);
        assert_eq!(held(&reading).len(), crate::ledger::MAX_SPACES / 2);
    }
}
