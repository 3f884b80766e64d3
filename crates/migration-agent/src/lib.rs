// SPDX-License-Identifier: MIT OR Apache-2.0
//! Live migration of a process tree: the agents of both hosts around CRIU. The protocol is in
//! `rewake-migration`.
//!
//! * [`source`]: dumps and freezes the tree, serves its memory, kills it at the end. Start here.
//!   `source_options`: what the user wants. `source_begin`: its group and its offer. `frozen_wait`: how long
//!   it may be frozen.
//! * [`destination`]: restores the tree, and releases it after GRANT. `destination_place`: its folders, new
//!   or of an agent that was killed. `lost_limit`: how long it waits for a connection. `page_client`: serves
//!   page faults.
//! * [`script`]: this program as CRIU's action script, which holds CRIU while the agents agree.
//! * `cgroup`: the freezer. `folder`: the record, which decides when an agent has died.
//! * `earlier`: what agents of this host have left that were killed.
//! * `peer`, `frame`, `source_link`, `destination_link`: the connection. `relay`: page requests of a lazy
//!   restore, over that connection.
//! * `host`: what hosts compare, with `room`, `sockets`, `program_files` (`file_hasher`, in a thread of
//!   `file_look`). [`dry_run`]: that alone.
//! * [`pre_copy`]: rounds of memory while the tree runs. `tree_blocks`: their order. `tree_memory`: blocks
//!   and pages. `candidates`: where they wait for a comparison.
//! * `strangers`: connections that have sent no greeting.
//! * `intake`: how much a source may send before the restore begins.
//! * `image_files`: the image. `arriving_files`: its GPU memory, which arrives while the program runs.
//! * [`abort`](mod@abort), `waiting_dump`, [`criu`]: what their names say.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable))]

pub mod abort;
mod arriving_files;
mod candidates;
mod cgroup;
pub mod criu;
pub mod destination;
mod destination_link;
mod destination_place;
pub mod dry_run;
mod earlier;
mod file_hasher;
mod file_look;
mod folder;
mod frame;
mod frozen_wait;
mod host;
mod image_files;
mod intake;
mod lost_limit;
mod page_client;
mod peer;
pub mod pre_copy;
mod program_files;
mod relay;
mod room;
pub mod script;
mod sockets;
pub mod source;
mod source_begin;
mod source_link;
mod source_options;
mod start_time;
mod strangers;
mod text_path;
mod tree_blocks;
mod tree_memory;
mod waiting_dump;
