// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a connection over a unix socket ends as a failure.

use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};

use anyhow::{Context as _, ensure};
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::socket::{AddressFamily, MsgFlags, SockaddrLike as _, SockaddrStorage, getsockname, send};
use rewake_page_protocol::{PageMessage, PageRun};

use crate::plan::{FetchPlan, FetchedMemory};

/// Time that the peer has to answer, in milliseconds.
const ANSWER_LIMIT_MS: u16 = 1000;

/// Has a connection be reset when its last descriptor is closed. Its fetcher must have ended. A unix socket
/// is reset if bytes arrived that were not read, so one page is requested. Others are left as they are: TCP
/// is set to be reset when it is made, and an image server or an encrypted connection is not one with CRIU.
///
/// # Errors
/// The peer has ended, or does not answer.
pub fn leave_unread(connection: BorrowedFd<'_>, plan: &File) -> anyhow::Result<()> {
    let name: SockaddrStorage = getsockname(connection.as_raw_fd())?;
    let plan = FetchPlan::read(plan).context("the fetch plan")?;
    let FetchedMemory::Pages { layout, .. } = plan.memory else { return Ok(()) };
    if name.family() != Some(AddressFamily::Unix) || plan.tls.is_some() {
        return Ok(());
    }
    let extents = plan.page_extents();
    let first = extents.first().context("no page to request")?;
    let request = PageMessage::Get { pid: first.pid, run: PageRun::new(first.vaddr, 1)? };
    let bytes = layout.encode(&request.header())?;
    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
    let sent = send(connection.as_raw_fd(), &bytes, flags).context("requesting a page")?;
    ensure!(sent == bytes.len(), "{sent} of {} bytes of a request were sent", bytes.len());
    let arrived = poll(&mut [PollFd::new(connection.as_fd(), PollFlags::POLLIN)], ANSWER_LIMIT_MS)?;
    ensure!(arrived > 0, "no answer for {ANSWER_LIMIT_MS} ms");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read as _, Write as _};
    use std::os::unix::net::UnixStream;

    use rewake_page_protocol::HeaderLayout;

    use super::*;
    use crate::plan::{FetchExtent, PagePeer};

    fn plan(layout: HeaderLayout) -> File {
        let file = tempfile::tempfile().unwrap();
        let extents = vec![FetchExtent { first: 0, vaddr: 0x7000, pages: 1, pid: 9 }];
        let memory = FetchedMemory::Pages { layout, extents, files: Vec::new() };
        let plan = FetchPlan { peer: PagePeer::Connected, tls: None, len: 1 << 16, memory };
        plan.write(&file).unwrap();
        file
    }

    #[test]
    fn a_peer_that_answers_sees_a_reset_and_no_plain_end() {
        let layout = HeaderLayout::Wide;
        let plan = plan(layout);
        let (ours, mut peer) = UnixStream::pair().unwrap();
        let answers = std::thread::spawn(move || {
            let mut request = vec![0; layout.len()];
            peer.read_exact(&mut request).unwrap();
            let expected = PageMessage::Get { pid: 9, run: PageRun::new(0x7000, 1).unwrap() };
            assert_eq!(request, layout.encode(&expected.header()).unwrap());
            peer.write_all(&[1; 100]).unwrap();
            peer.read(&mut [0; 8]).unwrap_err().kind()
        });
        leave_unread(ours.as_fd(), &plan).unwrap();
        drop(ours);
        assert_eq!(answers.join().unwrap(), ErrorKind::ConnectionReset);
    }

    #[test]
    fn a_peer_that_does_not_answer_is_named() {
        let plan = plan(HeaderLayout::Narrow);
        let (ours, peer) = UnixStream::pair().unwrap();
        let silent = leave_unread(ours.as_fd(), &plan).unwrap_err().to_string();
        assert!(silent.starts_with("no answer for"), "{silent}");
        drop(peer);
        assert!(leave_unread(ours.as_fd(), &plan).is_err());
    }
}
