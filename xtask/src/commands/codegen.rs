// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask codegen`: writes the code that is generated from `proto/` and from the kernel's headers
//! again.

use crate::{program, repository, vm};

/// The package with the test that compares all code generated from `proto/` with its source: this one.
const PROTO: &str = "xtask";
/// The package whose code is generated from the kernel's headers.
const KERNEL: &str = "rewake-amdgpu-uapi";

/// `proto/` needs no set-up: the generator is pure Rust, and the test that compares its output also blesses
/// it. The headers come from the virtual machine's Debian, which is made first if it is missing.
pub(crate) fn run() -> anyhow::Result<()> {
    program::run(generate(PROTO).env("REWAKE_BLESS", "1"))?;
    let headers = vm::prepare_all()?;
    program::run(generate(KERNEL).env("REWAKE_BLESS", "1").env("REWAKE_UAPI", headers))
}

fn generate(package: &str) -> std::process::Command {
    let mut cargo = repository::cargo();
    cargo.args(["test", "--package", package, "generated_code_is_current"]);
    cargo
}
