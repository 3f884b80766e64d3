// SPDX-License-Identifier: MIT OR Apache-2.0
//! Accepts clients, and serves each in a thread of its own: peers of `rewake export`, and fetchers of the
//! node's cache.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rewake_peer_stream::RefusalLog;
use tracing::{error, warn};

/// Connections at once; a restore has two. Each has a thread and a buffer of 64 KiB, as much again where it
/// compresses, and 130 KiB more with TLS.
const MAX_CONNECTIONS: usize = 256;
/// Connections of one host at once, so that no host can take the places of all others.
const MAX_OF_A_HOST: usize = 64;
/// Pause after a client could not be accepted, because descriptors or memory are then used up for a moment.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(100);

/// How many are connected of each host; None: of this one, by a Unix socket.
#[derive(Debug, Default)]
struct Connected(Mutex<BTreeMap<Option<IpAddr>, usize>>);

/// One of the [`MAX_CONNECTIONS`]: free again when this is dropped, also by a panic.
struct ConnectionSlot {
    connected: Arc<Connected>,
    host: Option<IpAddr>,
}

#[derive(Debug, thiserror::Error)]
enum TurnedAway {
    #[error("MAX_CONNECTIONS = {MAX_CONNECTIONS} are connected")]
    All,
    #[error("MAX_OF_A_HOST = {MAX_OF_A_HOST} of its host are connected")]
    OfHost,
}

impl ConnectionSlot {
    fn take(connected: &Arc<Connected>, host: Option<IpAddr>) -> Result<Self, TurnedAway> {
        let mut counts = connected.0.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.values().sum::<usize>() >= MAX_CONNECTIONS {
            return Err(TurnedAway::All);
        }
        let of_host = counts.entry(host).or_default();
        if host.is_some() && *of_host >= MAX_OF_A_HOST {
            return Err(TurnedAway::OfHost);
        }
        *of_host += 1;
        Ok(Self { connected: Arc::clone(connected), host })
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut counts = self.connected.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(of_host) = counts.get_mut(&self.host) {
            *of_host -= 1;
            if *of_host == 0 {
                counts.remove(&self.host);
            }
        }
    }
}

/// A client that has connected.
#[derive(Debug)]
pub struct ConnectedClient<C> {
    /// Its connection.
    pub client: C,
    /// What messages call it.
    pub name: String,
    /// The host that it has connected from; None: this one, by a Unix socket.
    pub host: Option<IpAddr>,
}

/// Serves clients until the process ends. `accept` waits for the next one, and `serve` serves it to its end.
pub fn serve_each<C: Send + 'static>(
    mut accept: impl FnMut() -> io::Result<ConnectedClient<C>>,
    serve: impl Fn(C, &str) + Send + Sync + 'static,
) -> ! {
    let (serve, connected, refusals) =
        (Arc::new(serve), Arc::new(Connected::default()), RefusalLog::default());
    loop {
        let ConnectedClient { client, name, host } = match accept() {
            Ok(client) => client,
            Err(error) => {
                warn!(%error, "accepting a client");
                thread::sleep(ACCEPT_INTERVAL);
                continue;
            }
        };
        let slot = match ConnectionSlot::take(&connected, host) {
            Ok(slot) => slot,
            Err(why) => {
                if let Some(line) = refusals.line(|| format!("{name}: turned away, {why}")) {
                    error!("{line}");
                }
                continue;
            }
        };
        let (serve, own) = (Arc::clone(&serve), name.clone());
        let serve = move || {
            let _slot = slot;
            serve(client, &own);
        };
        if let Err(error) = thread::Builder::new().name("client".to_owned()).spawn(serve) {
            error!("{name}: turned away, it gets no thread: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Instant;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    /// Connects a client, whose thread panics when it gets a message, and ends when the other end is dropped.
    fn connect(clients: &Sender<Receiver<()>>) -> Sender<()> {
        let (end, ended) = channel();
        clients.send(ended).unwrap();
        end
    }

    /// Waits until a client was turned away: nothing of it is left.
    fn is_turned_away(client: &Sender<()>) -> bool {
        let began = Instant::now();
        while client.send(()).is_ok() {
            if began.elapsed() > LIMIT {
                return false;
            }
            thread::sleep(Duration::from_millis(1));
        }
        true
    }

    #[test]
    fn one_client_too_many_is_turned_away_until_another_ends() {
        let (clients, arriving) = channel();
        let (served, serving) = channel();
        thread::spawn(move || {
            let accept = || {
                let client = arriving.recv().map_err(io::Error::other)?;
                Ok(ConnectedClient { client, name: "client".to_owned(), host: None })
            };
            serve_each(accept, move |ended: Receiver<()>, _| {
                served.send(()).unwrap();
                assert!(ended.recv().is_err(), "a thread of a client");
            })
        });
        let mut connected: Vec<Sender<()>> = (0..MAX_CONNECTIONS).map(|_| connect(&clients)).collect();
        connected.iter().for_each(|_| serving.recv_timeout(LIMIT).unwrap());
        assert!(is_turned_away(&connect(&clients)));
        connected.pop().unwrap().send(()).unwrap();
        // Its slot is free when its thread has ended.
        let began = Instant::now();
        let served = std::iter::repeat_with(|| {
            let client = connect(&clients);
            let served = serving.recv_timeout(Duration::from_millis(50)).is_ok();
            connected.push(client);
            served
        });
        assert!(served.take_while(|_| began.elapsed() < LIMIT).any(|served| served));
    }

    #[test]
    fn a_host_leaves_places_for_others() {
        let connected = Arc::new(Connected::default());
        let host = |last| Some(IpAddr::from([192, 0, 2, last]));
        let mut of_one: Vec<_> =
            (0..MAX_OF_A_HOST).map(|_| ConnectionSlot::take(&connected, host(1)).unwrap()).collect();
        assert!(matches!(ConnectionSlot::take(&connected, host(1)), Err(TurnedAway::OfHost)));
        let other = ConnectionSlot::take(&connected, host(2)).unwrap();
        of_one.pop();
        of_one.push(ConnectionSlot::take(&connected, host(1)).unwrap());
        drop((of_one, other));
        assert!(connected.0.lock().unwrap().is_empty());
    }
}
