// SPDX-License-Identifier: MIT OR Apache-2.0
//! A slow link to a page server, which can be cut.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{sleep, spawn};
use std::time::Duration;

use anyhow::Context;

/// Bytes that pass at once.
const PIECE: usize = 16 << 10;

/// A link with a rate. It carries any number of connections, one after another. Its threads end with the test program.
#[derive(Debug)]
pub struct Link {
    port: u16,
    streams: Arc<Mutex<Vec<TcpStream>>>,
    passed: Arc<AtomicU64>,
}

impl Link {
    /// Makes a link to a port of this host that carries so many bytes a second to its clients.
    ///
    /// # Errors
    /// The machine has no port.
    pub fn to(server: u16, rate: u64) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("a port for a link")?;
        let port = listener.local_addr()?.port();
        let (streams, passed) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicU64::new(0)));
        let (kept, count) = (Arc::clone(&streams), Arc::clone(&passed));
        spawn(move || {
            for client in listener.incoming().flatten() {
                // Without a server the client's connection ends.
                let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, server)) else { continue };
                let Ok(copies) = [&client, &server].map(TcpStream::try_clone).into_iter().collect::<Result<Vec<_>, _>>() else { continue };
                kept.lock().unwrap_or_else(PoisonError::into_inner).extend(copies);
                let Ok(back) = client.try_clone() else { continue };
                let Ok(answers) = server.try_clone() else { continue };
                let count = Arc::clone(&count);
                spawn(move || carry(answers, back, rate, &count));
                spawn(move || carry(client, server, u64::MAX, &AtomicU64::new(0)));
            }
        });
        Ok(Self { port, streams, passed })
    }

    /// Its port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The bytes that its clients have received.
    #[must_use]
    pub fn passed(&self) -> u64 {
        self.passed.load(Ordering::Relaxed)
    }

    /// Cuts all connections.
    pub fn cut(&self) {
        for stream in self.streams.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // It may have ended.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, rate: u64, passed: &AtomicU64) {
    let mut buffer = vec![0; PIECE];
    loop {
        match from.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(len) => {
                if to.write_all(&buffer[..len]).is_err() {
                    break;
                }
                let len = len as u64;
                passed.fetch_add(len, Ordering::Relaxed);
                sleep(Duration::from_nanos(len.saturating_mul(1_000_000_000) / rate));
            }
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}
