// SPDX-License-Identifier: MIT OR Apache-2.0
//! The socket between a streamer and its fetcher: SOCK_SEQPACKET, a message each time.
//!
//! The streamer sends orders ([`FetchOrder`]); its reactors send [`FetchRequest`]s on the same socket. The
//! fetcher sends reports ([`FetchReport`]). The fetcher of an image that several restores share belongs to
//! the node agent, which sends it a socket to each streamer.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use rewake_image_io::FetchRequest;

/// The most readers that a fetcher wakes, because each has one bit of a word.
pub const MAX_READERS: usize = 64;
/// Files of a message at most.
const MAX_FILES: usize = 64;
/// Descriptors of a message at most.
const MAX_DESCRIPTORS: usize = 64;
const _: () = assert!(MAX_READERS <= MAX_DESCRIPTORS && MAX_FILES <= MAX_DESCRIPTORS);
/// Bytes of a message at most.
const MAX_MESSAGE: usize = 4096;

/// A message of the streamer.
#[derive(Debug)]
pub enum FetchOrder {
    /// Fetch pages.
    Request(FetchRequest),
    /// The first message.
    Start {
        /// Whether an earlier fetcher had a connection: then the peer gets time to listen again.
        again: bool,
        /// The plan.
        plan: OwnedFd,
        /// The presence map.
        presence: OwnedFd,
        /// The connection of `--ps-socket`.
        connected: Option<OwnedFd>,
    },
    /// Write into these files. The next messages bring more of them, until the plan has all.
    Files(Vec<OwnedFd>),
    /// Wake these readers from now on: [senders](rewake_process::wake_socket).
    Readers(Vec<OwnedFd>),
    /// Serve another streamer, too: at the other end of this socket. It may send requests and readers.
    Client(OwnedFd),
    /// All memory is resident: send the last message to a page server, or fetch the rest of an image. Then
    /// end. While other streamers share the fetcher, the rest waits for their requests.
    Finish,
}

/// A message of the fetcher.
#[derive(Debug)]
pub enum FetchReport {
    /// It has connected. The descriptor is a duplicate of the connection.
    Connected(OwnedFd),
    /// It cannot fetch, and ends.
    Failed {
        /// Whether a new connection may help.
        again: bool,
        /// What happened.
        reason: String,
    },
    /// The peer has received the last message, or all has arrived.
    Closed,
    /// It does not serve a streamer any more that shares it, because of what that streamer has sent.
    Refused(String),
}

const START: u8 = 2;
const READERS: u8 = 3;
const FINISH: u8 = 4;
const CONNECTED: u8 = 5;
const FAILED: u8 = 6;
const CLOSED: u8 = 7;
const FILES: u8 = 8;
const CLIENT: u8 = 9;
const REFUSED: u8 = 10;

/// Sends [`FetchOrder::Start`].
///
/// # Errors
/// The fetcher has ended.
pub fn send_start(
    socket: BorrowedFd<'_>,
    again: bool,
    [plan, presence]: [BorrowedFd<'_>; 2],
    connected: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let descriptors: Vec<BorrowedFd<'_>> = [plan, presence].into_iter().chain(connected).collect();
    send(socket, &[START, again.into()], &descriptors)
}

/// Sends [`FetchOrder::Files`]: all files of the plan, in its order.
///
/// # Errors
/// The fetcher has ended.
pub fn send_files(socket: BorrowedFd<'_>, files: &[BorrowedFd<'_>]) -> io::Result<()> {
    files.chunks(MAX_FILES).try_for_each(|some| send(socket, &[FILES], some))
}

/// Sends [`FetchOrder::Readers`].
///
/// # Errors
/// The fetcher has ended.
pub fn send_readers(socket: BorrowedFd<'_>, readers: &[BorrowedFd<'_>]) -> io::Result<()> {
    send(socket, &[READERS], readers)
}

/// Sends [`FetchOrder::Client`].
///
/// # Errors
/// The fetcher has ended.
pub fn send_client(socket: BorrowedFd<'_>, client: BorrowedFd<'_>) -> io::Result<()> {
    send(socket, &[CLIENT], &[client])
}

/// Sends [`FetchOrder::Finish`].
///
/// # Errors
/// The fetcher has ended.
pub fn send_finish(socket: BorrowedFd<'_>) -> io::Result<()> {
    send(socket, &[FINISH], &[])
}

/// Sends [`FetchReport::Connected`].
pub(crate) fn report_connected(socket: BorrowedFd<'_>, connection: BorrowedFd<'_>) -> io::Result<()> {
    send(socket, &[CONNECTED], &[connection])
}

/// Sends [`FetchReport::Failed`].
pub(crate) fn report_failed(socket: BorrowedFd<'_>, again: bool, reason: &str) -> io::Result<()> {
    let reason = &reason[..reason.floor_char_boundary(MAX_MESSAGE - 2)];
    send(socket, &[&[FAILED, again.into()], reason.as_bytes()].concat(), &[])
}

/// Sends [`FetchReport::Closed`].
pub(crate) fn report_closed(socket: BorrowedFd<'_>) -> io::Result<()> {
    send(socket, &[CLOSED], &[])
}

/// Sends [`FetchReport::Refused`].
pub(crate) fn report_refused(socket: BorrowedFd<'_>, reason: &str) -> io::Result<()> {
    let reason = &reason[..reason.floor_char_boundary(MAX_MESSAGE - 1)];
    send(socket, &[&[REFUSED], reason.as_bytes()].concat(), &[])
}

/// Receives an order, without waiting. None: none has arrived.
///
/// # Errors
/// EOF: the streamer has ended. InvalidData: a message that is no order.
pub(crate) fn receive_order(socket: BorrowedFd<'_>) -> io::Result<Option<FetchOrder>> {
    let Some((bytes, descriptors)) = receive(socket)? else { return Ok(None) };
    let mut descriptors = descriptors.into_iter();
    let mut next = || descriptors.next().ok_or_else(foreign);
    Ok(Some(match bytes.as_slice() {
        [FetchRequest::KIND, ..] => FetchOrder::Request(FetchRequest::decode(&bytes).ok_or_else(foreign)?),
        [START, again] => FetchOrder::Start {
            again: *again != 0,
            plan: next()?,
            presence: next()?,
            connected: descriptors.next(),
        },
        [FILES] => FetchOrder::Files(descriptors.collect()),
        [READERS] => FetchOrder::Readers(descriptors.collect()),
        [CLIENT] => FetchOrder::Client(next()?),
        [FINISH] => FetchOrder::Finish,
        _ => return Err(foreign()),
    }))
}

/// Receives a report, without waiting. None: none has arrived.
///
/// # Errors
/// EOF: the fetcher has ended. InvalidData: a message that is no report.
pub fn receive_report(socket: BorrowedFd<'_>) -> io::Result<Option<FetchReport>> {
    let Some((bytes, descriptors)) = receive(socket)? else { return Ok(None) };
    Ok(Some(match bytes.as_slice() {
        [CONNECTED] => FetchReport::Connected(descriptors.into_iter().next().ok_or_else(foreign)?),
        [FAILED, again, reason @ ..] => FetchReport::Failed { again: *again != 0, reason: printable(reason) },
        [REFUSED, reason @ ..] => FetchReport::Refused(printable(reason)),
        [CLOSED] => FetchReport::Closed,
        _ => return Err(foreign()),
    }))
}

fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().map(|char| if char.is_control() { ' ' } else { char }).collect()
}

fn foreign() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a message that streamer and fetcher do not have")
}

fn send(socket: BorrowedFd<'_>, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let numbers: Vec<RawFd> = descriptors.iter().map(|descriptor| descriptor.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&numbers)];
    let rights = if numbers.is_empty() { &[][..] } else { &rights[..] };
    loop {
        match sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(bytes)], rights, MsgFlags::MSG_NOSIGNAL, None)
        {
            Err(Errno::EINTR) => {}
            sent => return Ok(sent.map(drop)?),
        }
    }
}

fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let mut buffer = [0; MAX_MESSAGE];
    let mut space = nix::cmsg_space!([RawFd; MAX_DESCRIPTORS]);
    let mut slices = [IoSliceMut::new(&mut buffer)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let message = match recvmsg::<()>(socket.as_raw_fd(), &mut slices, Some(&mut space), flags) {
        Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
        message => message?,
    };
    let (length, flags) = (message.bytes, message.flags);
    let mut descriptors = Vec::new();
    for control in message.cmsgs().into_iter().flatten() {
        if let ControlMessageOwned::ScmRights(numbers) = control {
            // SAFETY: the kernel has just made them for this message: open, and nothing owns them.
            descriptors.extend(numbers.into_iter().map(|number| unsafe { OwnedFd::from_raw_fd(number) }));
        }
    }
    if flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC) {
        return Err(foreign());
    }
    // No message is empty.
    if length == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some((buffer[..length].to_vec(), descriptors)))
}
