// SPDX-License-Identifier: MIT OR Apache-2.0
//! Commands about the program itself, and its machine.

use std::path::PathBuf;

use clap::Args;

/// Options of `rewake doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print everything as JSON, for programs (docs/diagnose.md)
    #[arg(long)]
    pub json: bool,
}

/// Options of `rewake version`.
#[derive(Debug, Args)]
pub struct VersionArgs {
    /// Print everything as JSON, for programs
    #[arg(long)]
    pub json: bool,
}

/// Options of `rewake manual`.
#[derive(Debug, Args)]
pub struct ManualArgs {
    /// An empty directory for the files
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,
}
