// SPDX-License-Identifier: MIT OR Apache-2.0
//! Leaving while most memory is missing.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::Context;

use crate::memory::Expect;
use crate::stage::Stage;

/// Reads one page and exits.
pub(crate) fn exit_early(stage: &Stage) -> anyhow::Result<()> {
    let region = stage.filled()?;
    stage.ready_then_go()?;
    let last = region.pages - 1;
    region.check(stage, last, Expect::Of(region.pattern, last));
    Ok(())
}

/// Reads one page and becomes another program, which reports.
pub(crate) fn exec_early(stage: &Stage) -> anyhow::Result<()> {
    exit_early(stage)?;
    let program = std::env::current_exe().context("find this program")?;
    Err(Command::new(program).arg("after-exec").arg("--dir").arg(&stage.dir).exec().into())
}

/// The program that [`exec_early`] becomes.
pub(crate) fn after_exec(stage: &Stage) -> anyhow::Result<()> {
    let region = stage.filled()?;
    region.check_all(stage);
    Ok(())
}
