// SPDX-License-Identifier: MIT OR Apache-2.0
//! A slow link to a server, which can be cut, and can damage what it carries.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{sleep, spawn};
use std::time::Duration;

use anyhow::Context;
use nix::libc::linger;
use nix::sys::socket::{setsockopt, sockopt};

use crate::hosts::Host;

/// What anyone on the way can read of an image that is not encrypted: the first bytes of its manifest, or the
/// name of a file that each image has.
const CLEAR_TEXT: [&[u8]; 2] = [b"RWKIMAGE", b"inventory.img"];
/// Bytes that pass at once.
const PIECE: usize = 16 << 10;

/// A link with a rate. It carries any number of connections, one after another. Its threads end with the test
/// program.
#[derive(Debug)]
pub struct SlowLink {
    port: u16,
    /// To the server, and from it.
    rates: [Arc<PassRate>; 2],
    streams: Arc<Mutex<Vec<Weak<TcpStream>>>>,
    passed: Arc<AtomicU64>,
    sent: Arc<AtomicU64>,
    lies: Arc<AtomicBool>,
    /// Whether a part of an image has passed that anyone on the way can read.
    has_shown_clear_text: Arc<AtomicBool>,
    is_cut: Arc<AtomicBool>,
}

/// The bytes a second of one direction.
#[derive(Debug)]
struct PassRate {
    /// Until this number of bytes has passed.
    until: AtomicU64,
    rate: AtomicU64,
    /// From then on.
    later: AtomicU64,
}

fn note_clear_text(bytes: &[u8], shown: &AtomicBool) {
    let has = |text: &[u8]| bytes.windows(text.len()).any(|found| found == text);
    if CLEAR_TEXT.into_iter().any(has) {
        shown.store(true, Ordering::Relaxed);
    }
}

impl SlowLink {
    /// Makes a link to a port of this host that carries `rate` bytes a second to its clients.
    ///
    /// # Errors
    /// The machine has no port.
    pub fn to(server: u16, rate: u64) -> anyhow::Result<Self> {
        Self::for_clients(usize::MAX, server, rate)
    }

    /// Makes a link on a host to a server that the host reaches. Both directions carry `rate` bytes a second.
    ///
    /// # Errors
    /// The host has no port.
    pub fn on(host: &Host, server: SocketAddr, rate: u64) -> anyhow::Result<Self> {
        let enter = host.network()?;
        Self::start(usize::MAX, server, [rate; 2], move || enter.enter())
    }

    /// [`SlowLink::to`] a server of one client: it does not listen after the first.
    ///
    /// # Errors
    /// The machine has no port.
    pub fn to_one(server: u16, rate: u64) -> anyhow::Result<Self> {
        Self::for_clients(1, server, rate)
    }

    fn for_clients(clients: usize, server: u16, rate: u64) -> anyhow::Result<Self> {
        let server = (Ipv4Addr::LOCALHOST, server).into();
        Self::start(clients, server, [u64::MAX, rate], || Ok(()))
    }

    /// `rates`: to the server, and from it. Its thread enters a network first.
    fn start(
        clients: usize,
        server: SocketAddr,
        [up, down]: [u64; 2],
        enter: impl FnOnce() -> anyhow::Result<()> + Send + 'static,
    ) -> anyhow::Result<Self> {
        let (streams, passed) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicU64::new(0)));
        let lies = Arc::new(AtomicBool::new(false));
        let is_cut = Arc::new(AtomicBool::new(false));
        let has_shown_clear_text = Arc::new(AtomicBool::new(false));
        let shown = Arc::clone(&has_shown_clear_text);
        let rates = [up, down].map(|rate| Arc::new(PassRate::of(rate)));
        let carried = rates.clone();
        let sent = Arc::new(AtomicU64::new(0));
        let count_sent = Arc::clone(&sent);
        let (kept, count, lie) = (Arc::clone(&streams), Arc::clone(&passed), Arc::clone(&lies));
        let refuses = Arc::clone(&is_cut);
        let (tell, listens) = channel();
        spawn(move || {
            let listener = enter().and_then(|()| Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?));
            let listener = match listener {
                Ok(listener) => listener,
                Err(error) => return drop(tell.send(Err(error))),
            };
            let _ = tell.send(listener.local_addr().map(|address| address.port()).map_err(Into::into));
            for client in listener.incoming().take(clients).flatten() {
                // Without a server the client's connection ends.
                let Ok(server) = TcpStream::connect(server) else { continue };
                if refuses.load(Ordering::Relaxed) {
                    continue;
                }
                // A link does not keep the end of an answer back until the one before is acknowledged.
                let _ = [&client, &server].map(|end| end.set_nodelay(true));
                let [client, server] = [client, server].map(Arc::new);
                let both = [&client, &server].map(Arc::downgrade);
                kept.lock().unwrap_or_else(PoisonError::into_inner).extend(both);
                let (back, answers, count) = (Arc::clone(&client), Arc::clone(&server), Arc::clone(&count));
                let (lie, [up, down]) = (Arc::clone(&lie), carried.clone());
                let [shown, shown_up] = [(); 2].map(|()| Arc::clone(&shown));
                let pass = move |bytes: &mut [u8]| {
                    // The middle of a whole piece is in the middle of data.
                    if bytes.len() == PIECE && lie.swap(false, Ordering::Relaxed) {
                        bytes[PIECE / 2] ^= 1;
                    }
                    note_clear_text(bytes, &shown);
                };
                spawn(move || carry(&answers, &back, &down, &count, pass));
                let sent = Arc::clone(&count_sent);
                spawn(move || carry(&client, &server, &up, &sent, |bytes| note_clear_text(bytes, &shown_up)));
            }
        });
        let port = listens.recv().context("a link")?.context("a port for a link")?;
        Ok(Self { port, rates, streams, passed, sent, lies, has_shown_clear_text, is_cut })
    }

    /// Its port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Has both directions carry `rate` bytes a second from now on.
    pub fn slow_to(&self, rate: u64) {
        self.rates.iter().for_each(|of| of.set(rate));
    }

    /// Has the link carry `bytes` bytes to the server at the present rate, and all later ones at `rate`.
    pub fn slow_after(&self, bytes: u64, rate: u64) {
        let [up, _] = &self.rates;
        up.later.store(rate, Ordering::Relaxed);
        up.until.store(self.sent() + bytes, Ordering::Relaxed);
    }

    /// The bytes that its clients have received.
    #[must_use]
    pub fn passed(&self) -> u64 {
        self.passed.load(Ordering::Relaxed)
    }

    /// The bytes that its server has received.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Whether a part of an image has passed, in either direction, that anyone on the way can read.
    #[must_use]
    pub fn has_shown_clear_text(&self) -> bool {
        self.has_shown_clear_text.load(Ordering::Relaxed)
    }

    /// Has the link change one byte of what passes next to a client.
    pub fn lie(&self) {
        self.lies.store(true, Ordering::Relaxed);
    }

    /// Cuts all connections, and each new one until [`SlowLink::join`].
    pub fn part(&self) {
        self.is_cut.store(true, Ordering::Relaxed);
        self.cut();
    }

    /// Takes connections again.
    pub fn join(&self) {
        self.is_cut.store(false, Ordering::Relaxed);
    }

    /// Cuts all connections.
    pub fn cut(&self) {
        for stream in self.streams.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // It may have ended.
            let _ = stream.upgrade().map(|stream| stream.shutdown(Shutdown::Both));
        }
    }
}

impl PassRate {
    fn of(rate: u64) -> Self {
        Self { until: AtomicU64::new(u64::MAX), rate: AtomicU64::new(rate), later: AtomicU64::new(rate) }
    }

    fn set(&self, rate: u64) {
        self.rate.store(rate, Ordering::Relaxed);
        self.later.store(rate, Ordering::Relaxed);
    }

    /// The rate after `passed` bytes.
    fn after(&self, passed: u64) -> u64 {
        let of = if passed < self.until.load(Ordering::Relaxed) { &self.rate } else { &self.later };
        of.load(Ordering::Relaxed)
    }
}

/// `pass` sees, and may change, what passes.
fn carry(
    mut from: &TcpStream,
    mut to: &TcpStream,
    rate: &PassRate,
    passed: &AtomicU64,
    pass: impl Fn(&mut [u8]),
) {
    let mut buffer = vec![0; PIECE];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => break,
            Err(_) => return reset(to),
            Ok(len) => {
                pass(&mut buffer[..len]);
                if to.write_all(&buffer[..len]).is_err() {
                    break;
                }
                let len = len as u64;
                let rate = rate.after(passed.fetch_add(len, Ordering::Relaxed) + len);
                sleep(Duration::from_nanos(len.saturating_mul(1_000_000_000) / rate));
            }
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

/// Passes a reset on: the other direction ends, and the connection is reset when its last owner closes it.
fn reset(stream: &TcpStream) {
    let _ = setsockopt(stream, sockopt::Linger, &linger { l_onoff: 1, l_linger: 0 });
    // Neither a reset nor an end is sent by that.
    let _ = stream.shutdown(Shutdown::Read);
}
