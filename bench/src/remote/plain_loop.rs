// SPDX-License-Identifier: MIT OR Apache-2.0
//! The machine's limit for pages that travel: a plain loop on loopback. One thread reads a file and sends it,
//! another receives it and writes a file. With TLS both use rustls.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::fcntl::{FallocateFlags, fallocate};
use rustls::{ClientConnection, ServerConnection, StreamOwned};

use super::certificates::LoopConfigs;

/// Bytes that are read, sent, received and written at once: a background request of rewake's client.
const PIECE: usize = 256 << 10;
/// Time in which a peer sends or takes bytes.
const LIMIT: Duration = Duration::from_secs(60);

/// Sends `pages` into a new file of `work`. Returns the rate in GB/s from the connection to the last write.
pub(super) fn measure(pages: &Path, work: &Path, tls: Option<&LoopConfigs>) -> anyhow::Result<f64> {
    let source = File::open(pages).with_context(|| pages.display().to_string())?;
    let length = source.metadata()?.len();
    let path = work.join("loop");
    let target = File::create(&path).with_context(|| path.display().to_string())?;
    std::fs::remove_file(&path)?;
    // As of a cache file: its space is reserved before.
    fallocate(target.as_fd(), FallocateFlags::empty(), 0, i64::try_from(length)?).context("fallocate")?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("a port")?;
    let address = listener.local_addr()?;
    std::thread::scope(|scope| {
        let sender = scope.spawn(move || -> anyhow::Result<()> {
            let (socket, _) = listener.accept().context("accepting")?;
            socket.set_write_timeout(Some(LIMIT))?;
            match tls {
                None => send(&source, length, &socket)?,
                Some(tls) => {
                    let connection = ServerConnection::new(Arc::clone(&tls.server))?;
                    send(&source, length, StreamOwned::new(connection, &socket))?;
                }
            }
            Ok(socket.shutdown(Shutdown::Write)?)
        });
        let began = Instant::now();
        let socket = TcpStream::connect(address).context("connecting")?;
        socket.set_read_timeout(Some(LIMIT))?;
        match tls {
            None => receive(&target, length, &socket)?,
            Some(tls) => {
                let connection = ClientConnection::new(Arc::clone(&tls.client), tls.name.clone())?;
                receive(&target, length, StreamOwned::new(connection, &socket))?;
            }
        }
        let elapsed = began.elapsed();
        sender.join().expect("the sender returns errors")?;
        Ok(length as f64 / 1e9 / elapsed.as_secs_f64())
    })
}

fn send(source: &File, length: u64, mut stream: impl Write) -> anyhow::Result<()> {
    pieces(length, |buffer, at| {
        source.read_exact_at(buffer, at).context("reading the file")?;
        stream.write_all(buffer).context("sending")
    })?;
    stream.flush().context("sending")
}

fn receive(target: &File, length: u64, mut stream: impl Read) -> anyhow::Result<()> {
    pieces(length, |buffer, at| {
        stream.read_exact(buffer).context("receiving")?;
        target.write_all_at(buffer, at).context("writing the file")
    })
}

/// Moves `length` bytes through a buffer, piece by piece.
fn pieces(length: u64, mut pass: impl FnMut(&mut [u8], u64) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let mut buffer = vec![0; PIECE];
    (0..length).step_by(PIECE).try_for_each(|at| {
        let piece = usize::try_from(length - at).map_or(PIECE, |left| left.min(PIECE));
        pass(&mut buffer[..piece], at)
    })
}
