// SPDX-License-Identifier: MIT OR Apache-2.0
//! The machine's disk: the system in an ext4 file system, which CRIU and the kernel know well. Every machine writes
//! to its own throw-away copy, which QEMU keeps.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::cache::{self, Inputs};
use super::{home, say};
use crate::program;

/// The file is sparse; room for what commands write.
const SIZE: &str = "8G";

/// The disk's image.
pub(super) fn ready(system: &Path) -> anyhow::Result<PathBuf> {
    let disk = home().join("disk.ext4");
    let inputs = Inputs::default().text(SIZE).made(system)?;
    cache::ready(&disk, &inputs, || {
        say("writing the disk");
        let mut mke2fs = Command::new("mke2fs");
        mke2fs.args(["-q", "-t", "ext4", "-O", "^has_journal", "-d"]);
        program::capture(mke2fs.arg(system).arg(&disk).arg(SIZE)).map(drop)
    })?;
    Ok(disk)
}
