// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask bench lazy`: the same image through stock CRIU and through rewake, side by side.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::Context as _;

use crate::{repository, setup};

/// Ends as `rewake-bench lazy`, with `more` passed through.
pub(crate) fn lazy(more: &[&str]) -> anyhow::Result<()> {
    let criu = setup::run()?;
    let rewake = repository::build_release("rewake", "rewake")?;
    let bench = repository::build_release("rewake-bench", "rewake-bench")?;
    let mut command = Command::new(&bench);
    command.arg("lazy").arg("--criu").arg(&criu.path).arg("--rewake").arg(rewake).args(more);
    Err(command.exec()).with_context(|| format!("start {}", bench.display()))
}
