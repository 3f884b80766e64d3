// SPDX-License-Identifier: MIT OR Apache-2.0
//! Page servers for dumps and for lazy restores, ours and CRIU's own, and a client that sends what it likes.
//! The client has headers of its own, so that it does not share our codec's mistakes.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;

use anyhow::{Context, bail};
use nix::fcntl::OFlag;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, pipe2};
use rewake_testkit::authority::{Authority, Issued};
use tempfile::TempDir;

use crate::criu::Criu;
use crate::process::{PATIENCE, ProcessId as _, wait_child};
use crate::server::{ready, rewake, with_status_fd};

/// Bytes of a page.
const PAGE: usize = 4096;

/// A page server. Dropping it kills it.
#[derive(Debug)]
pub struct PageServer {
    child: Child,
    port: u16,
    work: TempDir,
    /// Further options of its clients.
    for_clients: Vec<String>,
}

/// Why a page server did not start.
#[derive(Debug)]
pub struct NotListening {
    /// Its exit code.
    pub code: Option<i32>,
    /// What it wrote.
    pub text: String,
}

impl PageServer {
    /// Starts `rewake page-server` with a directory, a port and further options, which must listen.
    ///
    /// # Errors
    /// It does not.
    pub fn ours(images: &Path, options: &[&str]) -> anyhow::Result<Self> {
        Self::try_ours(images, options)?.map_err(|refused| anyhow::anyhow!("{refused:?}"))
    }

    /// [`PageServer::ours`], which may refuse: the inner error.
    ///
    /// # Errors
    /// The machine or the test is broken.
    pub fn try_ours(images: &Path, options: &[&str]) -> anyhow::Result<Result<Self, NotListening>> {
        Self::start(rewake()?.as_os_str(), images, options)
    }

    /// Starts `criu page-server`.
    ///
    /// # Errors
    /// It does not listen.
    pub fn stock(criu: &Criu, images: &Path, options: &[&str]) -> anyhow::Result<Self> {
        Self::start(criu.as_ref(), images, options)?.map_err(|refused| anyhow::anyhow!("{refused:?}"))
    }

    fn start(program: &OsStr, images: &Path, options: &[&str]) -> anyhow::Result<Result<Self, NotListening>> {
        let work = tempfile::Builder::new().prefix("rewake-pages-").tempdir().context("make a directory")?;
        let port = free_port()?;
        let mut command = Command::new(program);
        command.arg("page-server").arg("-D").arg(images).arg("-W").arg(work.path());
        command.args(["-v4", "-o", "page-server.log"]).args(options);
        if !options.iter().any(|option| ["--address", "--ps-socket"].contains(option)) {
            command.args(["--address", "127.0.0.1", "--port", &port.to_string()]);
        }
        let (reader, writer) = pipe2(OFlag::O_CLOEXEC).context("status pipe")?;
        let output = File::create(work.path().join("page-server.out"))?;
        let mut command = with_status_fd(&command, writer);
        command.stdout(output.try_clone()?).stderr(output);
        let child = command.spawn().context("start the page server")?;
        drop(command);
        let mut server = Self { child, port, work, for_clients: Vec::new() };
        if ready(reader)? {
            return Ok(Ok(server));
        }
        let status = server.ended()?;
        Ok(Err(NotListening { code: status.code(), text: server.text() }))
    }

    /// The options that name it to `criu dump` and `criu lazy-pages`.
    #[must_use]
    pub fn client_options(&self) -> Vec<String> {
        [client_options(self.port), self.for_clients.clone()].concat()
    }

    /// The TCP port that it listens on.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Gives its clients further options.
    #[must_use]
    pub fn with_clients(mut self, options: &[String]) -> Self {
        self.for_clients = options.to_owned();
        self
    }

    /// Connects to it.
    ///
    /// # Errors
    /// It refuses.
    pub fn connect(&self, kind: Peer) -> anyhow::Result<PageClient> {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).context("connect")?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        Ok(PageClient { stream, kind })
    }

    /// The work directory.
    #[must_use]
    pub fn work(&self) -> &Path {
        self.work.path()
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> Pid {
        self.child.id().pid()
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It did not end in time.
    pub fn ended(&mut self) -> anyhow::Result<ExitStatus> {
        let ended = wait_child(&mut self.child, PATIENCE);
        ended.with_context(|| format!("the page server did not end\n{}", self.text()))
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// It has ended.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        kill(self.pid(), signal).context("a signal to the page server")
    }

    /// Everything that it wrote.
    #[must_use]
    pub fn text(&self) -> String {
        let read = |name: &str| {
            let bytes = fs::read(self.work.path().join(name)).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        read("page-server.out") + &read("page-server.log")
    }
}

impl Drop for PageServer {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.text());
        }
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A port that no process uses at the moment.
pub(crate) fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("a free port")?.local_addr()?.port())
}

/// A relay between a client and a page server, which keeps what the client sent.
#[derive(Debug)]
pub struct Recorder {
    port: u16,
    relay: JoinHandle<anyhow::Result<Vec<u8>>>,
}

impl Recorder {
    /// Starts a relay to a server, for one client.
    ///
    /// # Errors
    /// The machine has no port.
    pub fn before(server: &PageServer) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let (port, to) = (listener.local_addr()?.port(), server.port);
        let relay = std::thread::spawn(move || {
            let (client, _) = listener.accept()?;
            let server = TcpStream::connect((Ipv4Addr::LOCALHOST, to))?;
            let (mut answers, mut back) = (server.try_clone()?, client.try_clone()?);
            let answering = std::thread::spawn(move || std::io::copy(&mut answers, &mut back));
            let sent = record(client, server)?;
            let _ = answering.join();
            Ok(sent)
        });
        Ok(Self { port, relay })
    }

    /// The options that name the relay to `criu dump`.
    #[must_use]
    pub fn client_options(&self) -> Vec<String> {
        client_options(self.port)
    }

    /// What the client sent, once it has ended.
    ///
    /// # Errors
    /// A connection was lost.
    pub fn sent(self) -> anyhow::Result<Vec<u8>> {
        self.relay.join().unwrap_or_else(|_| bail!("the relay has ended"))
    }
}

fn record(mut client: TcpStream, mut server: TcpStream) -> anyhow::Result<Vec<u8>> {
    let mut sent = Vec::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match client.read(&mut buffer)? {
            0 => break,
            len => {
                server.write_all(&buffer[..len])?;
                sent.extend_from_slice(&buffer[..len]);
            }
        }
    }
    server.shutdown(Shutdown::Write)?;
    Ok(sent)
}

/// The options that name a page server on this host to a client.
#[must_use]
pub fn client_options(port: u16) -> Vec<String> {
    let options = ["--page-server", "--address", "127.0.0.1", "--port", &port.to_string()];
    options.into_iter().map(str::to_owned).collect()
}

/// The options of TLS for a peer with this certificate.
#[must_use]
pub fn tls_options(authority: &Authority, own: &Issued) -> Vec<String> {
    let files =
        [("--tls-cacert", &authority.ca()), ("--tls-cert", &own.certificate), ("--tls-key", &own.key)];
    let files = files.into_iter().flat_map(|(name, path)| [name.to_owned(), path.display().to_string()]);
    std::iter::once("--tls".to_owned()).chain(files).collect()
}

/// `criu lazy-pages` that gets pages from a page server. Dropping it kills it.
#[derive(Debug)]
pub struct StockLazyPages {
    child: Child,
    work: PathBuf,
}

impl StockLazyPages {
    /// Starts it for the images of a restore, and waits until it listens.
    ///
    /// # Errors
    /// It does not.
    pub fn listening(criu: &Criu, images: &Path, work: &Path, server: &PageServer) -> anyhow::Result<Self> {
        let mut command = criu.command("lazy-pages");
        command.arg("-D").arg(images).arg("-W").arg(work).args(["-v4", "-o", "lazy.log"]);
        command.args(server.client_options());
        let (reader, writer) = pipe2(OFlag::O_CLOEXEC).context("status pipe")?;
        let mut command = with_status_fd(&command, writer);
        let child =
            command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().context("start criu lazy-pages")?;
        drop(command);
        let lazy = Self { child, work: work.to_owned() };
        if ready(reader)? { Ok(lazy) } else { bail!("criu lazy-pages does not listen\n{}", lazy.text()) }
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It did not end in time.
    pub fn ended(&mut self) -> anyhow::Result<ExitStatus> {
        wait_child(&mut self.child, PATIENCE).with_context(|| format!("it did not end\n{}", self.text()))
    }

    fn text(&self) -> String {
        crate::process::tail(&self.work.join("lazy.log"), 40)
    }
}

impl Drop for StockLazyPages {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whose headers a client sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// CRIU 4.1.1: 24 bytes.
    Old,
    /// CRIU 4.2.1: 32 bytes, with garbage as padding.
    New,
}

/// Commands of the protocol, with the flags of pages.
pub mod command {
    /// Pages of a memory follow.
    pub const OPEN: u32 = 4;
    /// Does the parent have this memory?
    pub const PARENT: u32 = 5;
    /// Pages in the parent.
    pub const HOLE: u32 = 6 | 1 << 16;
    /// Pages in the client.
    pub const LAZY_ALONE: u32 = 6 | 2 << 16;
    /// Pages that follow.
    pub const PRESENT: u32 = 6 | 4 << 16;
    /// Lazy pages that follow.
    pub const LAZY: u32 = 6 | 6 << 16;
    /// Lazy pages that follow, compressed.
    pub const COMPRESSED: u32 = 8 | 6 << 16;
    /// Requests pages.
    pub const GET: u32 = 7;
    /// The end.
    pub const CLOSE: u32 = 0x1023;
}

/// A connection that a test speaks on.
#[derive(Debug)]
pub struct PageClient {
    stream: TcpStream,
    kind: Peer,
}

/// The number of a task's memory.
#[must_use]
pub fn task(pid: u64) -> u64 {
    pid << 8 | 1
}

/// The number of a shared memory object.
#[must_use]
pub fn shared(id: u64) -> u64 {
    id << 8 | 2
}

/// A header.
#[must_use]
pub fn header(kind: Peer, command: u32, pages: u64, vaddr: u64, id: u64) -> Vec<u8> {
    let count = u32::try_from(pages).unwrap_or(u32::MAX);
    let words = |list: &[u64]| list.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
    match kind {
        Peer::Old => [&command.to_le_bytes()[..], &count.to_le_bytes(), &words(&[vaddr, id])].concat(),
        Peer::New => [&command.to_le_bytes()[..], &[0x55, 0x55, 0, 0], &words(&[pages, vaddr, id])].concat(),
    }
}

impl PageClient {
    /// Sends a header, and bytes after it.
    ///
    /// # Errors
    /// The server has closed the connection.
    pub fn send(
        &mut self,
        command: u32,
        pages: u64,
        vaddr: u64,
        id: u64,
        bytes: &[u8],
    ) -> anyhow::Result<()> {
        let message = [&header(self.kind, command, pages, vaddr, id)[..], bytes].concat();
        self.stream.write_all(&message).context("send a message")
    }

    /// Begins a memory; whether the parent has it.
    ///
    /// # Errors
    /// The server gives no answer.
    pub fn open(&mut self, id: u64) -> anyhow::Result<bool> {
        self.send(command::OPEN, 0, 0, id, &[])?;
        Ok(self.receive::<1>()? == [1])
    }

    /// Says that this is all, and waits for the answer.
    ///
    /// # Errors
    /// The server gives none.
    pub fn close(&mut self) -> anyhow::Result<i32> {
        self.send(command::CLOSE, 0, 0, 0, &[])?;
        Ok(i32::from_le_bytes(self.receive()?))
    }

    /// Requests pages; the address and the bytes of the answer.
    ///
    /// # Errors
    /// The server gives none.
    pub fn get(&mut self, pid: u64, vaddr: u64, pages: u64) -> anyhow::Result<(u64, Vec<u8>)> {
        self.send(command::GET, pages, vaddr, pid, &[])?;
        let (count, vaddr, id) = match self.kind {
            Peer::Old => {
                let answer: [u8; 24] = self.receive()?;
                (u32::from_le_bytes(answer[4..8].try_into()?).into(), word(&answer, 8)?, word(&answer, 16)?)
            }
            Peer::New => {
                let answer: [u8; 32] = self.receive()?;
                (word(&answer, 8)?, word(&answer, 16)?, word(&answer, 24)?)
            }
        };
        anyhow::ensure!(id == pid && count > 0 && count <= pages, "{count} pages of {id}");
        let mut bytes = vec![0; usize::try_from(count)? * PAGE];
        self.stream.read_exact(&mut bytes).context("pages")?;
        Ok((vaddr, bytes))
    }

    /// Sends bytes that another client sent, and waits until the server closes the connection.
    ///
    /// # Errors
    /// The server has closed it before.
    pub fn replay(mut self, sent: &[u8]) -> anyhow::Result<()> {
        self.stream.write_all(sent).context("replay")?;
        self.stream.shutdown(Shutdown::Write)?;
        self.stream.read_to_end(&mut Vec::new()).map(drop).context("answers")
    }

    /// Receives bytes.
    ///
    /// # Errors
    /// The server has closed the connection.
    pub fn receive<const N: usize>(&mut self) -> anyhow::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).context("an answer")?;
        Ok(bytes)
    }

    /// Whether the server has closed the connection without another byte.
    pub fn is_closed(&mut self) -> bool {
        matches!(self.stream.read(&mut [0]), Ok(0) | Err(_))
    }
}

fn word(bytes: &[u8], at: usize) -> anyhow::Result<u64> {
    Ok(u64::from_le_bytes(bytes[at..at + 8].try_into()?))
}

/// The names and bytes of the visible memory files of a directory.
///
/// # Errors
/// It cannot be read.
pub fn memory_files(images: &Path) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(images)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.starts_with("pages-") || name.starts_with("pagemap-") {
            files.push((name.clone(), fs::read(images.join(&name))?));
        }
    }
    files.sort();
    Ok(files)
}
