// SPDX-License-Identifier: MIT OR Apache-2.0
//! rewake: the page server and its command line
fn main() {}
