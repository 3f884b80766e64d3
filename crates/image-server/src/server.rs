// SPDX-License-Identifier: MIT OR Apache-2.0
//! Serves peers that are admitted.

use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rewake_peer_stream::{Admission, PATIENT, watch_peer};
use tracing::{error, info};

use crate::clients::serve_each;
use crate::connection::{Served, serve};
use crate::exports::Exports;

/// Time for a client to open an image, and to take bytes that were sent.
const CLIENT_LIMIT: Duration = Duration::from_secs(60);

/// Serves the clients that are admitted, until the process is ended.
pub fn run(exports: Exports, admission: Admission, listener: &TcpListener) -> ! {
    let accept = || listener.accept().map(|(stream, peer)| (stream, format!("client {peer}")));
    serve_each(accept, move |stream, name| {
        let began = Instant::now();
        match client(&exports, &admission, stream, name) {
            Ok(Served { reads, bytes }) => {
                info!("{name}: {bytes} bytes in {reads} reads, {:?}", began.elapsed());
            }
            Err(error) => error!("{name}: {error:#}"),
        }
    })
}

fn client(exports: &Exports, admission: &Admission, socket: TcpStream, name: &str) -> anyhow::Result<Served> {
    // A client may be silent for hours after it has opened an image.
    watch_peer(&socket, PATIENT).context("the connection")?;
    socket.set_write_timeout(Some(CLIENT_LIMIT)).context("SO_SNDTIMEO")?;
    let (mut stream, rights) = admission.admit(socket)?;
    stream.socket().set_read_timeout(Some(CLIENT_LIMIT)).context("SO_RCVTIMEO")?;
    serve(&exports.permitted(rights), &mut stream, |stream, image| {
        info!("{name}: reads image {image}");
        stream.socket().set_read_timeout(None)
    })
}
