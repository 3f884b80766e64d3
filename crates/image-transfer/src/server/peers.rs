// SPDX-License-Identifier: MIT OR Apache-2.0
//! Serves peers that are admitted.

use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rewake_peer_stream::{Admission, PATIENT, RefusalLog, watch_peer};
use tracing::{error, info};

use crate::server::clients::{ConnectedClient, serve_each};
use crate::server::connection::{Served, serve};
use crate::server::exports::Exports;

/// Time for a client to open an image, and to take bytes that were sent.
const CLIENT_LIMIT: Duration = Duration::from_secs(60);

/// Serves the clients that are admitted, until the process is ended.
pub fn run(exports: Exports, admission: Admission, listener: &TcpListener) -> ! {
    let accept = || {
        let (client, peer) = listener.accept()?;
        Ok(ConnectedClient { client, name: format!("client {peer}"), host: Some(peer.ip()) })
    };
    let refusals = RefusalLog::default();
    serve_each(accept, move |stream, name| {
        let began = Instant::now();
        match client(&exports, &admission, stream, name) {
            Ok(Served { reads, bytes }) => {
                info!("{name}: {bytes} bytes in {reads} reads, {:?}", began.elapsed());
            }
            Err(error) => {
                if let Some(line) = refusals.line(|| format!("{name}: {error:#}")) {
                    error!("{line}");
                }
            }
        }
    })
}

fn client(exports: &Exports, admission: &Admission, socket: TcpStream, name: &str) -> anyhow::Result<Served> {
    // A client may be silent for hours after it has opened an image.
    watch_peer(&socket, PATIENT).context("the connection")?;
    socket.set_write_timeout(Some(CLIENT_LIMIT)).context("SO_SNDTIMEO")?;
    let (mut stream, rights) = admission.admit(socket)?;
    stream.socket().set_read_timeout(Some(CLIENT_LIMIT)).context("SO_RCVTIMEO")?;
    let served = serve(&exports.permitted(rights), &mut stream, |stream, image| {
        info!("{name}: reads image {}", image.display());
        stream.socket().set_read_timeout(None)
    });
    if served.is_err() {
        // The client may have sent more requests than were read, and is to get the reason.
        stream.end_after_answer();
    }
    served
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::sync::Arc;
    use std::thread;

    use crate::protocol::message::{receive, send};
    use crate::protocol::reply::What as Reply;
    use crate::protocol::request::What as Request;
    use crate::protocol::{Open, Read, Reply as RawReply, Request as RawRequest, hello};

    use super::*;
    use crate::server::exports::ImageDirectory;

    /// A client sends its first reads before it knows whether its image is served.
    #[test]
    fn a_client_that_has_sent_more_gets_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let exports = Exports::new(Arc::new(ImageDirectory::new(folder.path()).unwrap()));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.set_read_timeout(Some(CLIENT_LIMIT)).unwrap();
        let mut requests = Vec::new();
        let mut ask = |what| send(&mut requests, &RawRequest { what: Some(what) }, &[]).unwrap();
        ask(Request::Hello(hello()));
        ask(Request::Open(Open { image: b"none".to_vec(), ..Open::default() }));
        (0..4096).for_each(|_| ask(Request::Read(Read { file: 0, offset: 0, length: 1 })));
        client.write_all(&requests).unwrap();
        thread::spawn(move || run(exports, Admission::in_clear(), &listener));
        let mut reply = || receive::<RawReply>(&mut client).unwrap().unwrap().what;
        assert!(matches!(reply(), Some(Reply::Hello(_))));
        let refused = reply();
        assert!(matches!(&refused, Some(Reply::Refused(reason)) if reason.contains("none")), "{refused:?}");
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
    }
}
