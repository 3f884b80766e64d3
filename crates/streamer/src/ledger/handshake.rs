// SPDX-License-Identifier: MIT OR Apache-2.0
//! Receives the restore's messages so that a successor sees what its predecessor had received.
//!
//! The protocol (criu/uffd.c): an `int32` pid, then, unless it is negative (a zombie), one byte with the
//! task's userfaultfd attached; after the last task the word "restore finished". One `recvmsg` receives each,
//! and its buffers, control data included, are in the ledger. Descriptors that the protocol does not have are
//! closed.

use std::cell::UnsafeCell;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::sys;

/// Room for SCM_RIGHTS with one descriptor and SCM_CREDENTIALS.
const CONTROL: usize = 128;

/// The message that is being received for one session.
#[repr(C)]
pub struct Inbox {
    /// 0: a word is next; 1: the byte that carries the descriptor of `pid` is next.
    step: AtomicU32,
    area: UnsafeCell<Area>,
}

impl std::fmt::Debug for Inbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inbox").field("step", &self.step).finish_non_exhaustive()
    }
}

#[repr(C, align(8))]
struct Area {
    control: [u8; CONTROL],
    word: [u8; 4],
    word_len: u32,
    pid: i32,
}

/// What [`Inbox::next`] has received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received {
    /// No further message has arrived yet.
    Empty,
    /// The peer has closed the connection.
    Closed,
    /// A word: a task's pid, `-pid` of a zombie, or the finish notice.
    Word(u32),
    /// The userfaultfd of the task whose pid was received before.
    Descriptor {
        /// The pid that names the task's images.
        image_pid: i32,
        /// The userfaultfd's number.
        uffd: i32,
        /// The sender's pid on this host; 0 if the kernel attached none.
        host_pid: i32,
    },
}

// As CMSG_ALIGN does: control messages are aligned to 8 bytes.
const fn space(len: usize) -> usize {
    (len + 7) & !7
}
const HEADER: usize = size_of::<libc::cmsghdr>();

impl Inbox {
    /// Empties the inbox for a new session.
    pub fn reset(&self) {
        self.step.store(0, Ordering::Relaxed);
        // SAFETY: only the control thread, which owns the session, uses the area; see `area`.
        unsafe { *self.area.get() = EMPTY };
    }

    /// Returns the buffers. The caller is the control thread of the worker, or of its successor once it is
    /// dead.
    #[expect(clippy::mut_from_ref, reason = "shared memory: exclusiveness is by process and thread")]
    fn area(&self) -> &mut Area {
        // SAFETY: only the control thread handles sessions. No reference outlives a call of this module's
        // functions, and they do not call one another while they hold one.
        unsafe { &mut *self.area.get() }
    }

    /// Returns a descriptor that was received and has no slot yet.
    #[must_use]
    pub fn descriptor(&self) -> Option<i32> {
        self.undelivered().map(|(descriptor, _)| descriptor)
    }

    /// Returns the same descriptor and its sender's pid on this host, which is 0 if the kernel attached none.
    #[must_use]
    pub fn undelivered(&self) -> Option<(i32, i32)> {
        if self.step.load(Ordering::Acquire) != 1 {
            return None;
        }
        let (descriptor, pid) = parse(&self.area().control);
        Some((descriptor?, pid.unwrap_or(0)))
    }

    /// Returns the next message without waiting. Messages that a predecessor had received are first.
    ///
    /// After [`Received::Word`] call [`Inbox::expect_descriptor`] or [`Inbox::done`]; after
    /// [`Received::Descriptor`] call [`Inbox::done`], once the ledger has its effect.
    ///
    /// # Errors
    /// The socket failed, or the peer violates the protocol.
    pub fn next(&self, socket: BorrowedFd<'_>) -> io::Result<Received> {
        let step = self.step.load(Ordering::Acquire);
        let received = self.take(step)?;
        if received != Received::Empty {
            return Ok(received);
        }
        let wanted = if step == 0 { 4 - self.area().word_len as usize } else { 1 };
        match self.receive(socket, step, wanted)? {
            None => Ok(Received::Empty),
            Some(0) => Ok(Received::Closed),
            Some(bytes) => {
                if step == 0 {
                    let area = self.area();
                    area.word_len = u32::try_from(area.word_len as usize + bytes).unwrap_or(4);
                }
                self.take(step)
            }
        }
    }

    /// Returns true if the rest of a message must follow at once.
    ///
    /// CRIU does nothing else while it sends a word, nor between a task's pid and its descriptor.
    #[must_use]
    pub fn is_midway(&self) -> bool {
        self.step.load(Ordering::Acquire) == 1 || self.area().word_len > 0
    }

    /// Makes the userfaultfd of task `pid` the next message.
    pub fn expect_descriptor(&self, pid: i32) {
        let area = self.area();
        area.control = [0; CONTROL];
        area.pid = pid;
        self.step.store(1, Ordering::Release);
    }

    /// Discards the message: it is processed.
    pub fn done(&self) {
        let area = self.area();
        area.word_len = 0;
        area.word = [0; 4];
        self.step.store(0, Ordering::Release);
    }

    fn take(&self, step: u32) -> io::Result<Received> {
        let area = self.area();
        if step == 0 {
            let word = u32::from_ne_bytes(area.word);
            // A predecessor may have died after the kernel wrote the word and before it noted its length.
            let complete = area.word_len == 4 || (area.word_len == 0 && word != 0);
            return Ok(if complete { Received::Word(word) } else { Received::Empty });
        }
        match parse(&area.control) {
            (Some(uffd), host_pid) => {
                Ok(Received::Descriptor { image_pid: area.pid, uffd, host_pid: host_pid.unwrap_or(0) })
            }
            (None, Some(_)) => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "task {} sent a byte without a userfaultfd: not `criu restore --lazy-pages`",
                    area.pid
                ),
            )),
            (None, None) => Ok(Received::Empty),
        }
    }

    /// Calls `recvmsg` once, into the ledger. Returns the bytes received, or `None` if it would wait.
    fn receive(&self, socket: BorrowedFd<'_>, step: u32, wanted: usize) -> io::Result<Option<usize>> {
        let area = self.area();
        let mut byte = 0_u8;
        let base: *mut u8 = if step == 0 {
            area.word.as_mut_ptr().wrapping_add(area.word_len as usize)
        } else {
            &raw mut byte
        };
        let mut discarded = [0_u8; CONTROL];
        let control = if step == 0 { &mut discarded } else { &mut area.control };
        let mut iov = libc::iovec { iov_base: base.cast(), iov_len: wanted };
        // SAFETY: all-zero is a valid msghdr.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_iov = &raw mut iov;
        header.msg_iovlen = 1;
        header.msg_control = control.as_mut_ptr().cast();
        header.msg_controllen = control.len();
        let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
        // SAFETY: the header points at live buffers of the lengths given: `word` has room for the bytes that
        // are still wanted, and the control area is CONTROL bytes.
        let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, flags) };
        match usize::try_from(received) {
            Ok(bytes) => {
                if step == 0 {
                    let numbers = descriptors(&discarded);
                    close_all(&numbers);
                } else {
                    keep_one(&mut area.control);
                }
                if header.msg_flags & libc::MSG_CTRUNC != 0 {
                    let what = "a descriptor of the restore was lost: this process may have too many \
                                (RLIMIT_NOFILE), or the peer is not `criu restore --lazy-pages`";
                    return Err(io::Error::new(io::ErrorKind::InvalidData, what));
                }
                Ok(Some(bytes))
            }
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
                error if error.raw_os_error() == Some(libc::ECONNRESET) => Ok(Some(0)),
                error => Err(error),
            },
        }
    }
}

const EMPTY: Area = Area { control: [0; CONTROL], word: [0; 4], word_len: 0, pid: 0 };

/// Leaves one descriptor in a control area that the kernel has filled, and closes the others.
///
/// Credentials come before descriptors there (`scm_recv` of include/net/scm.h). The numbers are erased before
/// the descriptors are closed, so a successor finds one descriptor at any moment.
fn keep_one(control: &mut [u8; CONTROL]) {
    let numbers = descriptors(control);
    let rights = headers(control).find(|header| header.kind == libc::SCM_RIGHTS);
    if let (Some(Header { at, end, .. }), [_, surplus @ ..]) = (rights, &numbers[..]) {
        control[at + HEADER + 4..end].fill(0);
        control[at..at + 8].copy_from_slice(&(HEADER as u64 + 4).to_ne_bytes());
        close_all(surplus);
    }
}

fn close_all(numbers: &[RawFd]) {
    for number in numbers {
        // SAFETY: the kernel has just opened it, and the protocol has no use for it: nothing owns it.
        drop(unsafe { sys::take_over(*number) });
    }
}

/// One message of a control area: `struct cmsghdr` on LP64 is a length u64, level i32, type i32, then the
/// data.
struct Header {
    kind: libc::c_int,
    at: usize,
    end: usize,
}

/// Returns the messages of socket level, each with data, in a control area that was zeroed before a receive.
fn headers(control: &[u8; CONTROL]) -> impl Iterator<Item = Header> + '_ {
    let mut at = 0;
    let next = move || {
        while at + HEADER + 4 <= CONTROL {
            let (start, len) = (at, usize::try_from(number(control, at)).unwrap_or(0));
            if len < HEADER + 4 {
                return None;
            }
            at += space(len);
            if number(control, start + 8) == libc::SOL_SOCKET {
                let end = (start + len).min(CONTROL);
                return Some(Header { kind: number(control, start + 12), at: start, end });
            }
        }
        None
    };
    std::iter::from_fn(next)
}

fn number(control: &[u8; CONTROL], at: usize) -> i32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&control[at..at + 4]);
    i32::from_ne_bytes(bytes)
}

/// Returns the descriptors in a control area.
fn descriptors(control: &[u8; CONTROL]) -> Vec<RawFd> {
    let rights = headers(control).filter(|header| header.kind == libc::SCM_RIGHTS);
    let numbers = rights.flat_map(|header| (header.at + HEADER..header.end - 3).step_by(4));
    numbers.map(|at| number(control, at)).collect()
}

/// Returns the descriptor and the sender's pid in a control area.
fn parse(control: &[u8; CONTROL]) -> (Option<RawFd>, Option<i32>) {
    let credentials = headers(control).filter(|header| header.kind == libc::SCM_CREDENTIALS);
    // A receive that found nothing attaches pid 0: the kernel does that on EAGAIN too.
    let pid = credentials.map(|header| number(control, header.at + HEADER)).filter(|&pid| pid > 0).last();
    (descriptors(control).first().copied(), pid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
    use std::io::{IoSlice, Write as _};
    use std::net::Shutdown;
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;

    fn pair() -> (Inbox, UnixStream, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        crate::sys::pass_credentials(ours.as_fd()).unwrap();
        (Inbox { step: AtomicU32::new(0), area: UnsafeCell::new(EMPTY) }, ours, theirs)
    }

    fn send_fd(socket: &UnixStream, fd: i32) {
        let (iov, fds) = ([IoSlice::new(&[0])], [fd]);
        sendmsg::<()>(socket.as_raw_fd(), &iov, &[ControlMessage::ScmRights(&fds)], MsgFlags::empty(), None)
            .unwrap();
    }

    #[test]
    fn a_task_hands_over_its_descriptor_and_is_known_by_its_host_pid() {
        let (inbox, ours, mut theirs) = pair();
        assert_eq!(inbox.next(ours.as_fd()).unwrap(), Received::Empty);
        theirs.write_all(&77_i32.to_ne_bytes()).unwrap();
        assert_eq!(inbox.next(ours.as_fd()).unwrap(), Received::Word(77));
        inbox.expect_descriptor(77);
        assert_eq!(inbox.next(ours.as_fd()).unwrap(), Received::Empty);
        assert_eq!(inbox.next(ours.as_fd()).unwrap(), Received::Empty);
        send_fd(&theirs, 0);
        let Received::Descriptor { image_pid: 77, uffd, host_pid } = inbox.next(ours.as_fd()).unwrap() else {
            panic!("no descriptor")
        };
        assert!(uffd > 2);
        assert_eq!(host_pid, i32::try_from(std::process::id()).unwrap());
        inbox.done();
        // Not dropped: a child of another test may have a copy of it.
        theirs.shutdown(Shutdown::Both).unwrap();
        assert_eq!(inbox.next(ours.as_fd()).unwrap(), Received::Closed);
    }

    #[test]
    fn a_successor_receives_the_messages_of_a_dead_worker_again() {
        let (inbox, ours, mut theirs) = pair();
        theirs.write_all(&5_i32.to_ne_bytes()).unwrap();
        inbox.receive(ours.as_fd(), 0, 4).unwrap(); // ... and died before noting that it had
        assert_eq!(inbox.next(ours.as_fd()).unwrap(), Received::Word(5));
        inbox.expect_descriptor(5);
        send_fd(&theirs, 0);
        inbox.receive(ours.as_fd(), 1, 1).unwrap();
        assert!(inbox.descriptor().is_some());
        assert!(matches!(inbox.next(ours.as_fd()).unwrap(), Received::Descriptor { image_pid: 5, .. }));
    }

    #[test]
    fn a_word_in_pieces_is_put_together() {
        let (inbox, ours, mut theirs) = pair();
        let word = 0x5253_5446_u32.to_ne_bytes();
        theirs.write_all(&word[..1]).unwrap();
        assert_eq!(inbox.next(ours.as_fd()).unwrap(), Received::Empty);
        theirs.write_all(&word[1..]).unwrap();
        assert_eq!(inbox.next(ours.as_fd()).unwrap(), Received::Word(0x5253_5446));
    }

    #[test]
    fn a_byte_without_a_descriptor_is_refused() {
        let (inbox, ours, mut theirs) = pair();
        inbox.expect_descriptor(5);
        theirs.write_all(&[0]).unwrap();
        assert!(inbox.next(ours.as_fd()).is_err());
    }

    /// A pipe's end is closed when its last copy is: a read or write at its other end shows that.
    fn pipes(count: usize) -> (Vec<std::io::PipeReader>, Vec<std::io::PipeWriter>) {
        (0..count).map(|_| std::io::pipe().unwrap()).unzip()
    }

    fn send_all(socket: &UnixStream, bytes: &[u8], ends: &[std::io::PipeWriter]) {
        let numbers: Vec<i32> = ends.iter().map(std::os::fd::AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&numbers)];
        sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(bytes)], &rights, MsgFlags::empty(), None).unwrap();
    }

    /// Returns true if no process has the write end. A child of another test may have a copy for a moment.
    fn is_closed(reader: &std::io::PipeReader) -> bool {
        let mut poll = libc::pollfd { fd: reader.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one live pollfd; no wait.
        unsafe { libc::poll(&raw mut poll, 1, 0) };
        poll.revents & libc::POLLHUP != 0
    }

    #[test]
    fn descriptors_that_are_sent_with_a_word_are_closed() {
        let (inbox, ours, theirs) = pair();
        let (readers, writers) = pipes(3);
        send_all(&theirs, &77_i32.to_ne_bytes(), &writers);
        drop(writers);
        assert_eq!(inbox.next(ours.as_fd()).unwrap(), Received::Word(77));
        crate::uffd_child::until(|| readers.iter().all(is_closed));
    }

    #[test]
    fn all_descriptors_of_a_message_but_the_first_are_closed() {
        let (inbox, ours, theirs) = pair();
        inbox.expect_descriptor(5);
        let (readers, writers) = pipes(3);
        send_all(&theirs, &[0], &writers);
        drop(writers);
        let received = inbox.next(ours.as_fd()).unwrap();
        let Received::Descriptor { image_pid: 5, uffd, host_pid } = received else { panic!("{received:?}") };
        assert_eq!(host_pid, i32::try_from(std::process::id()).unwrap());
        crate::uffd_child::until(|| readers[1..].iter().all(is_closed));
        assert!(
            !is_closed(&readers[0]) && inbox.undelivered() == Some((uffd, host_pid)),
            "a successor finds it"
        );
        close_all(&[uffd]);
        crate::uffd_child::until(|| is_closed(&readers[0]));
    }

    #[test]
    fn a_message_whose_descriptors_do_not_fit_is_refused() {
        let (inbox, ours, theirs) = pair();
        inbox.expect_descriptor(5);
        let (_readers, writers) = pipes(40);
        send_all(&theirs, &[0], &writers);
        let error = inbox.next(ours.as_fd()).unwrap_err().to_string();
        assert!(error.contains("a descriptor of the restore was lost"), "{error}");
        let (kept, _) = inbox.undelivered().expect("the first descriptor is kept");
        close_all(&[kept]);
    }

    #[test]
    fn a_message_is_midway_within_a_word_and_before_a_descriptor() {
        let (inbox, ours, mut theirs) = pair();
        assert!(!inbox.is_midway(), "CRIU may take its time before a task");
        theirs.write_all(&[77, 0]).unwrap();
        inbox.next(ours.as_fd()).unwrap();
        assert!(inbox.is_midway(), "within a word");
        theirs.write_all(&[0, 0]).unwrap();
        assert_eq!(inbox.next(ours.as_fd()).unwrap(), Received::Word(77));
        inbox.expect_descriptor(77);
        assert!(inbox.is_midway(), "before its descriptor");
        inbox.done();
        assert!(!inbox.is_midway());
    }
}
