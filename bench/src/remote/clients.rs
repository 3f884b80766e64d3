// SPDX-License-Identifier: MIT OR Apache-2.0
//! Clients that read all pages of one image at once, from one page server: what the server reads, and the
//! rate of each client. They only receive, so that the server is what is measured.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use nix::sys::signal::Signal;
use rewake_criu_images::{ImageDir, LazyExtent, PAGE};
use rewake_page_protocol::{CLOSED, HeaderLayout, PageMessage, PageRun, WIDE_LEN, answer_header};

use super::round::{address, free_port};
use crate::cache;
use crate::lazy::Image;
use crate::processes::{Watch, anonymous_and_shared, read_bytes};
use crate::report::Spread;

/// Clients at once.
pub(super) const CLIENTS: usize = 8;
/// Pages of one request, as many as rewake's client requests.
const REQUEST: u64 = 64;
/// Requests in flight.
const IN_FLIGHT: usize = 2;
/// Time in which a server sends something.
const LIMIT: Duration = Duration::from_secs(60);

/// What some clients at once got.
#[derive(Debug, Clone, Copy)]
pub(super) struct ServedClients {
    /// Bytes that the server has read from the disk.
    pub(super) read: u64,
    /// Rates of the clients, in GB/s.
    pub(super) rates: Spread,
    /// Anonymous and shared memory of the largest process of the server, in bytes.
    pub(super) memory: u64,
}

/// Has `clients` clients read all lazy pages of the image, which the page cache does not have before.
pub(super) fn measure(
    rewake: &Path,
    image: &Image,
    clients: usize,
    work: &Path,
) -> anyhow::Result<ServedClients> {
    let dumped = &image.dumped;
    cache::drop_files(&dumped.page_files)?;
    let port = free_port()?;
    let options = ["--lazy-pages", "--keep-listening"].map(str::to_owned).to_vec();
    let mut server = dumped.listen(rewake, "page-server", &[options, address(port)].concat(), work)?;
    let watch = Watch::start(server.pid(), anonymous_and_shared);
    let before = read_bytes(server.pid())?;
    let pid = u32::try_from(dumped.pid.as_raw())?;
    let requests = requests(&dumped.directory, pid)?;
    let rates = std::thread::scope(|scope| {
        let all: Vec<_> = (0..clients).map(|_| scope.spawn(|| read_all(port, pid, &requests))).collect();
        let join =
            |client: std::thread::ScopedJoinHandle<'_, _>| client.join().expect("a client returns errors");
        all.into_iter().map(join).collect::<anyhow::Result<Vec<f64>>>()
    })?;
    let read = read_bytes(server.pid())? - before;
    server.signal(Signal::SIGTERM)?;
    dumped.served(&mut server, work)?;
    let rates = Spread::of(rates).context("no client")?;
    Ok(ServedClients { read, rates, memory: watch.reap().largest() })
}

/// Cuts the lazy pages into requests.
fn requests(directory: &Path, pid: u32) -> anyhow::Result<Vec<PageRun>> {
    let plan = ImageDir::open(directory)?.lazy_plan(pid)?;
    let cut = |extent: &LazyExtent| {
        let (start, end) = (extent.vaddr, extent.end());
        let step = usize::try_from(REQUEST * PAGE).unwrap_or(usize::MAX);
        (start..end).step_by(step).map(move |at| PageRun::new(at, REQUEST.min((end - at) / PAGE)))
    };
    Ok(plan.extents.iter().flat_map(cut).collect::<Result<_, _>>()?)
}

/// Reads all pages. Returns the rate in GB/s.
fn read_all(port: u16, pid: u32, requests: &[PageRun]) -> anyhow::Result<f64> {
    let layout = HeaderLayout::Wide;
    let began = Instant::now();
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).context("connecting")?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.set_write_timeout(Some(LIMIT))?;
    let mut ahead = requests.iter();
    let mut send = |stream: &mut TcpStream| -> anyhow::Result<()> {
        let Some(run) = ahead.next() else { return Ok(()) };
        Ok(stream.write_all(&layout.encode(&PageMessage::Get { pid, run: *run }.header())?)?)
    };
    (0..IN_FLIGHT).try_for_each(|_| send(&mut stream))?;
    let mut buffer = vec![0; usize::try_from(REQUEST * PAGE)?];
    for run in requests {
        let mut header = [0; WIDE_LEN];
        stream.read_exact(&mut header).context("an answer")?;
        ensure!(layout.decode(&header) == answer_header(pid, *run), "an answer to another request");
        stream.read_exact(&mut buffer[..usize::try_from(run.pages() * PAGE)?]).context("pages")?;
        send(&mut stream)?;
    }
    stream.write_all(&layout.encode(&PageMessage::Close { forced: false }.header())?)?;
    let mut closed = CLOSED;
    stream.read_exact(&mut closed).context("the answer to the last message")?;
    let pages: u64 = requests.iter().map(|run| run.pages()).sum();
    Ok((pages * PAGE) as f64 / 1e9 / began.elapsed().as_secs_f64())
}
