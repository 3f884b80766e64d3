// SPDX-License-Identifier: MIT OR Apache-2.0
//! The streamers that a fetcher serves: its owner, if that is one, and those that share it.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::time::Instant;

use anyhow::{Context as _, bail, ensure};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{Shutdown, shutdown};
use rewake_image_io::FetchRequest;

use crate::channel::{self, FetchOrder, MAX_READERS};
use crate::queue::FetchQueue;

/// Streamers that share a fetcher at most.
pub const MAX_FETCH_CLIENTS: usize = 64;
/// Orders of one streamer that are taken before another one's.
const ORDERS: usize = 64;

/// The number of a streamer: no two of a fetcher have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ClientNumber(pub(crate) u32);

/// The streamer that started the fetcher.
pub(crate) const OWNER: ClientNumber = ClientNumber(0);

/// Readers that wait for pages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ReaderSet(Vec<(ClientNumber, u64)>);

impl ReaderSet {
    /// One reader of a streamer.
    pub(crate) fn one(client: ClientNumber, reader: u8) -> Self {
        Self(vec![(client, 1 << (reader % 64))])
    }

    /// Adds the readers of another set.
    pub(crate) fn add(&mut self, other: &Self) {
        for (client, readers) in &other.0 {
            match self.0.iter_mut().find(|(of, _)| of == client) {
                Some((_, own)) => *own |= readers,
                None => self.0.push((*client, *readers)),
            }
        }
    }

    /// Removes the readers of a streamer. Returns whether the set had only those.
    pub(crate) fn remove(&mut self, client: ClientNumber) -> bool {
        let before = self.0.len();
        self.0.retain(|(of, _)| *of != client);
        before > 0 && self.0.is_empty()
    }

    /// Returns one bit for each reader of a streamer.
    pub(crate) fn of(&self, client: ClientNumber) -> u64 {
        self.0.iter().find(|(of, _)| *of == client).map_or(0, |(_, readers)| *readers)
    }
}

/// A streamer that shares the fetcher, and the readers that it wants to be woken.
#[derive(Debug)]
struct FetchClient {
    number: ClientNumber,
    socket: OwnedFd,
    readers: Vec<File>,
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
                Some(FetchOrder::Readers(readers)) => self.readers = reader_files(readers)?,
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
    pub(crate) fn wake_all(&self, readers: &[File], queue: &mut FetchQueue) {
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

/// Takes readers: eventfds, which are made non-blocking, so that none holds up the others.
///
/// # Errors
/// One is a pipe, a socket or a file.
pub(crate) fn reader_files(readers: Vec<OwnedFd>) -> anyhow::Result<Vec<File>> {
    let file = |reader: OwnedFd| {
        ensure!(is_anonymous(&reader)?, "a reader that is no eventfd");
        let flags = OFlag::from_bits_retain(fcntl(&reader, FcntlArg::F_GETFL)?);
        fcntl(&reader, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        Ok(File::from(reader))
    };
    readers.into_iter().take(MAX_READERS).map(file).collect()
}

/// Whether a descriptor is of no kind that has a name: an eventfd is not.
fn is_anonymous(descriptor: &OwnedFd) -> io::Result<bool> {
    let mut found = MaybeUninit::<libc::stat>::uninit();
    // The C library's function makes another system call, which could follow a path.
    // SAFETY: the kernel writes its `stat`, which is the C library's on 64-bit hosts, into memory of that size.
    let result = unsafe { libc::syscall(libc::SYS_fstat, descriptor.as_raw_fd(), found.as_mut_ptr()) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has written it.
    Ok(unsafe { found.assume_init() }.st_mode & libc::S_IFMT == 0)
}

/// Wakes readers: one bit for each.
fn wake(readers: &[File], which: u64) {
    for (_, reader) in readers.iter().enumerate().filter(|(number, _)| which & 1 << number != 0) {
        // An eventfd whose counter is full is readable all the same.
        let _ = nix::unistd::write(reader, &1u64.to_ne_bytes());
    }
}
