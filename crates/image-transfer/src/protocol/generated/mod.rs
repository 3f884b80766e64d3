// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rust for the messages of `proto/image.proto`, committed; `xtask/tests/generated.rs` keeps it current.

#[rustfmt::skip]
#[allow(missing_docs, unreachable_pub)]
mod image;

pub use image::*;
