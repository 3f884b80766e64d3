// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of the crate as its users see it.

mod links;
mod pull;
mod scene;
