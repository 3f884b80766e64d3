// SPDX-License-Identifier: MIT OR Apache-2.0
//! Side-by-side comparisons with the stock daemon
fn main() {}
