// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where the missing bytes of files come from: a fetcher, which another process is.
//!
//! A reader that needs bytes that have not arrived requests them ([`FetchSource::request`]). The fetcher
//! writes them into the file, sets their bits in the [`PresenceMap`], and wakes the reader.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use nix::sys::socket::{MsgFlags, send};
use rewake_process::wake_socket::WakeSocket;

use crate::class::Class;
use crate::presence::PresenceMap;
use crate::units::PAGE;
use crate::verification::block_checksum;

/// Bytes of a request on the socket.
pub const FETCH_REQUEST_LEN: usize = 16;

/// A request for pages of a presence map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FetchRequest {
    /// Requests of demand reads have priority.
    pub class: Class,
    /// The number of the reader that is woken when pages have arrived: below 64.
    pub reader: u8,
    /// Number of pages.
    pub pages: u32,
    /// The first page of the presence map.
    pub first: u64,
}

impl FetchRequest {
    /// The first byte of an encoded request: other messages of the socket begin with another one.
    pub const KIND: u8 = 1;

    /// Returns the bytes of the request.
    #[must_use]
    pub fn encode(&self) -> [u8; FETCH_REQUEST_LEN] {
        let mut bytes = [0; FETCH_REQUEST_LEN];
        bytes[..3].copy_from_slice(&[Self::KIND, u8::from(self.class == Class::Demand), self.reader]);
        bytes[4..8].copy_from_slice(&self.pages.to_ne_bytes());
        bytes[8..].copy_from_slice(&self.first.to_ne_bytes());
        bytes
    }

    /// Reads a request, or `None` if these bytes are no request.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; FETCH_REQUEST_LEN] = bytes.try_into().ok()?;
        let class = match bytes[1] {
            0 => Class::Background,
            1 => Class::Demand,
            _ => return None,
        };
        let pages = u32::from_ne_bytes(*bytes[4..].first_chunk()?);
        let first = u64::from_ne_bytes(*bytes[8..].first_chunk()?);
        (bytes[0] == Self::KIND && pages > 0).then_some(Self { class, reader: bytes[2], pages, first })
    }
}

/// A request that was sent, by the number of the fetcher that received it. The next fetcher does not know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SentRequest(Option<u32>);

/// A thread that requests missing bytes, and is woken when some have arrived.
#[derive(Debug, Clone)]
pub struct FetchReader {
    /// Its number in [`FetchRequest::reader`].
    pub number: u8,
    /// The fetcher wakes it by this.
    pub waker: WakeSocket,
}

/// A file whose missing bytes a source brings. Several files share one presence map.
#[derive(Debug, Clone)]
pub struct FetchedFile {
    /// Where its bytes come from.
    pub source: Arc<FetchSource>,
    /// The page of the presence map that its first page is.
    pub first: u64,
}

impl FetchedFile {
    /// Returns the place of an offset in the presence map, in bytes.
    fn place(&self, offset: u64) -> u64 {
        offset.saturating_add(self.first.saturating_mul(PAGE as u64))
    }

    /// Returns whether all of these bytes have arrived.
    pub(crate) fn has(&self, offset: u64, len: usize) -> bool {
        self.source.is_complete() || self.source.presence().has(self.place(offset), len)
    }

    /// Returns the first of these bytes, which were read from an offset at the start of a page, whose page is
    /// not as it arrived: as far as that is known.
    pub(crate) fn first_wrong(&self, offset: u64, bytes: &[u8]) -> Option<usize> {
        let presence = self.source.presence();
        let is_wrong = |(page, bytes): (u64, &[u8])| {
            presence.checksum(page).is_some_and(|arrived| arrived != block_checksum(bytes))
        };
        let wrong = (self.page(offset)..).zip(bytes.chunks(PAGE)).position(is_wrong)?;
        Some(wrong * PAGE)
    }

    /// Returns how many of these bytes have arrived, up to the first that has not.
    pub(crate) fn prefix(&self, offset: u64, len: usize) -> usize {
        if self.source.is_complete() { len } else { self.source.presence().prefix(self.place(offset), len) }
    }

    /// Returns the page of the presence map that an offset is in.
    #[must_use]
    pub fn page(&self, offset: u64) -> u64 {
        self.place(offset) / PAGE as u64
    }

    /// Requests the pages of these bytes, unless this fetcher has the request. Returns false if it must be
    /// called again, as [`FetchSource::request`].
    pub fn request(
        &self,
        reader: u8,
        class: Class,
        (offset, len): (u64, usize),
        sent: &mut SentRequest,
    ) -> bool {
        let (first, end) = (self.page(offset), self.place(offset).saturating_add(len as u64));
        let pages = u32::try_from(end.div_ceil(PAGE as u64).saturating_sub(first)).unwrap_or(u32::MAX);
        self.source.request(&FetchRequest { class, reader, pages, first }, sent)
    }
}

/// The missing bytes of files.
#[derive(Debug)]
pub struct FetchSource {
    /// A fetcher that other restores share has a map of its own, and the next one has another.
    presence: RwLock<Arc<PresenceMap>>,
    /// The socket to the fetcher that lives; none while no fetcher does.
    fetcher: RwLock<Option<OwnedFd>>,
    /// Counts fetchers.
    number: AtomicU32,
    /// Whether no more bytes arrive.
    ended: AtomicBool,
    /// Whether all bytes are here, whatever the map says.
    complete: AtomicBool,
}

impl FetchSource {
    /// Makes a source without a fetcher.
    #[must_use]
    pub fn new(presence: PresenceMap) -> Self {
        Self {
            presence: RwLock::new(Arc::new(presence)),
            fetcher: RwLock::default(),
            number: AtomicU32::new(0),
            ended: AtomicBool::new(false),
            complete: AtomicBool::new(false),
        }
    }

    /// Returns which pages have arrived.
    #[must_use]
    pub fn presence(&self) -> Arc<PresenceMap> {
        Arc::clone(&self.presence.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Believes another map from now on. It is for the same files, and may lack pages that the earlier one
    /// had.
    pub fn use_presence(&self, presence: PresenceMap) {
        *self.presence.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(presence);
    }

    /// Notes that all bytes are here. The caller wakes the readers.
    pub fn complete(&self) {
        self.complete.store(true, Ordering::Release);
    }

    /// Returns whether [`FetchSource::complete`] was called.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.complete.load(Ordering::Acquire)
    }

    /// Notes that no more bytes arrive. The caller wakes the readers.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    /// Returns whether no more bytes arrive: a reader that needs some fails.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Sends requests to this fetcher from now on. Those that were sent to another one are sent again.
    pub fn use_fetcher(&self, socket: OwnedFd) {
        let mut fetcher = self.fetcher.write().unwrap_or_else(PoisonError::into_inner);
        *fetcher = Some(socket);
        self.number.fetch_add(1, Ordering::Release);
    }

    /// Returns whether the fetcher that lives has a request.
    #[must_use]
    pub fn is_sent(&self, sent: SentRequest) -> bool {
        sent.0 == Some(self.number.load(Ordering::Acquire))
    }

    /// Sends a request, unless this fetcher has it. Returns false if it must be called again: the fetcher's
    /// queue is full, or no fetcher lives.
    pub fn request(&self, request: &FetchRequest, sent: &mut SentRequest) -> bool {
        let number = self.number.load(Ordering::Acquire);
        if sent.0 == Some(number) {
            return true;
        }
        let fetcher = self.fetcher.read().unwrap_or_else(PoisonError::into_inner);
        let Some(socket) = &*fetcher else { return false };
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        let is_sent = send(socket.as_raw_fd(), &request.encode(), flags).is_ok();
        if is_sent {
            sent.0 = Some(number);
        }
        is_sent
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use nix::sys::socket::{AddressFamily, SockFlag, SockType, recv, socketpair};

    use super::*;
    use crate::presence::{PresenceWriter, presence_file};

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap()
    }

    fn received(socket: &OwnedFd) -> Option<FetchRequest> {
        let mut bytes = [0; 64];
        let len = recv(socket.as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT).ok()?;
        FetchRequest::decode(&bytes[..len])
    }

    #[test]
    fn each_fetcher_gets_a_request_once() {
        let file = presence_file(PAGE as u64).unwrap();
        let source = FetchSource::new(PresenceMap::open(file.as_fd(), PAGE as u64).unwrap());
        let request = FetchRequest { class: Class::Demand, reader: 3, pages: 16, first: 1 << 40 };
        let mut sent = SentRequest::default();
        assert!(!source.request(&request, &mut sent), "no fetcher has it");
        for _ in 0..2 {
            let (ours, its) = pair();
            source.use_fetcher(ours);
            assert!((0..2).all(|_| source.request(&request, &mut sent)));
            assert_eq!([received(&its), received(&its)], [Some(request), None]);
        }
    }

    #[test]
    fn a_request_to_a_fetcher_that_has_ended_is_not_noted_as_sent() {
        let file = presence_file(PAGE as u64).unwrap();
        let source = FetchSource::new(PresenceMap::open(file.as_fd(), PAGE as u64).unwrap());
        let (ours, its) = pair();
        source.use_fetcher(ours);
        drop(its);
        let mut sent = SentRequest::default();
        let request = FetchRequest { class: Class::Background, reader: 0, pages: 1, first: 0 };
        assert!(!source.request(&request, &mut sent));
        assert_eq!(sent, SentRequest::default());
    }

    #[test]
    fn each_file_has_a_part_of_the_presence_map() {
        const MAP: u64 = 48 * PAGE as u64;
        let file = presence_file(MAP).unwrap();
        let source = Arc::new(FetchSource::new(PresenceMap::open(file.as_fd(), MAP).unwrap()));
        let [one, two] = [0, 16].map(|first| FetchedFile { source: Arc::clone(&source), first });
        PresenceWriter::open(file.as_fd(), MAP).unwrap().set(17, 2);
        assert!(!one.has(0, PAGE) && !two.has(0, PAGE) && two.has(PAGE as u64, 2 * PAGE));
        assert_eq!((one.prefix(17 * PAGE as u64, 9 * PAGE), two.prefix(PAGE as u64 + 7, 9 * PAGE)), {
            (2 * PAGE, 2 * PAGE - 7)
        });
        assert_eq!((one.page(PAGE as u64), two.page(PAGE as u64)), (1, 17));
        let (ours, its) = pair();
        source.use_fetcher(ours);
        assert!(two.request(0, Class::Demand, (PAGE as u64 + 8, PAGE), &mut SentRequest::default()));
        let of = received(&its).map(|request| (request.first, request.pages));
        assert_eq!(of, Some((17, 2)), "a page at each end");
    }

    #[test]
    fn the_map_of_another_fetcher_takes_the_place_of_the_first() {
        let [first, second] = [(), ()].map(|()| presence_file(PAGE as u64).unwrap());
        let map = |file: &OwnedFd| PresenceMap::open(file.as_fd(), PAGE as u64).unwrap();
        let source = Arc::new(FetchSource::new(map(&first)));
        let file = FetchedFile { source: Arc::clone(&source), first: 0 };
        PresenceWriter::open(second.as_fd(), PAGE as u64).unwrap().set(0, 1);
        assert!(!file.has(0, PAGE));
        source.use_presence(map(&second));
        assert!(file.has(0, PAGE));
        source.use_presence(map(&first));
        source.complete();
        assert_eq!((file.has(0, PAGE), file.prefix(0, PAGE)), (true, PAGE));
    }

    #[test]
    fn without_room_a_request_must_be_sent_again() {
        let file = presence_file(PAGE as u64).unwrap();
        let source = FetchSource::new(PresenceMap::open(file.as_fd(), PAGE as u64).unwrap());
        let (ours, its) = pair();
        source.use_fetcher(ours);
        let request = FetchRequest { class: Class::Demand, reader: 0, pages: 1, first: 0 };
        let sent = (0..100_000).take_while(|_| source.request(&request, &mut SentRequest::default())).count();
        assert!((10..100_000).contains(&sent), "{sent}");
        assert_eq!(received(&its), Some(request));
        assert!(source.request(&request, &mut SentRequest::default()));
    }
}
