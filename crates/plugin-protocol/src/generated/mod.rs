// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rust for the messages of `proto/handover.proto`, committed; `xtask/tests/generated.rs` keeps it current.

#[rustfmt::skip]
#[allow(missing_docs, clippy::doc_markdown, clippy::derive_partial_eq_without_eq)]
mod handover;

pub use handover::*;
