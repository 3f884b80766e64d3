// SPDX-License-Identifier: MIT OR Apache-2.0
//! The machine's disks. The system's is an ext4 file system; every machine writes to its own throw-away copy,
//! which QEMU keeps. A scratch disk of a given rate is for measurements.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::cache::{self, Inputs};
use super::options::Disk;
use super::say;
use crate::program;

/// The file is sparse; space for what commands write.
const SIZE: &str = "8G";

/// The disk's image, in the machine's folder.
pub(super) fn ready(home: &Path, system: &Path) -> anyhow::Result<PathBuf> {
    let disk = home.join("disk.ext4");
    let inputs = Inputs::default().text(SIZE).made(system)?;
    cache::ready(&disk, &inputs, || {
        say("writing the disk");
        let mut mke2fs = Command::new("mke2fs");
        mke2fs.args(["-q", "-t", "ext4", "-O", "^has_journal", "-d"]);
        program::capture(mke2fs.arg(system).arg(&disk).arg(SIZE)).map(drop)
    })?;
    Ok(disk)
}

/// The name by which `boot.sh` finds the scratch disk.
const SERIAL: &str = "scratch";
/// All inodes are written before the machine boots: a file system for few and large files has little to
/// write.
const INODES: &str = "8192";

/// A scratch disk for one run, in its folder.
pub(super) fn scratch(disk: &Disk, folder: &Path) -> anyhow::Result<PathBuf> {
    let path = folder.join("scratch.ext4");
    let mut mke2fs = Command::new("mke2fs");
    // Without a journal, and with nothing left for the kernel to set up in the background: the disk's traffic
    // is the command's alone.
    mke2fs.args(["-q", "-t", "ext4", "-O", "^has_journal", "-E", "lazy_itable_init=0", "-N", INODES]);
    program::capture(mke2fs.arg(&path).arg(format!("{}M", disk.mib)))?;
    Ok(path)
}

/// QEMU's arguments for it. The host's page cache has no part in its speed.
pub(super) fn scratch_arguments(disk: &Disk, path: &str) -> [String; 4] {
    let mut drive = format!("if=none,id={SERIAL},file={path},format=raw,cache=none,discard=unmap");
    if let Some(mbps) = disk.mbps {
        drive += &format!(",throttling.bps-total={}", u64::from(mbps) * 1_000_000);
    }
    let device = format!("virtio-blk-pci,drive={SERIAL},serial={SERIAL}");
    ["-drive".to_owned(), drive, "-device".to_owned(), device]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_in_millions_of_bytes() {
        let drive = |mbps| scratch_arguments(&Disk { mib: 64, mbps }, "/a").concat();
        assert!(drive(Some(5)).contains("throttling.bps-total=5000000"));
        assert!(!drive(None).contains("throttling"));
    }
}
