// SPDX-License-Identifier: MIT OR Apache-2.0
//! Set-up, demo, test, bench: builds with nothing but cargo installed
fn main() {}
