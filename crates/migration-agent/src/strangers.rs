// SPDX-License-Identifier: MIT OR Apache-2.0
//! Connections of a destination that have sent no greeting. A new one takes the place of the oldest: clients that say
//! nothing keep no source out.

use std::collections::BTreeMap;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::{Mutex, PoisonError};

/// Connections without a greeting, at once.
const MAX_STRANGERS: usize = 16;

/// The connections, by their numbers.
#[derive(Debug, Default)]
pub(crate) struct Strangers {
    state: Mutex<(u64, BTreeMap<u64, TcpStream>)>,
}

impl Strangers {
    /// Adds a connection, and ends the oldest of too many. Returns its number.
    pub(crate) fn add(&self, stream: &TcpStream) -> io::Result<u64> {
        let copy = stream.try_clone()?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (next, connections) = &mut *state;
        *next += 1;
        connections.insert(*next, copy);
        if connections.len() > MAX_STRANGERS
            && let Some((_, oldest)) = connections.pop_first()
        {
            tracing::error!(
                "a connection was ended: {MAX_STRANGERS} newer ones have sent no greeting either"
            );
            // It may have ended.
            let _ = oldest.shutdown(Shutdown::Both);
        }
        Ok(*next)
    }

    /// Removes a connection, which is admitted or has ended.
    pub(crate) fn remove(&self, number: u64) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).1.remove(&number);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::net::TcpListener;
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_oldest_of_too_many_strangers_is_ended() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let strangers = Strangers::default();
        let mut pairs: Vec<(TcpStream, TcpStream, u64)> = Vec::new();
        for _ in 0..MAX_STRANGERS + 1 {
            let far = TcpStream::connect(address).unwrap();
            let near = listener.accept().unwrap().0;
            let number = strangers.add(&near).unwrap();
            far.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
            pairs.push((far, near, number));
        }
        assert_eq!(pairs[0].0.read(&mut [0]).unwrap(), 0, "the oldest is ended");
        assert!(pairs[1].0.read(&mut [0]).is_err(), "the next is not");
        strangers.remove(pairs[1].2);
        let (far, near) = (TcpStream::connect(address).unwrap(), listener.accept().unwrap().0);
        strangers.add(&near).unwrap();
        assert!(pairs[2].0.read(&mut [0]).is_err(), "one was admitted, so there is room");
        drop(far);
    }
}
