// SPDX-License-Identifier: MIT OR Apache-2.0
//! Descriptors that follow a message: with one byte, on the same stream.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::MESSAGE_LIMIT;
use super::frame::FrameError;

/// Descriptors of one message.
const COUNT: usize = 2;

/// Sends two descriptors.
///
/// # Errors
/// The peer does not take them within [`MESSAGE_LIMIT`].
pub async fn send_descriptors(
    stream: &UnixStream,
    descriptors: [BorrowedFd<'_>; COUNT],
) -> Result<(), FrameError> {
    let numbers = descriptors.map(|descriptor| descriptor.as_raw_fd());
    let send = || -> io::Result<()> {
        let rights = [ControlMessage::ScmRights(&numbers)];
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        Ok(sendmsg::<()>(stream.as_raw_fd(), &[IoSlice::new(&[0])], &rights, flags, None).map(drop)?)
    };
    let sent = timeout(MESSAGE_LIMIT, stream.async_io(Interest::WRITABLE, send)).await;
    Ok(sent.map_err(|_| FrameError::Late(MESSAGE_LIMIT))??)
}

/// Receives two descriptors.
///
/// # Errors
/// The peer has sent others, or none within [`MESSAGE_LIMIT`].
pub async fn receive_descriptors(stream: &UnixStream) -> Result<[OwnedFd; COUNT], FrameError> {
    let received =
        timeout(MESSAGE_LIMIT, stream.async_io(Interest::READABLE, || receive(stream.as_raw_fd()))).await;
    let descriptors = received.map_err(|_| FrameError::Late(MESSAGE_LIMIT))??;
    <[OwnedFd; COUNT]>::try_from(descriptors).map_err(|_| FrameError::Cut)
}

fn receive(socket: RawFd) -> io::Result<Vec<OwnedFd>> {
    let (mut byte, mut space) = ([0], nix::cmsg_space!([RawFd; COUNT]));
    let mut slices = [IoSliceMut::new(&mut byte)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(socket, &mut slices, Some(&mut space), flags)?;
    let mut descriptors = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(numbers) = control {
            // SAFETY: the kernel has just made them for this message: open, and nothing owns them.
            descriptors.extend(numbers.into_iter().map(|number| unsafe { OwnedFd::from_raw_fd(number) }));
        }
    }
    Ok(descriptors)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use tokio::io::AsyncWriteExt as _;

    use super::*;
    use crate::control::frame;
    use crate::control::proto::Fetched;

    #[tokio::test]
    async fn descriptors_follow_a_message() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let files = [(), ()].map(|()| tempfile::tempfile().unwrap());
        let message = Fetched { complete: false, layout: 7 };
        frame::send(&mut ours, &message).await.unwrap();
        send_descriptors(&ours, [files[0].as_fd(), files[1].as_fd()]).await.unwrap();
        let received = frame::receive::<Fetched>(&mut theirs, MESSAGE_LIMIT).await.unwrap();
        assert_eq!(received, Some(message));
        let inodes =
            receive_descriptors(&theirs).await.unwrap().map(|fd| nix::sys::stat::fstat(fd).unwrap().st_ino);
        assert_eq!(inodes, files.map(|file| nix::sys::stat::fstat(file).unwrap().st_ino));
        ours.write_all(&[0]).await.unwrap();
        assert!(matches!(receive_descriptors(&theirs).await, Err(FrameError::Cut)));
    }
}
