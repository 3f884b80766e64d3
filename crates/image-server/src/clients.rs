// SPDX-License-Identifier: MIT OR Apache-2.0
//! Accepts clients, and serves each in a thread of its own: peers of `rewake export`, and fetchers of the node's cache.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use tracing::{error, warn};

/// Connections at once; a restore has two. Each has a thread and a buffer of 64 KiB, as much again where it
/// compresses, and 130 KiB more with TLS.
const MAX_CONNECTIONS: usize = 256;
/// Time after a client could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// One of the [`MAX_CONNECTIONS`]: free again when this is dropped, also by a panic.
struct ConnectionSlot(Arc<AtomicUsize>);

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Serves clients until the process ends. `accept` waits for the next one, and gives what messages call it. `serve`
/// serves it to its end.
pub fn serve_each<C: Send + 'static>(
    mut accept: impl FnMut() -> io::Result<(C, String)>,
    serve: impl Fn(C, &str) + Send + Sync + 'static,
) -> ! {
    let (serve, connected) = (Arc::new(serve), Arc::new(AtomicUsize::new(0)));
    loop {
        let (client, name) = match accept() {
            Ok(client) => client,
            Err(error) => {
                warn!(%error, "accepting a client");
                thread::sleep(ACCEPT_PAUSE);
                continue;
            }
        };
        let earlier = connected.fetch_add(1, Ordering::Relaxed);
        let slot = ConnectionSlot(Arc::clone(&connected));
        if earlier >= MAX_CONNECTIONS {
            error!("{name}: turned away, MAX_CONNECTIONS = {MAX_CONNECTIONS} are connected");
            continue;
        }
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
                Ok((client, "client".to_owned()))
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
}
