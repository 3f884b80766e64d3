// SPDX-License-Identifier: MIT OR Apache-2.0
//! End to end tests with the real CRIU: a target program is dumped, restored with lazy pages, and checks
//! every byte of its memory itself.
//!
//! * [`Scene`]: one dumped target with its directories; starts servers, restores, collects the verdict.
//! * [`Server`]: `rewake lazy-pages`, or CRIU's own with `REWAKE_TEST_SERVER=stock` (to see which tests it
//!   fails).
//! * [`daemon`]: restores by `rewake serve`.
//! * [`node_etc`]: commands that find files in `/etc/rewake`.
//! * [`node_cache`]: restores of an image of a store, from the node's cache.
//! * [`Container`]: one dumped target in a container of runc's.
//! * [`Criu`]: the dump and restore commands, from `CRIU` (default: `criu` on the path) and `CRIU_ALT`.
//! * [`commands`]: commands of `rewake` that end by themselves.
//! * [`export`]: `rewake export`, and its clients.
//! * [`fuse`]: a file system that hangs.
//! * [`restore_gate`]: restores that wait for the test at a known step.
//! * [`migration`]: a target that moves between two [`hosts`](rewake_testkit::hosts).
//! * [`images`]: surgery on CRIU images, with a codec of its own so that it does not share our reader's
//!   mistakes.
//! * [`page_server`]: `rewake page-server` and CRIU's own, and a client that sends what it likes.
//! * [`limit`]: memory that the kernel refuses.
//! * [`pattern`]: what the pages hold.
//! * [`printed`]: the commands that the README and the pages in `docs` print.
//! * [`programs`]: programs of many kinds that answer questions about their own bytes.
//! * [`registry`]: a registry of OCI images.
//! * [`sessions`]: what is left when every process of a streamer was killed, and `rewake recover`.
//! * [`plugins`]: a target with a mapped device, and CRIU with plugins.
//!
//! Without `REWAKE_BIN`, `rewake` is the program that was built in the same folder as the test programs. The
//! tests need root. A test that does not run reports that by `rewake_skip`, and `cargo xtask test` compares
//! the reports with a list.

#![forbid(unsafe_code)]

pub mod commands;
pub mod container;
pub mod criu;
pub mod daemon;
pub mod export;
pub mod fuse;
pub mod images;
pub mod lazy_source;
pub mod limit;
pub mod migration;
pub mod node_cache;
pub mod node_etc;
pub mod page_server;
pub mod pattern;
pub mod plugins;
pub mod printed;
pub mod programs;
pub mod proxy;
pub mod registry;
pub mod restore_gate;
pub use rewake_testkit::relay;
pub mod scene;
pub mod server;
pub mod sessions;
mod skip;
pub mod verdict;

pub use container::Container;
pub use criu::Criu;
pub use rewake_skip::{need, skip};
pub use rewake_testkit::{Random, cgroup, process, random, seaweedfs};
pub use scene::Scene;
pub use server::{Refusal, Server, Setup};
pub use verdict::Verdict;
