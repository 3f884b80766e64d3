// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rust for the messages of `proto/store.proto`, committed; `xtask/tests/generated.rs` keeps it current.

#[rustfmt::skip]
#[allow(missing_docs, unreachable_pub)]
mod store;

pub(crate) use store::*;
