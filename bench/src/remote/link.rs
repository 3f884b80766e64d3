// SPDX-License-Identifier: MIT OR Apache-2.0
//! A link with a rate and a delay, between a port of its own and a server on this host.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use anyhow::Context as _;

/// Bytes that are read at once. They take 0.13 ms of the link.
const PIECE: usize = 16 << 10;
/// Pieces that are in one direction of the link at most.
const PIECES: usize = 64;
/// Bytes a second in each direction: 1 Gbit/s.
pub(super) const RATE: u64 = 125_000_000;
/// The way there and back.
pub(super) const ROUND_TRIP: Duration = Duration::from_millis(1);

/// Starts a link to a server's port, for one client. Returns its own port. Its threads end with the connection.
pub(super) fn to(server: u16) -> anyhow::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("a port for the link")?;
    let port = listener.local_addr()?.port();
    spawn(move || {
        let Ok((client, _)) = listener.accept() else { return };
        // Without a server the client's connection ends.
        let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, server)) else { return };
        let [client, server] = [client, server].map(Arc::new);
        direction(Arc::clone(&client), Arc::clone(&server));
        direction(server, client);
    });
    Ok(port)
}

/// Bytes, and when they have left the link.
type Piece = (Instant, Vec<u8>);

/// Carries bytes one way.
fn direction(from: Arc<TcpStream>, to: Arc<TcpStream>) {
    let (sender, receiver) = sync_channel(PIECES);
    spawn(move || enter(&from, &sender));
    spawn(move || leave(&receiver, &to));
}

/// Takes bytes, each at the time at which those before it have entered the link.
fn enter(mut from: &TcpStream, sender: &SyncSender<Piece>) {
    let mut is_free = Instant::now();
    let mut buffer = vec![0; PIECE];
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        is_free = is_free.max(Instant::now()) + Duration::from_nanos(len as u64 * 1_000_000_000 / RATE);
        if sender.send((is_free + ROUND_TRIP / 2, buffer[..len].to_vec())).is_err() {
            return;
        }
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
    fn bytes_take_the_time_of_their_rate_and_delay() {
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = to(server.local_addr().unwrap().port()).unwrap();
        let mut client = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        let (mut far, _) = server.accept().unwrap();
        let began = Instant::now();
        let bytes = RATE / 50;
        let length = usize::try_from(bytes).unwrap();
        let sent = spawn(move || far.write_all(&vec![7; length]));
        let mut received = vec![0; length];
        client.read_exact(&mut received).unwrap();
        let took = began.elapsed();
        sent.join().unwrap().unwrap();
        assert!(received.iter().all(|byte| *byte == 7));
        let expected = Duration::from_millis(20) + ROUND_TRIP / 2;
        assert!((expected..Duration::from_secs(5)).contains(&took), "{took:?}");
    }
}
