// SPDX-License-Identifier: MIT OR Apache-2.0
//! The end of a connection whose last message is a refusal.

use std::io::{ErrorKind, Read as _};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

/// Bytes that are dropped at a time.
const DROPPED: usize = 4 << 10;

/// Ends a connection so that the peer gets what was sent last. A socket that is closed while it has bytes
/// that were not read resets the connection: the peer reports the reset, and what was lost on the way is not
/// sent again. So this side ends its direction, and drops what arrives until the peer closes the connection,
/// or the limit has passed.
pub fn end_after_answer(mut socket: &TcpStream, limit: Duration) {
    let deadline = Instant::now() + limit;
    // The peer may have closed the connection, or is lost: then there is nothing to wait for.
    if socket.shutdown(Shutdown::Write).is_err() {
        return;
    }
    let mut dropped = [0; DROPPED];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || socket.set_read_timeout(Some(left)).is_err() {
            return;
        }
        match socket.read(&mut dropped) {
            Ok(0) => return,
            Err(error) if error.kind() != ErrorKind::Interrupted => return,
            _ => {}
        }
    }
}
