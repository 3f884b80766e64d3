// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rust for the messages of `proto/`, committed; `xtask/tests/generated.rs` keeps it current.

#[rustfmt::skip]
#[allow(missing_docs, unreachable_pub)]
#[cfg_attr(
    not(feature = "testing"),
    allow(dead_code, reason = "mappings are read one by one, not as `MmEntry`")
)]
mod criu;
/// Of CRIU's amdgpu plugin.
#[rustfmt::skip]
#[allow(missing_docs, unreachable_pub)]
pub(crate) mod amdgpu;
/// Of this project's plugin for GPUs.
#[rustfmt::skip]
#[allow(missing_docs, unreachable_pub)]
pub(crate) mod gpu;

pub(crate) use criu::*;
