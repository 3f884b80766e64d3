// SPDX-License-Identifier: MIT OR Apache-2.0
//! Live migration of a process tree: the agents of both hosts around CRIU. The protocol is in `rewake-migration`.
//!
//! * [`source`]: dumps and freezes the tree, serves its memory, kills it at the end. Start here.
//! * [`destination`]: restores the tree, and releases it after GRANT.
//! * [`script`]: this program as CRIU's action script, which holds CRIU while the agents agree.
//! * `cgroup`: the freezer. `folder`: the record, which decides when an agent has died.
//! * `peer`, `frame`: the connection. `relay`: page requests of a lazy restore, over that connection.
//! * `host`: what hosts compare. `image_files`, `frozen_memory`, `criu`: what their names say.
#![forbid(unsafe_code)]

mod cgroup;
pub mod criu;
pub mod destination;
mod folder;
mod frame;
mod frozen_memory;
mod host;
mod image_files;
mod peer;
mod relay;
pub mod script;
pub mod source;
