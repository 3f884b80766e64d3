// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask codegen`: writes the code that is generated from `proto/` anew.

use crate::{program, repository};

/// Packages that have generated code, and beside it the test that compares it with its source.
const PACKAGES: [&str; 2] = ["rewake-criu-images", "rewake"];

/// Needs no set-up: the generator is pure Rust, and the test that compares its output also blesses it.
pub(crate) fn run() -> anyhow::Result<()> {
    for package in PACKAGES {
        let mut cargo = repository::cargo();
        cargo.args(["test", "--package", package, "--test", "generated"]);
        program::run(cargo.env("REWAKE_BLESS", "1"))?;
    }
    Ok(())
}
