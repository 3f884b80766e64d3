// SPDX-License-Identifier: MIT OR Apache-2.0
//! The streamers that a fetcher serves: its owner, if that is one, and those that share it.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::time::Instant;

use anyhow::{Context as _, bail, ensure};
use nix::sys::socket::{Shutdown, shutdown};
use rewake_image_io::FetchRequest;
use rewake_process::wake_socket;

use crate::channel::{self, FetchOrder, MAX_READERS};
use crate::queue::FetchQueue;
use crate::readers::{ClientNumber, OWNER};

/// Streamers that share a fetcher at most.
pub const MAX_FETCH_CLIENTS: usize = 64;
/// Orders of one streamer that are taken before another one's.
const ORDERS: usize = 64;

/// A streamer that shares the fetcher, and the readers that it wants to be woken.
#[derive(Debug)]
struct FetchClient {
    number: ClientNumber,
    socket: OwnedFd,
    readers: Vec<OwnedFd>,
}

/// The streamers that share a fetcher with its owner.
#[derive(Debug, Default)]
pub(crate) struct FetchClients {
    all: Vec<FetchClient>,
    /// How many there have been.
    count: u32,
}

impl Drop for FetchClient {
    fn drop(&mut self) {
        end(&self.socket);
    }
}

impl FetchClient {
    /// Takes its orders; `request` takes its requests.
    ///
    /// # Errors
    /// It has ended, or sends what a client may not send.
    fn take_orders(
        &mut self,
        mut request: impl FnMut(ClientNumber, &FetchRequest) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        for _ in 0..ORDERS {
            match channel::receive_order(self.socket.as_fd()).context("its socket")? {
                None => break,
                Some(FetchOrder::Request(pages)) => request(self.number, &pages)?,
                Some(FetchOrder::Readers(readers)) => self.readers = checked_readers(readers)?,
                Some(other) => bail!("an order of the owner: {other:?}"),
            }
        }
        Ok(())
    }
}

impl FetchClients {
    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Returns their sockets, in a fixed order.
    pub(crate) fn sockets(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.all.iter().map(|client| client.socket.as_fd())
    }

    /// Returns the streamers whose sockets are ready, in the order of [`FetchClients::sockets`].
    pub(crate) fn ready(&self, ready: &[bool]) -> Vec<ClientNumber> {
        let ready = self.all.iter().zip(ready).filter(|(_, ready)| **ready);
        ready.map(|(client, _)| client.number).collect()
    }

    /// Serves one more streamer. One that is too much sees the end of its socket.
    pub(crate) fn add(&mut self, owner: BorrowedFd<'_>, socket: OwnedFd) {
        if self.all.len() >= MAX_FETCH_CLIENTS {
            let reason = format!("MAX_FETCH_CLIENTS = {MAX_FETCH_CLIENTS} streamers share this fetcher");
            // Without an owner no process needs the reason.
            let _ = channel::report_refused(owner, &reason);
            return end(&socket);
        }
        self.count += 1;
        self.all.push(FetchClient { number: ClientNumber(self.count), socket, readers: Vec::new() });
    }

    /// Takes the orders of streamers. One that has ended, or sends what it may not, is not served any more:
    /// its streamer sees the end of its socket.
    pub(crate) fn take_orders(
        &mut self,
        owner: BorrowedFd<'_>,
        ready: &[ClientNumber],
        queue: &mut FetchQueue,
    ) {
        let now = Instant::now();
        self.all.retain_mut(|client| {
            if !ready.contains(&client.number) {
                return true;
            }
            let taken = client.take_orders(|number, request| queue.add(number, request, now));
            if let Err(error) = &taken {
                queue.forget(client.number);
                if !has_ended(error) {
                    let _ = channel::report_refused(owner, &format!("{error:#}"));
                }
            }
            taken.is_ok()
        });
    }

    /// Wakes the readers of all streamers, and the owner's `readers`, whose pages have arrived.
    pub(crate) fn wake_all(&self, readers: &[OwnedFd], queue: &mut FetchQueue) {
        let which = std::mem::take(&mut queue.to_wake);
        wake(readers, which.of(OWNER));
        self.all.iter().for_each(|client| wake(&client.readers, which.of(client.number)));
    }
}

/// Ends a socket for all processes that have it: the agent has a copy, too.
fn end(socket: &OwnedFd) {
    // A socket that has ended needs no end.
    let _ = shutdown(socket.as_raw_fd(), Shutdown::Both);
}

/// Whether an error is the plain end of a streamer's socket.
fn has_ended(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() != io::ErrorKind::InvalidData)
}

/// Takes readers: senders of [`wake_socket`], because to wake one by another descriptor may take for ever.
///
/// # Errors
/// One is something else.
pub(crate) fn checked_readers(mut readers: Vec<OwnedFd>) -> anyhow::Result<Vec<OwnedFd>> {
    readers.truncate(MAX_READERS);
    let all = readers.iter().all(|reader| wake_socket::is_sender(reader.as_fd()));
    ensure!(all, "a reader that is no unix stream socket");
    Ok(readers)
}

/// Wakes readers: one bit for each.
fn wake(readers: &[OwnedFd], which: u64) {
    for (_, reader) in readers.iter().enumerate().filter(|(number, _)| which & 1 << number != 0) {
        wake_socket::wake(reader.as_fd());
    }
}
