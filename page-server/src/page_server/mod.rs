// SPDX-License-Identifier: MIT OR Apache-2.0
//! A server in the place of `criu page-server`, in both of its roles, for CRIUs that know nothing of Rewake.
//!
//! * [`endpoint`]: where clients connect, and which addresses are refused.
//! * [`clients`]: accepts one client or many. Start here.
//! * `connection`: messages of one client, whatever carries its bytes. `disk`: calls that wait for the disk.
//! * [`receive`]: `criu dump --page-server` and `criu pre-dump --page-server` send memory; it becomes files
//!   of an image.
//! * [`serve`]: `criu lazy-pages --page-server` requests pages of an image.
//!
//! One thread runs all clients. Calls that wait for the disk, except writes into the page cache, run in
//! threads of their own, so that one client's sync delays no other client.
//!
//! TLS is a stream like the others ([`endpoint`], `ByteStream`). Only `connection` knows of it: it makes the
//! handshake, and sends records as CRIU needs them.

pub mod clients;
mod connection;
mod disk;
pub mod endpoint;
pub mod receive;
pub mod serve;
