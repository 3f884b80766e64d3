// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake serve --metrics`: numbers of the agent, its sessions and its cache, for Prometheus (docs/metrics.md).
//!
//! * [`http`]: answers GET /metrics.
//! * [`exposition`]: a status as text.

mod exposition;
mod http;

pub(super) use self::http::serve;
