// SPDX-License-Identifier: MIT OR Apache-2.0
//! Answers on the control socket.

use rewake_streamer::control::frame::{FrameError, send};
use rewake_streamer::control::proto::{self, Reply, reply};
use tokio::net::UnixStream;

pub(super) async fn answer(stream: &mut UnixStream, kind: reply::Kind) -> Result<(), FrameError> {
    send(stream, &Reply { kind: Some(kind) }).await
}

pub(super) fn failure(reason: String) -> reply::Kind {
    reply::Kind::Failure(proto::Failure { reason, lasting: false })
}
