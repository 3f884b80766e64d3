// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake serve --metrics`: numbers of the agent, its sessions and its cache, for Prometheus
//! (docs/diagnose.md).
//!
//! * [`http`]: answers GET /metrics.
//! * [`exposition`]: a status as text.
//! * [`shared_look`]: a look at the cache's disk, which clients share.

mod exposition;
mod http;
mod shared_look;

pub(super) use self::http::serve;
