// SPDX-License-Identifier: MIT OR Apache-2.0
//! The streamer: it serves the memory of restored programs while they run.
//!
//! * [`restore`]: a restore from the start of its streamer to the last byte. Start here.
//! * [`supervise`]: the processes of a streamer. A supervisor starts a worker again; `recover` serves what a
//!   whole streamer left.
//! * [`ledger`]: the memory that survives a worker, the file that survives a streamer, and the fd stores
//!   parked in targets.
//! * [`planner`]: the confined process that parses an image.
//! * [`session`]: one restore that is served: its image, its handshake with CRIU, its end.
//! * [`cpu`]: page faults and the background load of CPU memory.
//! * [`fetch`]: the fetcher of a session whose memory comes from a page server. [`agent_fetch`]: that of the
//!   node's cache, which sessions share; [`shared_fetch`]: the agent's side of it.
//! * [`gpu`]: GPU memory: faults of CPUs on it, gates, queues.
//! * [`working_set`]: what programs access first, recorded for later restores.
//! * [`control`]: what the agent, streamers and their clients send to each other.
//! * [`failure`]: why a restore has failed.
//! * [`limits`]: which limit of this process an error has reached.
//! * [`record`]: the events of a session with their times. [`fault_latencies`]: how long page faults waited.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]

pub mod agent_fetch;
pub mod control;
pub mod cpu;
pub mod failure;
pub mod fault_latencies;
pub mod fetch;
pub mod fetch_peer;
mod fetcher_process;
pub mod gpu;
mod last_words;
pub mod ledger;
pub mod limits;
pub mod planner;
pub mod record;
pub mod restore;
pub mod session;
pub mod shared_fetch;
mod sidecar_file;
pub mod supervise;
mod sys;
#[cfg(test)]
mod uffd_child;
pub mod units;
pub mod watched;
pub mod working_set;
