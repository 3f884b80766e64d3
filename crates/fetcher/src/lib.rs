// SPDX-License-Identifier: MIT OR Apache-2.0
//! The fetcher: the process that brings missing pages of an image from a page server, or from an image
//! server.
//!
//! A streamer starts it (`rewake fetcher`), so that no network code runs in a process that holds
//! userfaultfds. Or the node agent does, for all streamers that restore one image. It writes pages into a
//! cache file, or into the files of the image, and sets their bits in a [presence
//! map](rewake_image_io::PresenceMap).
//!
//! * [`plan`]: what each page of the presence map is at the peer, and where the peer is.
//! * [`channel`]: the messages between streamer and fetcher. `client`: the streamers that share one.
//! * `peer`: the socket to the peer. `stream`: the connection, with TLS or without. `wire` and `image_wire`:
//!   the protocols on it; `peer_wire`: one of them. `received`: what has arrived on it. `queue`: which pages
//!   are requested next, and `turns`: of which streamer. `window`: how many at once.
//! * [`process`]: the fetcher itself. Start here. `confine`: what it may do. `waiting`: for sockets.
//! * [`unread`]: how a streamer ends a connection as a failure. [`restarts`]: when another fetcher is
//!   started.
//!
//! The peer is `criu page-server --lazy-pages`, `criu dump --lazy-pages`, `rewake page-server --lazy-pages`,
//! or `rewake export`. Its answers are hostile input, so their lengths and addresses must match a request.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable))]

mod answer_limits;
pub mod channel;
mod client;
mod confine;
mod ended;
mod image_wire;
mod peer;
mod peer_wire;
pub mod plan;
pub mod process;
mod queue;
mod readers;
mod received;
pub mod restarts;
mod stream;
mod turns;
pub mod unread;
mod waiting;
mod window;
mod wire;

pub use client::MAX_FETCH_CLIENTS;
