// SPDX-License-Identifier: MIT OR Apache-2.0
//! A link with a rate and a delay, between a port of its own and a server on this host.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use anyhow::Context as _;

/// Bytes that are read at once. They take 0.13 ms of the link.
const PIECE: usize = 16 << 10;
/// Pieces of one connection that are in one direction of the link at most.
const PIECES: usize = 64;
/// Bytes a second in each direction: 1 Gbit/s.
pub(crate) const RATE: u64 = 125_000_000;
/// What waits to enter the link takes no longer; the rest waits in the connections.
const QUEUE: Duration = Duration::from_millis(2);

/// A link. All its connections share the rate. Its threads end with the connections, or with the bench.
#[derive(Debug)]
pub(crate) struct Link {
    port: u16,
    /// From the server to its clients.
    down: Arc<Lane>,
}

/// One direction.
#[derive(Debug)]
struct Lane {
    /// When all bytes so far have entered the link.
    is_free: Mutex<Instant>,
    passed: AtomicU64,
    delay: Duration,
}

impl Link {
    /// Starts a link to a server's port. A way there and back takes `round_trip`.
    pub(crate) fn to(server: u16, round_trip: Duration) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("a port for the link")?;
        let port = listener.local_addr()?.port();
        let [up, down] = [(); 2].map(|()| Arc::new(Lane::new(round_trip / 2)));
        let to_clients = Arc::clone(&down);
        spawn(move || {
            for client in listener.incoming().flatten() {
                // Without a server the client's connection ends.
                let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, server)) else { continue };
                let [client, server] = [client, server].map(Arc::new);
                direction(Arc::clone(&client), Arc::clone(&server), &up);
                direction(server, client, &to_clients);
            }
        });
        Ok(Self { port, down })
    }

    /// Its port.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// The bytes that its clients have been sent.
    pub(crate) fn passed(&self) -> u64 {
        self.down.passed.load(Ordering::Relaxed)
    }
}

impl Lane {
    fn new(delay: Duration) -> Self {
        Self { is_free: Mutex::new(Instant::now()), passed: AtomicU64::new(0), delay }
    }

    /// Has bytes enter the link after those before them. Returns when they have left it.
    fn enter(&self, len: usize) -> Instant {
        let len = len as u64;
        self.passed.fetch_add(len, Ordering::Relaxed);
        let mut is_free = self.is_free.lock().unwrap_or_else(PoisonError::into_inner);
        *is_free = (*is_free).max(Instant::now()) + Duration::from_nanos(len * 1_000_000_000 / RATE);
        *is_free + self.delay
    }
}

/// Bytes, and when they have left the link.
type Piece = (Instant, Vec<u8>);

/// Carries bytes one way.
fn direction(from: Arc<TcpStream>, to: Arc<TcpStream>, lane: &Arc<Lane>) {
    let (sender, receiver) = sync_channel(PIECES);
    let lane = Arc::clone(lane);
    spawn(move || enter(&from, &lane, &sender));
    spawn(move || leave(&receiver, &to));
}

/// Takes bytes, each at the time at which those before it have entered the link.
fn enter(mut from: &TcpStream, lane: &Lane, sender: &SyncSender<Piece>) {
    let mut buffer = vec![0; PIECE];
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        let due = lane.enter(len);
        if sender.send((due, buffer[..len].to_vec())).is_err() {
            return;
        }
        sleep(due.saturating_duration_since(Instant::now() + lane.delay + QUEUE));
    }
}

/// Delivers bytes at their time.
fn leave(receiver: &Receiver<Piece>, mut to: &TcpStream) {
    // A sleep is as long as the kernel's timer is coarse, and no longer.
    let _ = nix::sys::prctl::set_timerslack(1);
    let _ = to.set_nodelay(true);
    for (due, bytes) in receiver {
        sleep(due.saturating_duration_since(Instant::now()));
        if to.write_all(&bytes).is_err() {
            return;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_share_the_rate_and_each_byte_is_delayed() {
        const ROUND_TRIP: Duration = Duration::from_millis(10);
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let link = Link::to(server.local_addr().unwrap().port(), ROUND_TRIP).unwrap();
        let length = usize::try_from(RATE / 50).unwrap();
        let began = Instant::now();
        let clients: Vec<_> = (0..2)
            .map(|_| {
                let mut client = TcpStream::connect((Ipv4Addr::LOCALHOST, link.port())).unwrap();
                let (mut far, _) = server.accept().unwrap();
                spawn(move || far.write_all(&vec![7; length]).unwrap());
                spawn(move || {
                    let mut received = vec![0; length];
                    client.read_exact(&mut received).unwrap();
                    assert!(received.iter().all(|byte| *byte == 7));
                })
            })
            .collect();
        clients.into_iter().for_each(|client| client.join().unwrap());
        let took = began.elapsed();
        let expected = Duration::from_millis(40) + ROUND_TRIP / 2;
        assert!((expected..Duration::from_secs(5)).contains(&took), "{took:?}");
        assert_eq!(link.passed(), 2 * length as u64);
    }
}
