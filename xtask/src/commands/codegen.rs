// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask codegen`: writes the code that is generated from `proto/` anew.

use crate::{program, repository};

/// Needs no set-up: the generator is pure Rust, and the test that compares its output also blesses it.
pub(crate) fn run() -> anyhow::Result<()> {
    let mut cargo = repository::cargo();
    cargo.args(["test", "--package", "rewake-criu-images", "generated_code_is_current"]);
    program::run(cargo.env("REWAKE_BLESS", "1"))
}
