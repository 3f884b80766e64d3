// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files with GPU memory of which another host has some bytes. The session's fetcher writes them, and their
//! presence is in the same map as that of CPU memory.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rewake_criu_images::is_gpu_pages_file;
use rewake_image_io::{BLOCK, Class, FetchReader, FetchSource, ImageFile, PAGE, SentRequest};
use rewake_plugin_protocol::proto;

use crate::agent_fetch::AGENT_LIMIT;
use crate::fetch::Fetch;
use crate::session::image::Image;

/// Ranges that are requested at once: a fetcher queues a limited number.
const AHEAD: usize = 64;
/// Time between two looks at the presence map, when the fetcher does not wake this thread.
const LOOK_MS: u16 = 1000;
/// The same, when the fetcher's queue was full.
const FULL_MS: u16 = 1;

/// What must arrive in each progress time while the plugin waits: a link of 100 kbit/s brings more.
const MIN_PROGRESS: u64 = 1 << 20;
/// For an image: longer than a fetcher needs that waits for an answer, ends, and is started again.
const OF_IMAGE: ArrivalLimit = ArrivalLimit {
    time: Duration::from_secs(120),
    then: "check the link and the other host, then start the restore again: it continues the copy",
};
/// For an image of the node's cache: longer than [`AGENT_LIMIT`], for which memory waits for the next agent.
const OF_CACHE: ArrivalLimit = ArrivalLimit {
    time: Duration::from_secs(330),
    then: "check the store and the log of `rewake serve`, then start the restore again",
};
const _: () = assert!(OF_CACHE.time.as_millis() > AGENT_LIMIT.as_millis());
/// For a migration: longer than its agents wait for a lost connection, 330 s.
const OF_MIGRATION: ArrivalLimit = ArrivalLimit {
    time: Duration::from_secs(600),
    then: "the program is lost; check the link and the other host before the next migration",
};

/// The session's [`FetchedGpuFiles`], when it is open.
pub(crate) type SessionGpuFiles = Arc<OnceLock<FetchedGpuFiles>>;

/// How long the plugin waits for [`MIN_PROGRESS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ArrivalLimit {
    time: Duration,
    /// What the user is to know and do when it has passed.
    then: &'static str,
}

impl ArrivalLimit {
    /// Returns that of a session.
    pub(crate) fn of(fetch: Option<&Fetch>) -> Self {
        match fetch {
            Some(fetch) if fetch.is_shared() => OF_CACHE,
            Some(fetch) if fetch.is_image() => OF_IMAGE,
            _ => OF_MIGRATION,
        }
    }
}

/// The files of an image with GPU memory that a fetcher writes, and the reader that waits for them.
#[derive(Debug)]
pub struct FetchedGpuFiles {
    files: BTreeMap<String, Arc<ImageFile>>,
    reader: FetchReader,
    limit: ArrivalLimit,
}

/// Bytes of a file that must arrive.
struct NeededBytes<'a> {
    file: &'a ImageFile,
    range: Range<u64>,
    sent: SentRequest,
}

impl FetchedGpuFiles {
    /// Finds the GPU memory files of a session's image whose bytes come from another host.
    pub(crate) fn new(image: &Image, reader: FetchReader, limit: ArrivalLimit) -> Self {
        let named = image.files().iter().filter(|file| file.source().is_some()).filter_map(|file| {
            let name = file.name().file_name()?.to_str()?;
            is_gpu_pages_file(name).then(|| (name.to_owned(), Arc::clone(file)))
        });
        Self { files: named.collect(), reader, limit }
    }

    /// Returns a file by its name.
    pub(crate) fn file(&self, name: &str) -> Option<&Arc<ImageFile>> {
        self.files.get(name)
    }

    /// Returns the reader that the fetcher wakes.
    pub(super) fn reader(&self) -> FetchReader {
        self.reader.clone()
    }

    /// Waits until bytes have arrived. Files that are whole have all of theirs.
    ///
    /// # Errors
    /// They are beyond the end of a file. Or no more bytes arrive, or less than [`MIN_PROGRESS`] in a
    /// progress time.
    pub(super) fn wait_for(&self, needed: &[proto::Needed]) -> anyhow::Result<()> {
        self.wait_with_limit(needed, self.limit)
    }

    fn wait_with_limit(&self, needed: &[proto::Needed], limit: ArrivalLimit) -> anyhow::Result<()> {
        let mut rest = self.needed_bytes(needed)?.into_iter().filter(|bytes| !bytes.has_arrived());
        let mut awaited: Vec<NeededBytes<'_>> = Vec::new();
        let mut rate = self.files.values().next().and_then(|file| ArrivalRate::of(file, limit));
        loop {
            self.reader.waker.drain();
            awaited.retain(|bytes| !bytes.has_arrived());
            awaited.extend(rest.by_ref().take(AHEAD - awaited.len()));
            if awaited.is_empty() {
                return Ok(());
            }
            rate.as_mut().map_or(Ok(()), ArrivalRate::check)?;
            let mut is_full = false;
            for bytes in &mut awaited {
                is_full |= !bytes.request(self.reader.number)?;
            }
            let pause = PollTimeout::from(if is_full { FULL_MS } else { LOOK_MS });
            match poll(&mut [PollFd::new(self.reader.waker.as_fd(), PollFlags::POLLIN)], pause) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno).context("waiting for bytes of another host"),
            }
        }
    }

    /// Returns the ranges of files some of which another host has.
    fn needed_bytes(&self, needed: &[proto::Needed]) -> anyhow::Result<Vec<NeededBytes<'_>>> {
        let mut found = Vec::new();
        for proto::Needed { file, ranges } in needed {
            let Some(file) = self.file(file) else { continue };
            for proto::ByteRange { offset, length } in ranges {
                let end = offset.checked_add(*length).filter(|end| *end <= file.len());
                let end =
                    end.with_context(|| format!("the plugin needs bytes beyond {}", file.name().display()))?;
                // From a border of blocks on: whole blocks are requested.
                let range = offset / BLOCK as u64 * BLOCK as u64..end;
                found.push(NeededBytes { file, range, sent: SentRequest::default() });
            }
        }
        Ok(found)
    }
}

/// Checks that bytes arrive fast enough.
struct ArrivalRate<'a> {
    source: &'a FetchSource,
    limit: ArrivalLimit,
    since: Instant,
    /// Pages that had arrived then.
    arrived: u64,
}

impl<'a> ArrivalRate<'a> {
    fn of(file: &'a ImageFile, limit: ArrivalLimit) -> Option<Self> {
        let source = &*file.source()?.source;
        Some(Self { source, limit, since: Instant::now(), arrived: source.presence().arrived() })
    }

    fn check(&mut self) -> anyhow::Result<()> {
        let now = self.source.presence().arrived();
        if now < self.arrived {
            // The next agent has made another presence map.
            (self.since, self.arrived) = (Instant::now(), now);
        }
        if self.since.elapsed() < self.limit.time {
            return Ok(());
        }
        let bytes = (now - self.arrived) * PAGE as u64;
        ensure!(
            bytes >= MIN_PROGRESS,
            "GPU memory that must arrive before the program runs: {} KiB of it arrived in {} s, and {} KiB \
             are the least: {}",
            bytes >> 10,
            self.limit.time.as_secs(),
            MIN_PROGRESS >> 10,
            self.limit.then
        );
        (self.since, self.arrived) = (Instant::now(), now);
        Ok(())
    }
}

impl NeededBytes<'_> {
    fn len(&self) -> usize {
        usize::try_from(self.range.end - self.range.start).unwrap_or(usize::MAX)
    }

    fn has_arrived(&self) -> bool {
        self.file.has(self.range.start, self.len())
    }

    /// Requests the bytes. Returns false if the fetcher has no room for the request.
    fn request(&mut self, reader: u8) -> anyhow::Result<bool> {
        let (name, len) = (self.file.name().display(), self.len());
        let fetched = self.file.source().with_context(|| format!("{name}: it is whole"))?;
        ensure!(
            !fetched.source.has_ended(),
            "{name}: bytes that are on another host do not arrive any more: see above"
        );
        Ok(fetched.request(reader, Class::Demand, (self.range.start, len), &mut self.sent))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::{AsRawFd as _, OwnedFd};
    use std::thread::{scope, sleep};

    use nix::sys::socket::{
        AddressFamily, MsgFlags, SockFlag, SockType, recv, send, setsockopt, socketpair, sockopt,
    };
    use nix::sys::time::{TimeVal, TimeValLike as _};
    use rewake_image_io::{FetchRequest, FetchedFile, PresenceMap, PresenceWriter, presence_file};
    use rewake_process::wake_socket::WakeSocket;

    use super::*;

    const NAME: &str = "amdgpu-pages-3-0007.img";
    const LEN: u64 = 64 * BLOCK as u64;
    const LIMIT: Duration = Duration::from_secs(20);

    /// A file none of whose bytes have arrived, and the fetcher's ends.
    struct Scene {
        files: FetchedGpuFiles,
        source: Arc<FetchSource>,
        presence: PresenceWriter,
        fetcher: OwnedFd,
        /// The other end of the fetcher's socket.
        socket: i32,
    }

    fn scene() -> Scene {
        let memory = presence_file(LEN).unwrap();
        let source = Arc::new(FetchSource::new(PresenceMap::open(memory.as_fd(), LEN).unwrap()));
        let (kind, flags) = (SockType::SeqPacket, SockFlag::SOCK_CLOEXEC);
        let (ours, fetcher) = socketpair(AddressFamily::Unix, kind, None, flags).unwrap();
        let limit = TimeVal::seconds(LIMIT.as_secs().cast_signed());
        setsockopt(&fetcher, sockopt::ReceiveTimeout, &limit).unwrap();
        let socket = ours.as_raw_fd();
        source.use_fetcher(ours);
        let file: File = tempfile::tempfile().unwrap();
        file.set_len(LEN).unwrap();
        let fetched = FetchedFile { source: Arc::clone(&source), first: 0 };
        let file = ImageFile::fetched(file, NAME, fetched).unwrap();
        let reader = FetchReader { number: 3, waker: WakeSocket::new().unwrap() };
        let files =
            FetchedGpuFiles { files: BTreeMap::from([(NAME.to_owned(), file)]), reader, limit: OF_IMAGE };
        Scene { files, source, presence: PresenceWriter::open(memory.as_fd(), LEN).unwrap(), fetcher, socket }
    }

    fn needed(range: Range<u64>) -> [proto::Needed; 1] {
        all_needed(std::slice::from_ref(&range))
    }

    fn all_needed(ranges: &[Range<u64>]) -> [proto::Needed; 1] {
        let range = |of: &Range<u64>| proto::ByteRange { offset: of.start, length: of.end - of.start };
        [proto::Needed { file: NAME.to_owned(), ranges: ranges.iter().map(range).collect() }]
    }

    impl Scene {
        /// Waits, and ends also when a test fails.
        fn wait(&self, needed: &[proto::Needed]) -> anyhow::Result<()> {
            self.files.wait_with_limit(needed, ArrivalLimit { time: LIMIT, ..OF_IMAGE })
        }

        /// The next request: its pages.
        fn next(&self) -> Range<u64> {
            let mut bytes = [0; 64];
            let length = recv(self.fetcher.as_raw_fd(), &mut bytes, MsgFlags::empty()).unwrap();
            let request = FetchRequest::decode(&bytes[..length]).unwrap();
            assert_eq!((request.class, request.reader), (Class::Demand, 3));
            request.first..request.first + u64::from(request.pages)
        }

        fn bring(&self, pages: &Range<u64>) {
            self.presence.set(pages.start, pages.end - pages.start);
            self.files.reader.waker.wake();
        }
    }

    #[test]
    fn needed_bytes_are_requested_from_a_border_of_blocks_on() {
        let scene = scene();
        scope(|scope| {
            let wait = scope.spawn(|| scene.wait(&needed(BLOCK as u64 + 5..2 * BLOCK as u64 + 5)));
            let pages = scene.next();
            assert_eq!(pages, 16..33);
            scene.bring(&(17..33));
            sleep(Duration::from_millis(50));
            assert!(!wait.is_finished(), "a page of the block is absent");
            scene.bring(&pages);
            wait.join().unwrap().unwrap();
        });
    }

    #[test]
    fn bytes_beyond_a_file_are_refused_before_any_request() {
        let scene = scene();
        for range in [0..LEN + 1, LEN..LEN + 1] {
            let why = scene.wait(&all_needed(&[0..1, range])).unwrap_err().to_string();
            assert_eq!(why, format!("the plugin needs bytes beyond {NAME}"));
        }
        let huge = proto::ByteRange { offset: 4096, length: u64::MAX };
        let huge = [proto::Needed { file: NAME.to_owned(), ranges: vec![huge] }];
        assert!(scene.wait(&huge).is_err());
    }

    #[test]
    fn the_wait_ends_when_no_more_bytes_arrive() {
        let scene = scene();
        let why = scope(|scope| {
            let wait = scope.spawn(|| scene.wait(&needed(0..1)));
            scene.next();
            scene.source.end();
            scene.files.reader.waker.wake();
            wait.join().unwrap().unwrap_err().to_string()
        });
        assert_eq!(why, format!("{NAME}: bytes that are on another host do not arrive any more: see above"));
    }

    #[test]
    fn a_request_that_found_a_full_queue_is_sent_when_it_has_room() {
        let scene = scene();
        let earlier = FetchRequest { class: Class::Demand, reader: 3, pages: 1, first: 9 }.encode();
        let flags = MsgFlags::MSG_DONTWAIT;
        let full =
            std::iter::repeat_with(|| send(scene.socket, &earlier, flags)).take_while(Result::is_ok).count();
        scope(|scope| {
            let wait = scope.spawn(|| scene.wait(&needed(0..1)));
            sleep(Duration::from_millis(50));
            (0..full).for_each(|_| assert_eq!(scene.next(), 9..10));
            let pages = scene.next();
            assert_eq!(pages, 0..1);
            scene.bring(&pages);
            wait.join().unwrap().unwrap();
        });
    }

    #[test]
    fn all_ranges_are_requested_a_limited_number_at_once() {
        let scene = scene();
        let ranges: Vec<Range<u64>> =
            (0..1000).map(|page| page * PAGE as u64..(page + 1) * PAGE as u64).collect();
        scope(|scope| {
            let wait = scope.spawn(|| scene.wait(&all_needed(&ranges)));
            let first: Vec<_> = (0..AHEAD).map(|_| scene.next()).collect();
            sleep(Duration::from_millis(50));
            let more = recv(scene.fetcher.as_raw_fd(), &mut [0; 64], MsgFlags::MSG_DONTWAIT);
            assert_eq!(more, Err(Errno::EAGAIN));
            first.iter().for_each(|pages| scene.bring(pages));
            while !wait.is_finished() {
                scene.bring(&(0..1024));
                sleep(Duration::from_millis(1));
            }
            wait.join().unwrap().unwrap();
        });
    }

    #[test]
    fn another_presence_map_gets_as_much_time() {
        let scene = scene();
        scene.presence.set(0, 512);
        let file = &scene.files.files[NAME];
        let time = Duration::from_millis(500);
        let mut rate = ArrivalRate::of(file, ArrivalLimit { time, ..OF_CACHE }).unwrap();
        let next = presence_file(LEN).unwrap();
        scene.source.use_presence(PresenceMap::open(next.as_fd(), LEN).unwrap());
        sleep(time);
        rate.check().unwrap();
        assert_eq!(rate.arrived, 0);
        PresenceWriter::open(next.as_fd(), LEN).unwrap().set(0, 256);
        sleep(time);
        rate.check().unwrap();
        assert_eq!(rate.arrived, 256, "1 MiB has arrived since then");
    }

    #[test]
    fn a_source_that_brings_too_little_ends_the_wait() {
        let scene = scene();
        // A block is too little.
        scene.presence.set(0, 16);
        let kinds = [
            (OF_IMAGE, "it continues the copy"),
            (OF_CACHE, "the log of `rewake serve`"),
            (OF_MIGRATION, "the program is lost"),
        ];
        for (kind, then) in kinds {
            let limit = ArrivalLimit { time: Duration::from_millis(300), ..kind };
            let why = scene.files.wait_with_limit(&needed(0..LEN), limit).unwrap_err().to_string();
            assert!(why.contains("0 KiB of it arrived in 0 s, and 1024 KiB are the least"), "{why}");
            assert!(why.contains(then), "{why}");
        }
    }
}
