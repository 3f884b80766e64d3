// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rust for the messages of `proto/`, committed; `tests/generated.rs` keeps it current.

#[rustfmt::skip]
#[allow(missing_docs, unreachable_pub)]
mod criu;
/// Of CRIU's amdgpu plugin.
#[rustfmt::skip]
#[allow(missing_docs, unreachable_pub)]
pub(crate) mod amdgpu;

pub(crate) use criu::*;
