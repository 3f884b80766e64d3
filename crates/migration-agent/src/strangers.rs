// SPDX-License-Identifier: MIT OR Apache-2.0
//! Connections of a destination that have sent no greeting. A new one takes the place of the oldest: clients
//! that say nothing keep no source out.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::{Mutex, PoisonError};

use rewake_peer_stream::RefusalLog;

/// Connections without a greeting, at once.
const MAX_STRANGERS: usize = 16;

/// A connection, and the host that it came from.
type Stranger = (IpAddr, TcpStream);

/// The connections, by their numbers.
#[derive(Debug, Default)]
pub(crate) struct Strangers {
    state: Mutex<(u64, BTreeMap<u64, Stranger>)>,
    /// Of connections that were ended, or whose host is not admitted.
    pub(crate) refusals: RefusalLog,
}

impl Strangers {
    /// Adds a connection of a host. Of too many connections, the host with the most loses its oldest one, so
    /// that no host can end another host's connection. Returns its number.
    pub(crate) fn add(&self, stream: &TcpStream, host: IpAddr) -> io::Result<u64> {
        let copy = stream.try_clone()?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (next, connections) = &mut *state;
        *next += 1;
        connections.insert(*next, (host, copy));
        if connections.len() > MAX_STRANGERS
            && let Some((host, oldest)) =
                oldest_of_the_most(connections).and_then(|it| connections.remove(&it))
        {
            let line = self.refusals.line(|| {
                format!(
                    "a connection from {host} was ended: {MAX_STRANGERS} others have sent no greeting either"
                )
            });
            if let Some(line) = line {
                tracing::error!("{line}");
            }
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

/// Returns the oldest connection of the host that has the most.
fn oldest_of_the_most(connections: &BTreeMap<u64, Stranger>) -> Option<u64> {
    let mut hosts: BTreeMap<IpAddr, (usize, u64)> = BTreeMap::new();
    for (number, (host, _)) in connections {
        hosts.entry(*host).or_insert((0, *number)).0 += 1;
    }
    // Of hosts with equally many, the one whose connection is oldest.
    hosts.into_values().max_by_key(|(count, oldest)| (*count, u64::MAX - oldest)).map(|(_, oldest)| oldest)
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::net::TcpListener;
    use std::time::Duration;

    use super::*;

    fn host(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    #[test]
    fn a_host_with_many_connections_ends_none_of_another_host() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let strangers = Strangers::default();
        let connect = |from: u8| {
            let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let near = listener.accept().unwrap().0;
            strangers.add(&near, host(from)).unwrap();
            far.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
            (far, near)
        };
        let mut honest = connect(1);
        let mut others: Vec<_> = (0..2 * MAX_STRANGERS).map(|_| connect(2)).collect();
        assert!(honest.0.read(&mut [0]).is_err(), "the oldest of all, and the only one of its host");
        assert_eq!(others[0].0.read(&mut [0]).unwrap(), 0, "the oldest of its host is ended");
    }

    #[test]
    fn the_oldest_of_too_many_strangers_is_ended() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let strangers = Strangers::default();
        let mut pairs: Vec<(TcpStream, TcpStream, u64)> = Vec::new();
        for _ in 0..MAX_STRANGERS + 1 {
            let far = TcpStream::connect(address).unwrap();
            let near = listener.accept().unwrap().0;
            let number = strangers.add(&near, host(1)).unwrap();
            far.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
            pairs.push((far, near, number));
        }
        assert_eq!(pairs[0].0.read(&mut [0]).unwrap(), 0, "the oldest is ended");
        assert!(pairs[1].0.read(&mut [0]).is_err(), "the next is not");
        strangers.remove(pairs[1].2);
        let (far, near) = (TcpStream::connect(address).unwrap(), listener.accept().unwrap().0);
        strangers.add(&near, host(1)).unwrap();
        assert!(pairs[2].0.read(&mut [0]).is_err(), "one was admitted, so there is room");
        drop(far);
    }
}
