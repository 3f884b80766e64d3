// SPDX-License-Identifier: MIT OR Apache-2.0
//! A session's fd store: descriptors that lie in flight in the queue of a socket, as in CRIU's own fdstore.
//!
//! The store is one end of a SOCK_SEQPACKET pair. Each message in its queue carries one [`Entry`] and the
//! descriptors that belong to it (SCM_RIGHTS). The kernel keeps these files open for as long as any process has
//! the store open. Each target has it (`crate::supervise::parking`), and a forked child inherits it. So the last reference
//! to a userfaultfd lives where the memory lives: when every process of ours is killed at once, page faults and
//! events wait in the kernel, and `rewake recover` takes everything out of the store of any target.
//!
//! The other end of the pair, which puts entries in, lies in the queue too ([`Kind::Writer`]). Without it a
//! recovered store could not take the userfaultfd of a child that is forked later.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, getsockopt, recv,
    recvmsg, sendmsg, setsockopt, socketpair, sockopt,
};
use nix::sys::stat::fstat;

use crate::sys;

/// Descriptors in one message: the kernel takes 253 (`SCM_MAX_FD`, `include/net/scm.h`).
pub const MAX_DESCRIPTORS: usize = 250;
/// Bytes that the queue may hold, as the kernel counts them: about 1 KiB a message, for as many address spaces
/// as a ledger has.
const QUEUE: usize = 16 << 20;
/// Bytes of the queue that no put takes: a turn needs a mark, and an entry that is at the head and at the tail. A message
/// takes less than 1 KiB.
const RESERVE: usize = 8 << 10;
/// Bytes of an entry: kind, index, life.
const ENTRY: usize = 16;

/// What a message of the store carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// The end that puts entries in.
    Writer = 1,
    /// An address space: its userfaultfd, then its journal. `index` is its slot in the ledger.
    Space = 2,
    /// The session's plan, sealed.
    Plan = 3,
    /// Pages files, in the plan's order. `index` is the number of the first one.
    Files = 4,
    /// The userfaultfd of a process's placeholders.
    Placeholders = 5,
    /// Ends one turn of the queue: `index` counts them, `life` is the pid. Carries no descriptor.
    Mark = 6,
}

impl Kind {
    const ALL: [Self; 6] =
        [Self::Writer, Self::Space, Self::Plan, Self::Files, Self::Placeholders, Self::Mark];
}

/// Which descriptors a message carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// What they are.
    pub kind: Kind,
    /// Which one of that kind.
    pub index: u32,
    /// Tells two users of one ledger slot apart: [`SpaceSlot::life`](crate::ledger::SpaceSlot::life).
    pub life: u64,
}

impl Entry {
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
            kind: Kind::ALL.into_iter().find(|known| *known as u32 == kind)?,
            index: u32::from_ne_bytes(*index),
            life: u64::from_ne_bytes(rest.try_into().ok()?),
        })
    }
}

/// An entry with copies of its descriptors.
pub type Stored = (Entry, Vec<OwnedFd>);

/// The store of one session. The session's slot in the ledger owns both descriptors.
#[derive(Debug)]
pub struct FdStore {
    store: RawFd,
    writer: RawFd,
    /// The socket's inode: by it a target's copy is recognised in `/proc/PID/fd`.
    inode: u64,
    /// A turn of the queue takes entries out and puts them back: one at a time. How many there were.
    turn: Mutex<u32>,
    /// There may be no room for another put, as far as is known.
    full: AtomicBool,
}

impl FdStore {
    /// An empty store, with the entry for its writer: the descriptors of the store and of the writer.
    ///
    /// # Errors
    /// EMFILE, ENOMEM.
    pub fn create() -> io::Result<(OwnedFd, OwnedFd)> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let (store, writer) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
        // Without CAP_NET_ADMIN the queue holds some hundred entries, and a put says when it is full.
        let _ = setsockopt(&writer, sockopt::SndBufForce, &QUEUE);
        let entry = Entry { kind: Kind::Writer, index: 0, life: 0 };
        send(writer.as_raw_fd(), entry, &[writer.as_raw_fd()])?;
        Ok((store, writer))
    }

    /// The store behind these descriptors, which stay open as long as this is used.
    ///
    /// # Errors
    /// The store is no open file.
    pub fn of(store: RawFd, writer: RawFd) -> io::Result<Self> {
        if store < 0 || writer < 0 {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        }
        // SAFETY: the caller keeps it open; it is borrowed for this call alone.
        let inode = fstat(unsafe { BorrowedFd::borrow_raw(store) })?.st_ino;
        Ok(Self { store, writer, inode, turn: Mutex::default(), full: AtomicBool::new(true) })
    }

    /// The socket's inode.
    #[must_use]
    pub fn inode(&self) -> u64 {
        self.inode
    }

    /// The store itself, to be given to a target.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: open as long as this is used, by the contract of `of`.
        unsafe { BorrowedFd::borrow_raw(self.store) }
    }

    /// Whether a [`FdStore::put`] finds room now. Asks the kernel only after a put that took the last room: reactors ask
    /// before each read.
    ///
    /// # Errors
    /// The kernel's.
    pub fn has_room(&self) -> io::Result<bool> {
        Ok(!self.full.load(Ordering::Acquire) || self.measure()?)
    }

    /// Measures the room, and notes whether there is some.
    fn measure(&self) -> io::Result<bool> {
        // SAFETY: open as long as this is used, by the contract of `of`.
        let writer = unsafe { BorrowedFd::borrow_raw(self.writer) };
        let has_room = sys::unread_bytes(writer)? + RESERVE < getsockopt(&writer, sockopt::SndBuf)?;
        self.full.store(!has_room, Ordering::Release);
        Ok(has_room)
    }

    /// Puts copies of descriptors into the store, at most [`MAX_DESCRIPTORS`].
    ///
    /// # Errors
    /// EAGAIN: the queue is full. ETOOMANYREFS: this user has too many descriptors in flight (unix(7)).
    pub fn put(&self, entry: Entry, descriptors: &[RawFd]) -> io::Result<()> {
        if !self.measure()? {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
        send(self.writer, entry, descriptors)?;
        self.measure().map(drop)
    }

    /// Takes entries out for which `keep` is false: their descriptors close when no other copy is left.
    ///
    /// Each other entry is put in again before it is taken out, so that at no moment it is in no queue.
    ///
    /// # Errors
    /// Descriptors are refused. The rest stays as it was.
    pub fn retain(&self, keep: impl Fn(Entry) -> bool) -> io::Result<()> {
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        *turn = turn.wrapping_add(1);
        // A CRIU that was killed while it looked at the queue leaves an offset, and a worker that was killed here a mark.
        sys::set_peek_offset(self.descriptor(), None)?;
        let mark = Entry { kind: Kind::Mark, index: *turn, life: std::process::id().into() };
        send(self.writer, mark, &[])?;
        loop {
            let Some(entry) = head(self.store)? else { return Ok(()) };
            if entry.kind != Kind::Mark && keep(entry) {
                let Some((entry, descriptors)) = receive(self.store, MsgFlags::MSG_PEEK)? else {
                    return Ok(());
                };
                let numbers: Vec<RawFd> = descriptors.iter().map(OwnedFd::as_raw_fd).collect();
                send(self.writer, entry, &numbers)?;
            }
            // Without room for descriptors the kernel closes those of the message.
            recv(self.store, &mut [0; ENTRY], MsgFlags::MSG_DONTWAIT)?;
            if entry == mark {
                return Ok(());
            }
        }
    }

    /// Takes everything out: nothing holds the session's descriptors any more but our own.
    ///
    /// # Errors
    /// The kernel's.
    pub fn empty(&self) -> io::Result<()> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        while head(self.store)?.is_some() {
            recv(self.store, &mut [0; ENTRY], MsgFlags::MSG_DONTWAIT)?;
        }
        Ok(())
    }
}

/// Copies of all that a store holds, in order; it stays there. An entry that was on its way from the head to the
/// tail when its process was killed comes twice.
///
/// # Errors
/// Too many descriptors are open here, or it is no store.
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

fn send(writer: RawFd, entry: Entry, descriptors: &[RawFd]) -> io::Result<()> {
    let bytes = entry.encode();
    let rights = [ControlMessage::ScmRights(descriptors)];
    let rights = if descriptors.is_empty() { &[][..] } else { &rights[..] };
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    sendmsg::<()>(writer, &[IoSlice::new(&bytes)], rights, flags, None)?;
    Ok(())
}

/// The first entry, without its descriptors; none when the queue is empty.
fn head(store: RawFd) -> io::Result<Option<Entry>> {
    let mut bytes = [0; ENTRY];
    match recv(store, &mut bytes, MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT) {
        Ok(ENTRY) => Entry::decode(&bytes).map(Some).ok_or_else(garbled),
        Ok(0) | Err(Errno::EAGAIN) => Ok(None),
        Ok(_) => Err(garbled()),
        Err(error) => Err(error.into()),
    }
}

fn receive(store: RawFd, how: MsgFlags) -> io::Result<Option<Stored>> {
    let mut bytes = [0; ENTRY];
    let mut space = nix::cmsg_space!([RawFd; MAX_DESCRIPTORS]);
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let flags = how | MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let came = match recvmsg::<()>(store, &mut slices, Some(&mut space), flags) {
        Err(Errno::EAGAIN) => return Ok(None),
        came => came?,
    };
    let (length, flags) = (came.bytes, came.flags);
    let mut descriptors = Vec::new();
    for control in came.cmsgs()? {
        if let ControlMessageOwned::ScmRights(numbers) = control {
            // SAFETY: the kernel has just made them for this message: open, and owned by no one.
            descriptors.extend(numbers.into_iter().map(|number| unsafe { sys::take_over(number) }));
        }
    }
    if length == 0 && descriptors.is_empty() {
        return Ok(None);
    }
    if flags.intersects(MsgFlags::MSG_CTRUNC | MsgFlags::MSG_TRUNC) {
        return Err(io::Error::from_raw_os_error(libc::EMFILE));
    }
    let entry = Entry::decode(&bytes[..length]).ok_or_else(garbled)?;
    Ok(Some((entry, descriptors)))
}

fn garbled() -> io::Error {
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

    fn space(index: u32) -> Entry {
        Entry { kind: Kind::Space, index, life: 7 }
    }

    /// Kinds and indices, and the inodes of all descriptors but the writer.
    fn held(store: &OwnedFd) -> Vec<(Kind, u32, Vec<u64>)> {
        let all = peek_all(store.as_fd()).unwrap();
        let inodes = |files: &Vec<OwnedFd>| files.iter().map(inode).collect();
        all.iter().map(|(entry, files)| (entry.kind, entry.index, inodes(files))).collect()
    }

    #[test]
    fn what_was_put_in_is_found_in_order_again_and_again() {
        let (store, reading, writer) = store();
        let (one, two) = (file(), file());
        store.put(space(1), &[one.as_raw_fd(), two.as_raw_fd()]).unwrap();
        store.put(space(2), &[two.as_raw_fd()]).unwrap();
        let expected = [
            (Kind::Writer, 0, vec![inode(&writer)]),
            (Kind::Space, 1, vec![inode(&one), inode(&two)]),
            (Kind::Space, 2, vec![inode(&two)]),
        ];
        assert_eq!(held(&reading), expected);
        assert_eq!(held(&reading), expected);
    }

    #[test]
    fn the_files_live_on_when_only_a_copy_of_the_store_is_left_and_it_takes_new_ones() {
        let (store, reading, writer) = store();
        let (mut far, near) = std::io::pipe().unwrap();
        store.put(space(1), &[near.as_raw_fd()]).unwrap();
        drop((near, writer));
        let mut found = peek_all(reading.as_fd()).unwrap();
        let (_, mut writers) = found.remove(0);
        let again = FdStore::of(reading.as_raw_fd(), writers[0].as_raw_fd()).unwrap();
        again.put(space(2), &[file().as_raw_fd()]).unwrap();
        assert_eq!(held(&reading).len(), 3);
        // The pipe has a writer for as long as the store is open, and none afterwards.
        drop((found, writers.pop()));
        drop(reading);
        assert_eq!(std::io::Read::read(&mut far, &mut [0]).unwrap(), 0);
    }

    #[test]
    fn what_is_not_kept_is_closed_and_the_rest_stays_in_order() {
        let (store, reading, _writer) = store();
        let (mut far, near) = std::io::pipe().unwrap();
        store.put(space(1), &[near.as_raw_fd()]).unwrap();
        store.put(space(2), &[file().as_raw_fd()]).unwrap();
        store.put(space(3), &[file().as_raw_fd()]).unwrap();
        drop(near);
        store.retain(|entry| entry != space(1)).unwrap();
        let order: Vec<(Kind, u32)> = held(&reading).iter().map(|(kind, index, _)| (*kind, *index)).collect();
        assert_eq!(order, [(Kind::Writer, 0), (Kind::Space, 2), (Kind::Space, 3)]);
        assert_eq!(std::io::Read::read(&mut far, &mut [0]).unwrap(), 0, "its file is closed");
        store.empty().unwrap();
        assert_eq!(held(&reading), []);
    }

    #[test]
    fn a_full_store_refuses_more_and_still_gives_up_what_is_not_kept() {
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
    fn what_a_killed_worker_and_a_killed_criu_leave_behind_does_not_end_a_turn_early() {
        let (store, reading, _writer) = store();
        let file = file();
        for index in 0..3 {
            store.put(space(index), &[file.as_raw_fd()]).unwrap();
            let mark = Entry { kind: Kind::Mark, index: 0, life: 5 };
            send(store.writer, mark, &[]).unwrap();
        }
        sys::set_peek_offset(reading.as_fd(), Some(2 * i32::try_from(ENTRY).unwrap())).unwrap();
        store.retain(|entry| entry != space(2)).unwrap();
        let order: Vec<(Kind, u32)> = held(&reading).iter().map(|(kind, index, _)| (*kind, *index)).collect();
        assert_eq!(order, [(Kind::Writer, 0), (Kind::Space, 0), (Kind::Space, 1)]);
    }

    #[test]
    fn a_number_that_is_none_is_no_store() {
        let (_store, reading, _writer) = store();
        for (store, writer) in [(-1, -1), (reading.as_raw_fd(), -1), (-1, reading.as_raw_fd())] {
            assert_eq!(FdStore::of(store, writer).unwrap_err().raw_os_error(), Some(libc::EBADF));
        }
    }

    #[test]
    fn it_holds_the_descriptors_of_every_address_space_that_a_ledger_has() {
        let (store, reading, _writer) = store();
        let file = file();
        for index in 0..u32::try_from(crate::ledger::MAX_SPACES).unwrap() {
            store.put(space(index), &[file.as_raw_fd(), file.as_raw_fd()]).unwrap();
        }
        store.retain(|entry| entry.kind != Kind::Space || entry.index % 2 == 0).unwrap();
        drop(file);
        assert_eq!(held(&reading).len(), 1 + crate::ledger::MAX_SPACES / 2);
    }
}
