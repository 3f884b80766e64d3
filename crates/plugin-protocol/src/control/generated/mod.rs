// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rust for the messages of `proto/control.proto`, committed; `xtask/tests/generated.rs` keeps it current.

#[rustfmt::skip]
#[allow(missing_docs, clippy::all)]
mod control;

pub use control::*;
