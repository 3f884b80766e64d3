// SPDX-License-Identifier: MIT OR Apache-2.0
//! The fetcher: the process that brings missing pages of an image from a page server.
//!
//! A streamer starts it (`rewake fetcher`), so that no network code runs in a process that holds userfaultfds. It
//! writes pages into a cache file and sets their bits in a [presence map](rewake_image_io::PresenceMap).
//!
//! * [`plan`]: which bytes of the cache file are which pages of which task, and where the peer is.
//! * [`channel`]: the messages between streamer and fetcher.
//! * `peer`: the socket to the peer. `stream`: the connection, with TLS or without. `wire`: the protocol on it.
//!   `queue`: which pages are requested next. `window`: how many at once.
//! * [`process`]: the fetcher itself. Start here. `confine`: what it may do.
//!
//! The peer is `criu page-server --lazy-pages`, `criu dump --lazy-pages`, or `rewake page-server --lazy-pages`. Its
//! answers are hostile input: their lengths and addresses must be those of a request.

pub mod channel;
mod confine;
mod peer;
pub mod plan;
pub mod process;
mod queue;
mod stream;
mod window;
mod wire;
