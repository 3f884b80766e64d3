// SPDX-License-Identifier: MIT OR Apache-2.0
//! Accepts clients: one, as `criu page-server` does, or many.

use std::cell::Cell;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use rewake_criu_tls::TlsServer;
use rewake_process::time_slice;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::{LocalSet, spawn_local};
use tokio::time::sleep;
use tracing::{error, info, warn};

use crate::page_server::connection::PageConnection;
use crate::page_server::endpoint::{ConnectedClient, Door, Entrance};
use crate::page_server::receive::{self, Receiver};
use crate::page_server::serve::{self, ServedImage};

/// Clients at once. Each has a buffer of 320 KiB, and two files at most.
const MAX_CLIENTS: usize = 128;
/// Threads for calls that wait for the disk.
const DISK_THREADS: usize = 16;
/// Pause after a client could not be accepted, because descriptors or memory are then used up for a moment.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(100);

/// What a server does for its clients.
#[derive(Debug)]
pub enum Role {
    /// It receives dumps.
    Receive(Receiver),
    /// It serves an image.
    Serve(Box<ServedImage>),
}

/// What a page server does, and for whom.
#[derive(Debug)]
pub struct PageService {
    /// What it does.
    pub role: Role,
    /// Its certificate, and which clients it accepts; none: without encryption.
    pub tls: Option<TlsServer>,
    /// Whether it serves clients until SIGTERM or SIGINT, and logs those that fail. Otherwise it serves one.
    pub keep_listening: bool,
}

/// Serves clients. `ready` is called when they can connect.
///
/// # Errors
/// The only client failed, or a signal came before it was done. What clients failed at is logged, too.
pub fn run(server: PageService, entrance: Entrance, ready: impl FnOnce()) -> anyhow::Result<()> {
    // Where programs compete for processors, a thread that waits for a page is served sooner. Without it, a
    // little later.
    let _ = time_slice::short_time_slice();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(DISK_THREADS)
        .build()
        .context("starting the runtime")?;
    LocalSet::new().block_on(&runtime, async {
        let mut stop = StopSignals::watch()?;
        let stop = pin!(stop.next());
        let place = entrance.to_string();
        let door = Door::of(entrance).with_context(|| format!("listening on {place}"))?;
        let server = Rc::new(server);
        ready();
        info!("listening on {place}");
        if server.keep_listening { many(&server, door, stop).await } else { one(&server, door, stop).await }
    })
}

impl PageService {
    /// Waits until no image is half published.
    async fn settled(&self) {
        match &self.role {
            Role::Receive(receiver) => receiver.settled().await,
            Role::Serve(_) => {}
        }
    }
}

/// Serves the first client. The socket is closed when it has connected: no other client waits in vain. `stop`
/// is the name of a signal.
async fn one(
    server: &PageService,
    mut door: Door,
    mut stop: Pin<&mut impl Future<Output = &'static str>>,
) -> anyhow::Result<()> {
    let arrival = tokio::select! {
        arrival = door.next() => arrival?,
        name = &mut stop => bail!("{name} before a client connected"),
    };
    drop(door);
    let mut served = pin!(client(server, arrival));
    let name = tokio::select! {
        served = &mut served => return served,
        name = &mut stop => name,
    };
    // An image that is being published becomes visible, and then the client is done.
    tokio::select! {
        biased;
        served = &mut served => served,
        () = server.settled() => bail!("{name} before the client was done"),
    }
}

/// Serves all clients until `stop`, the name of a signal.
async fn many(
    server: &Rc<PageService>,
    mut door: Door,
    mut stop: Pin<&mut impl Future<Output = &'static str>>,
) -> anyhow::Result<()> {
    let clients = Rc::new(Cell::new(0));
    loop {
        let arrival = tokio::select! {
            arrival = door.next() => arrival,
            name = &mut stop => {
                server.settled().await;
                info!("{name}: ending, {} clients are cut", clients.get());
                return Ok(());
            }
        };
        let arrival = match arrival {
            Ok(arrival) => arrival,
            Err(error) => {
                warn!("{error:#}");
                sleep(ACCEPT_INTERVAL).await;
                continue;
            }
        };
        if clients.get() >= MAX_CLIENTS {
            error!("client {}: turned away, MAX_CLIENTS = {MAX_CLIENTS} are connected", arrival.peer);
            continue;
        }
        clients.set(clients.get() + 1);
        let (server, clients) = (Rc::clone(server), Rc::clone(&clients));
        spawn_local(async move {
            // It is logged.
            let _ = client(&server, arrival).await;
            clients.set(clients.get() - 1);
        });
    }
}

/// Serves one client to its end.
async fn client(server: &PageService, arrival: ConnectedClient) -> anyhow::Result<()> {
    let peer = arrival.peer.clone();
    info!("client {peer}: connected");
    let served = async {
        let mut connection = PageConnection::begin(arrival, server.tls.as_ref()).await?;
        match &server.role {
            Role::Receive(receiver) => receive::receive(receiver, &mut connection).await,
            Role::Serve(image) => serve::serve(image, &mut connection).await,
        }
    };
    let served = served.await.with_context(|| format!("client {peer}"));
    if let Err(error) = &served {
        error!("{error:#}");
    }
    served
}

/// The signals that end a server.
struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    fn watch() -> anyhow::Result<Self> {
        let terminate = signal(SignalKind::terminate()).context("watching SIGTERM")?;
        let interrupt = signal(SignalKind::interrupt()).context("watching SIGINT")?;
        Ok(Self { terminate, interrupt })
    }

    /// Waits for one, and returns its name.
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::Path;
    use std::sync::mpsc;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::sync::oneshot;
    use tokio::task::{JoinHandle, spawn_blocking, yield_now};
    use tokio::time::timeout;

    use super::*;
    use crate::page_server::receive::ReceiveOptions;

    /// Time that a server has to do something that it must not do.
    const WAIT: Duration = Duration::from_millis(100);
    const LIMIT: Duration = Duration::from_secs(60);
    const OPEN: u32 = 4;
    const PAGES: u32 = 6 | 6 << 16;
    const CLOSE: u32 = 0x1023;
    const UNKNOWN: u32 = 9;
    const TASK: u64 = 7 << 8 | 1;

    /// Runs a test with one thread for calls that wait for the disk.
    fn with_one_disk_thread(test: impl Future<Output = ()>) {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().max_blocking_threads(1).build().unwrap();
        LocalSet::new().block_on(&runtime, async { timeout(LIMIT, test).await.unwrap() });
    }

    /// Keeps the disk's thread busy until the sender is dropped.
    fn busy_disk() -> mpsc::Sender<()> {
        let (sender, receiver) = mpsc::channel::<()>();
        drop(spawn_blocking(move || receiver.recv()));
        sender
    }

    /// Lets the server do all that it can.
    async fn settle() {
        for _ in 0..100 {
            yield_now().await;
        }
        sleep(WAIT).await;
    }

    fn receiving(images: &Path, keep_listening: bool) -> Rc<PageService> {
        let options = ReceiveOptions { own_folders: keep_listening, ..ReceiveOptions::default() };
        let role = Role::Receive(Receiver::new(images, options).unwrap());
        Rc::new(PageService { role, tls: None, keep_listening })
    }

    struct TestClient(tokio::net::UnixStream);

    impl TestClient {
        /// Makes a client, and what it arrives at.
        fn new() -> (Self, Door) {
            let (near, far) = UnixStream::pair().unwrap();
            far.set_nonblocking(true).unwrap();
            (Self(tokio::net::UnixStream::from_std(far).unwrap()), Door::Connected(Some(near.into())))
        }

        async fn send(&mut self, command: u32, pages: u64, vaddr: u64, id: u64) {
            let numbers = [pages, vaddr, id].map(u64::to_ne_bytes).concat();
            self.0.write_all(&[&command.to_ne_bytes()[..], &[0; 4], &numbers].concat()).await.unwrap();
        }

        /// Opens a memory and sends a page of it.
        async fn send_memory(&mut self) {
            self.send(OPEN, 0, 0, TASK).await;
            self.0.read_u8().await.unwrap();
            self.send(PAGES, 1, 0x10000, TASK).await;
            self.0.write_all(&[5; 4096]).await.unwrap();
        }
    }

    /// Starts a server of one client. The sender is its signal.
    fn started(images: &Path, door: Door) -> (JoinHandle<anyhow::Result<()>>, oneshot::Sender<()>) {
        let (signal, signalled) = oneshot::channel();
        let server = receiving(images, false);
        let served = spawn_local(async move {
            let stop = pin!(async {
                let _ = signalled.await;
                "SIGTERM"
            });
            one(&server, door, stop).await
        });
        (served, signal)
    }

    fn names(images: &Path) -> Vec<String> {
        let entries = fs::read_dir(images).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_signal_while_an_image_is_published_waits_for_it() {
        let images = tempfile::tempdir().unwrap();
        with_one_disk_thread(async {
            let (mut client, door) = TestClient::new();
            let (served, signal) = started(images.path(), door);
            client.send_memory().await;
            let before_sync = busy_disk();
            client.send(CLOSE, 0, 0, 0).await;
            settle().await;
            let before_publishing = busy_disk();
            drop(before_sync);
            settle().await;
            signal.send(()).unwrap();
            settle().await;
            assert!(!served.is_finished(), "half published");
            drop(before_publishing);
            assert_eq!(client.0.read_i32().await.unwrap(), 0);
            drop(client);
            served.await.unwrap().unwrap();
        });
        assert_eq!(names(images.path()), ["pagemap-7.img", "pages-65537.img"]);
    }

    #[test]
    fn a_signal_before_an_image_is_published_leaves_nothing() {
        let images = tempfile::tempdir().unwrap();
        with_one_disk_thread(async {
            let (mut client, door) = TestClient::new();
            let (served, signal) = started(images.path(), door);
            client.send_memory().await;
            let before_sync = busy_disk();
            client.send(CLOSE, 0, 0, 0).await;
            settle().await;
            signal.send(()).unwrap();
            let error = served.await.unwrap().unwrap_err();
            assert_eq!(error.to_string(), "SIGTERM before the client was done");
            drop(before_sync);
            assert_eq!(client.0.read(&mut [0; 4]).await.unwrap(), 0, "no answer");
        });
        assert_eq!(names(images.path()), [""; 0]);
    }

    #[test]
    fn an_answer_that_does_not_arrive_is_no_failure_of_the_image() {
        let images = tempfile::tempdir().unwrap();
        with_one_disk_thread(async {
            let (mut client, door) = TestClient::new();
            let (served, _signal) = started(images.path(), door);
            client.send_memory().await;
            client.send(CLOSE, 0, 0, 0).await;
            drop(client);
            served.await.unwrap().unwrap();
        });
        assert_eq!(names(images.path()), ["pagemap-7.img", "pages-65537.img"]);
    }

    #[test]
    fn the_removal_of_a_cut_image_delays_no_other_client() {
        let images = tempfile::tempdir().unwrap();
        with_one_disk_thread(async {
            let server = receiving(images.path(), true);
            let ((mut cut, door), (mut other, other_door)) = (TestClient::new(), TestClient::new());
            let serve = |mut door: Door| {
                let server = Rc::clone(&server);
                spawn_local(async move { client(&server, door.next().await.unwrap()).await })
            };
            let (cut_served, _other_served) = (serve(door), serve(other_door));
            cut.send_memory().await;
            settle().await;
            let busy = busy_disk();
            drop(cut);
            settle().await;
            assert_eq!(names(images.path()).len(), 2, "the disk's thread removes it, when it can");
            other.send(OPEN, 0, 0, TASK).await;
            assert_eq!(other.0.read_u8().await.unwrap(), 0);
            drop(busy);
            cut_served.await.unwrap().unwrap_err();
            assert_eq!(names(images.path()).len(), 1);
        });
    }

    #[test]
    fn clients_that_fail_give_their_places_back() {
        let dir = tempfile::tempdir().unwrap();
        let (images, socket) = (dir.path().join("images"), dir.path().join("socket"));
        fs::create_dir(&images).unwrap();
        with_one_disk_thread(async {
            let entrance = Entrance::Unix(UnixListener::bind(&socket).unwrap(), socket.clone());
            let (server, door) = (receiving(&images, true), Door::of(entrance).unwrap());
            let _served = spawn_local(async move {
                let stop = pin!(std::future::pending::<&'static str>());
                many(&server, door, stop).await
            });
            let connect = async || TestClient(tokio::net::UnixStream::connect(&socket).await.unwrap());
            for number in 0..MAX_CLIENTS + 2 {
                let mut client = connect().await;
                if number.is_multiple_of(2) {
                    client.send(UNKNOWN, 0, 0, 0).await;
                } else {
                    client.0.shutdown().await.unwrap();
                }
                // The server has ended the connection: the next client finds the place free.
                client.0.read_u8().await.unwrap_err();
            }
            let mut client = connect().await;
            client.send_memory().await;
            client.send(CLOSE, 0, 0, 0).await;
            assert_eq!(client.0.read_i32().await.unwrap(), 0);
        });
    }
}
