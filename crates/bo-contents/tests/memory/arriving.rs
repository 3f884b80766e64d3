// SPDX-License-Identifier: MIT OR Apache-2.0
//! Buffers whose bytes arrive from another host while they are loaded: they become resident with the bytes
//! that were sealed, or not at all.

use std::cell::RefCell;
use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread::scope;
use std::time::Duration;

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, setsockopt, socketpair, sockopt};
use nix::sys::time::{TimeVal, TimeValLike as _};
use rewake_bo_contents::{
    BackgroundLoad, Error, GpuPagesFile, LoadEvent, LoadHandle, ProcessBuffers, Report,
};
use rewake_image_io::{
    BLOCK, Class, FetchReader, FetchRequest, FetchSource, FetchedFile, ImageFile, PAGE, PresenceMap,
    PresenceWriter, presence_file,
};
use rewake_manifest::read_checksums;
use rewake_process::wake_socket::WakeSocket;

use crate::scene::{CHUNK, Scene, pattern};

/// On GPU 7 a large buffer, one after it and one of zeros, and small ones on GPU 8.
const SIZES: [usize; 5] = [12 * CHUNK, 4096, 2 * CHUNK, 4096, 3 * CHUNK];
/// The buffer of zeros.
const ZEROS: usize = 4;
const READER: u8 = 5;
/// After this time without a request, the load sends none.
const QUIET: Duration = Duration::from_millis(300);
const LIMIT: Duration = Duration::from_secs(30);

/// A file of the image: where its bytes are in the presence map, and the bytes.
struct Original {
    file: File,
    first: u64,
    bytes: Vec<u8>,
}

/// The bytes of a buffer.
fn contents(buffer: usize, size: usize) -> Vec<u8> {
    if buffer == ZEROS { vec![0; size] } else { pattern(buffer, size) }
}

/// A sealed image none of whose bytes are here, and what brings them.
struct Arriving {
    scene: Scene,
    sizes: Vec<usize>,
    files: Vec<GpuPagesFile>,
    originals: Vec<Original>,
    source: Arc<FetchSource>,
    presence: PresenceWriter,
    reader: FetchReader,
    /// The fetcher's end of the socket.
    socket: RefCell<OwnedFd>,
}

fn socket_of(source: &FetchSource) -> OwnedFd {
    let (ours, its) =
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
    let limit = TimeVal::milliseconds(i64::try_from(QUIET.as_millis()).unwrap());
    setsockopt(&its, sockopt::ReceiveTimeout, &limit).unwrap();
    source.use_fetcher(ours);
    its
}

impl Arriving {
    fn new() -> Self {
        Self::with(&SIZES)
    }

    fn with(sizes: &[usize]) -> Self {
        let scene = Scene::new(sizes);
        (0..sizes.len()).for_each(|buffer| scene.put(buffer, 0, &contents(buffer, sizes[buffer])));
        scene.seal();
        let sealed = read_checksums(&scene.images()).unwrap().unwrap();
        let (mut originals, mut next) = (Vec::new(), 0);
        for gpu in [7, 8] {
            let file = File::options().read(true).write(true).open(scene.path(gpu)).unwrap();
            let bytes = std::fs::read(scene.path(gpu)).unwrap();
            let first = next;
            next += (bytes.len().next_multiple_of(BLOCK) / PAGE) as u64;
            file.set_len(0).unwrap();
            file.set_len(bytes.len() as u64).unwrap();
            originals.push(Original { file, first, bytes });
        }
        let memory = presence_file(next * PAGE as u64).unwrap();
        let map = PresenceMap::open(memory.as_fd(), next * PAGE as u64).unwrap();
        let presence = PresenceWriter::open(memory.as_fd(), next * PAGE as u64).unwrap();
        let source = Arc::new(FetchSource::new(map));
        let file = |(gpu, original): (u32, &Original)| {
            let fetched = FetchedFile { source: Arc::clone(&source), first: original.first };
            let file =
                ImageFile::fetched(original.file.try_clone().unwrap(), scene.path(gpu), fetched).unwrap();
            let name = scene.path(gpu).file_name().unwrap().to_str().unwrap().to_owned();
            file.verify_with(sealed.of(&name, file.len()).unwrap());
            GpuPagesFile::arriving(&file, &scene.image, gpu, 120 + gpu).unwrap()
        };
        let files = [7, 8].into_iter().zip(&originals).map(file).collect();
        let reader = FetchReader { number: READER, waker: WakeSocket::new().unwrap() };
        let socket = RefCell::new(socket_of(&source));
        let sizes = sizes.to_vec();
        Self { scene, sizes, files, originals, source, presence, reader, socket }
    }

    /// The next request of the load; none for some time.
    fn next(&self) -> Option<FetchRequest> {
        let mut bytes = [0; 64];
        let length = recv(self.socket.borrow().as_raw_fd(), &mut bytes, MsgFlags::empty()).ok()?;
        let request = FetchRequest::decode(&bytes[..length])?;
        assert_eq!(request.reader, READER);
        Some(request)
    }

    /// All requests until the load sends none.
    fn requests(&self) -> Vec<FetchRequest> {
        std::iter::from_fn(|| self.next()).collect()
    }

    /// The whole blocks of a request arrive. `spoil` is called with the bytes of each.
    fn bring(&self, request: &FetchRequest, spoil: impl Fn(&mut [u8])) {
        let block = (BLOCK / PAGE) as u64;
        let end = (request.first + u64::from(request.pages)).next_multiple_of(block);
        for page in (request.first / block * block..end).step_by(BLOCK / PAGE) {
            let original = self.originals.iter().rfind(|original| original.first <= page).unwrap();
            let start = usize::try_from(page - original.first).unwrap() * PAGE;
            let mut bytes = original.bytes[start..original.bytes.len().min(start + BLOCK)].to_vec();
            spoil(&mut bytes);
            original.file.write_all_at(&bytes, start as u64).unwrap();
            self.presence.set(page, (bytes.len() as u64).div_ceil(PAGE as u64));
        }
        self.reader.waker.wake();
    }

    /// All blocks of both files are here, but these chunks of GPU 7's.
    fn bring_but(&self, absent: std::ops::Range<usize>) {
        for (number, original) in self.originals.iter().enumerate() {
            for start in (0..original.bytes.len()).step_by(BLOCK) {
                if number > 0 || !absent.contains(&(start / CHUNK)) {
                    let first = original.first + (start / PAGE) as u64;
                    let block = FetchRequest { class: Class::Background, reader: READER, pages: 1, first };
                    self.bring(&block, |_| {});
                }
            }
        }
        self.reader.waker.drain();
    }

    /// Loads all buffers while `act` plays the fetcher: it gets the handle of the load, and its events.
    fn load(&self, act: impl FnOnce(&LoadHandle, &Receiver<LoadEvent>)) -> Result<Option<Report>, Error> {
        let processes = [ProcessBuffers { files: &self.files, dmabufs: &self.scene.memfds }];
        let loading = BackgroundLoad::into_memory(&processes, &self.scene.device, None).unwrap();
        let loading = loading.fetched_by(Some(self.reader.clone()));
        let (handle, (sender, events)) = (loading.handle(), channel());
        scope(|scope| {
            let load = scope.spawn(move || loading.run(move |event| sender.send(event).unwrap()));
            let _ends = EndsAfterPanic(self);
            act(&handle, &events);
            load.join().unwrap()
        })
    }

    fn bring_all(&self, events: &Receiver<LoadEvent>) {
        loop {
            self.requests().iter().for_each(|request| self.bring(request, |_| {}));
            if events.try_iter().any(|event| event == LoadEvent::Process { process: 0 }) {
                return;
            }
        }
    }

    fn is_right(&self) {
        for (buffer, size) in self.sizes.iter().enumerate() {
            assert!(self.scene.memory(buffer) == contents(buffer, *size), "buffer {buffer}");
        }
    }
}

/// Ends the source when a test fails, so that its load does not wait for ever.
struct EndsAfterPanic<'a>(&'a Arriving);

impl Drop for EndsAfterPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.source.end();
            self.0.reader.waker.wake();
        }
    }
}

/// Receives the events of `count` buffers, and returns the buffers in ascending order.
fn resident(events: &Receiver<LoadEvent>, count: usize) -> Vec<usize> {
    let buffer = |_| match events.recv_timeout(LIMIT).expect("a buffer is resident in time") {
        LoadEvent::Buffer { number, .. } => number,
        LoadEvent::Process { .. } => panic!("the process is resident"),
    };
    let mut buffers: Vec<usize> = (0..count).map(buffer).collect();
    buffers.sort_unstable();
    buffers
}

#[test]
fn what_is_here_does_not_wait_for_absent_chunks() {
    for demand in [false, true] {
        let arriving = Arriving::new();
        arriving.bring_but(0..8);
        let report = arriving.load(|handle, events| {
            if demand {
                handle.demand(0, 0);
                handle.demand(0, 2);
            }
            assert_eq!(resident(events, 4), [1, 2, 3, ZEROS], "no chunk of buffer 0 has arrived");
            let mut requests = arriving.requests();
            assert!(requests.len() >= 2, "{requests:?}");
            while !requests.is_empty() {
                requests.iter().for_each(|request| arriving.bring(request, |_| {}));
                requests = arriving.requests();
            }
            assert_eq!(resident(events, 1), [0]);
        });
        assert!(report.unwrap().is_some());
        arriving.is_right();
    }
}

#[test]
fn a_demand_has_room_beside_chunks_demanded_in_flight() {
    let arriving = Arriving::with(&[4 * CHUNK - 8, 4096, 12 * CHUNK]);
    arriving.bring_but(0..16);
    let report = arriving.load(|handle, events| {
        let background = arriving.requests();
        assert_eq!(background.len(), 4, "{background:?}");
        handle.demand(0, 0);
        let again = arriving.requests();
        assert_eq!(again.len(), 4, "{again:?}");
        handle.demand(0, 2);
        let more = arriving.requests();
        assert_eq!(more.len(), 2, "{more:?}");
        assert!(more.iter().all(|request| request.class == Class::Demand), "{more:?}");
        background.iter().chain(&more).for_each(|request| arriving.bring(request, |_| {}));
        arriving.bring_all(events);
    });
    assert!(report.unwrap().is_some());
    arriving.is_right();
}

#[test]
fn each_byte_is_loaded_when_it_has_arrived() {
    let arriving = Arriving::new();
    let report = arriving.load(|_, events| {
        let first = arriving.requests();
        assert!(!first.is_empty() && first.iter().all(|request| request.class == Class::Background));
        // 2 MiB each at most.
        assert!(first.len() <= 4, "{first:?}");
        assert!(events.try_recv().is_err());
        assert!(arriving.scene.memory(0).iter().all(|byte| *byte == 0xee), "no byte has arrived");
        first.iter().for_each(|request| arriving.bring(request, |_| {}));
        arriving.bring_all(events);
    });
    assert!(report.unwrap().is_some());
    arriving.is_right();
}

#[test]
fn a_demanded_buffer_is_requested_at_once() {
    let arriving = Arriving::new();
    let report = arriving.load(|handle, events| {
        let background = arriving.requests();
        handle.demand(0, 2);
        let demanded = arriving.requests();
        assert!(!demanded.is_empty() && demanded.iter().all(|request| request.class == Class::Demand));
        demanded.iter().for_each(|request| arriving.bring(request, |_| {}));
        while let Some(request) = arriving.next() {
            assert_eq!(request.class, Class::Demand);
            arriving.bring(&request, |_| {});
        }
        // Its last chunk has the first zeros, too.
        assert_eq!(resident(events, 2), [2, ZEROS]);
        background.iter().for_each(|request| arriving.bring(request, |_| {}));
        arriving.bring_all(events);
    });
    assert!(report.unwrap().is_some());
    arriving.is_right();
}

#[test]
fn a_demand_for_a_chunk_in_flight_is_requested_again() {
    let arriving = Arriving::new();
    let report = arriving.load(|handle, events| {
        let background = arriving.requests();
        handle.demand(0, 0);
        let again = arriving.requests();
        let place = |request: &FetchRequest| (request.first, request.pages);
        let is_again = |request: &FetchRequest| {
            request.class == Class::Demand && background.iter().any(|other| place(other) == place(request))
        };
        assert!(again.iter().any(is_again), "{background:?} {again:?}");
        background.iter().chain(&again).for_each(|request| arriving.bring(request, |_| {}));
        arriving.bring_all(events);
    });
    assert!(report.unwrap().is_some());
    arriving.is_right();
}

#[test]
fn another_fetcher_gets_the_requests_of_a_dead_one() {
    let arriving = Arriving::new();
    let report = arriving.load(|_, events| {
        let before = arriving.requests();
        arriving.socket.replace(socket_of(&arriving.source));
        arriving.reader.waker.wake();
        let again = arriving.requests();
        assert!(!before.is_empty());
        assert_eq!(again, before);
        again.iter().for_each(|request| arriving.bring(request, |_| {}));
        arriving.bring_all(events);
    });
    assert!(report.unwrap().is_some());
    arriving.is_right();
}

#[test]
fn a_load_ends_when_no_more_bytes_arrive() {
    let arriving = Arriving::new();
    let ended = arriving.load(|_, _| {
        assert!(arriving.next().is_some());
        arriving.source.end();
        arriving.reader.waker.wake();
    });
    assert!(matches!(ended, Err(Error::Lost(_))), "{ended:?}");
    assert!(arriving.scene.memory(0).iter().all(|byte| *byte == 0xee), "no byte is made up");
}

#[test]
fn a_wrong_byte_that_arrives_is_never_loaded() {
    let arriving = Arriving::new();
    let ended = arriving.load(|_, events| {
        let flip = |bytes: &mut [u8]| bytes[bytes.len() / 2] ^= 0x40;
        arriving.requests().iter().for_each(|request| arriving.bring(request, flip));
        assert!(events.recv_timeout(LIMIT).is_err(), "no buffer is resident");
    });
    let error = ended.unwrap_err().to_string();
    assert!(error.contains("some are not those that were sealed"), "{error}");
}
