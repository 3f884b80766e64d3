// SPDX-License-Identifier: MIT OR Apache-2.0
//! Clients of a control socket, up to their first request.

use std::time::Duration;

use nix::unistd::geteuid;
use tokio::net::{UnixListener, UnixStream};
use tokio::time::sleep;
use tracing::warn;

use super::frame::{FrameError, receive, send};
use super::{MESSAGE_LIMIT, VERSION, hello, proto};
use rewake_process::private_socket::may_speak;

/// Pause after an accept that failed, most likely because descriptors are used up for a moment.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(100);

/// Waits for the next client that may connect.
pub async fn next(listener: &UnixListener) -> UnixStream {
    let ours = geteuid().as_raw();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                warn!(%error, "accepting a client");
                sleep(ACCEPT_INTERVAL).await;
                continue;
            }
        };
        match stream.peer_cred() {
            Ok(peer) if may_speak(peer.uid(), ours) => return stream,
            peer => warn!(?peer, "a client of another user was turned away"),
        }
    }
}

/// Greets it. Returns whether both speak the same version.
///
/// # Errors
/// The connection fails.
pub async fn greet(stream: &mut UnixStream) -> Result<bool, FrameError> {
    let Some(theirs) = receive::<proto::Hello>(stream, MESSAGE_LIMIT).await? else { return Ok(false) };
    send(stream, &hello()).await?;
    if theirs.version != VERSION {
        warn!(
            "{} speaks version {} of the control protocol, this program {VERSION}",
            theirs.program, theirs.version
        );
    }
    Ok(theirs.version == VERSION)
}
