// SPDX-License-Identifier: MIT OR Apache-2.0
//! A disk that starts to fail: each later read returns EIO.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::Command;

use rewake_testkit::process::output as run;

/// Space for the file system besides the files.
const ROOM: u64 = 32 << 20;
/// The part that still works: the file system's tables. All files are after it.
const LEFT: u64 = 256 << 10;

/// A disk with some files, to which links lead from their old places. Dropping it removes all.
#[derive(Debug)]
pub struct FailingDisk {
    folder: tempfile::TempDir,
    device: String,
    mounted: Vec<PathBuf>,
}

impl FailingDisk {
    /// Moves these files to the disk. None of their bytes is in the page cache then.
    ///
    /// # Errors
    /// The machine has no loop devices, or not enough space.
    pub fn with(files: &[PathBuf]) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let (image, place) = (folder.path().join("disk"), folder.path().join("mounted"));
        let lengths = files.iter().map(|file| Ok(fs::metadata(file)?.len()));
        let bytes: u64 = lengths.sum::<anyhow::Result<u64>>()?;
        File::create(&image)?.set_len((bytes + ROOM).next_multiple_of(4096))?;
        fs::create_dir(&place)?;
        run(Command::new("modprobe").arg("loop"))?;
        let device = run(Command::new("losetup").args(["--find", "--show"]).arg(&image))?;
        let mut disk = Self { folder, device: device.trim().to_owned(), mounted: Vec::new() };
        run(Command::new("busybox").args(["mke2fs", "-b", "4096"]).arg(&disk.device))?;
        disk.mount(Path::new(&disk.device.clone()), &place, &["-t", "ext4"])?;
        let there = |file: &Path| place.join(file.file_name().unwrap_or_default());
        for file in files {
            fs::copy(file, there(file))?;
        }
        disk.unmount();
        disk.mount(Path::new(&disk.device.clone()), &place, &["-t", "ext4", "-o", "ro"])?;
        for file in files {
            // A link at the old place leads to the file on the disk.
            File::create(file)?;
            disk.mount(&there(file), file, &["--bind"])?;
            // The file system's tables are in memory, and the files' bytes are not.
            let from = format!("if={}", file.display());
            run(Command::new("dd").args([&from, "of=/dev/null", "bs=1M", "iflag=direct"]))?;
        }
        Ok(disk)
    }

    /// Makes all later reads of its files fail.
    ///
    /// # Errors
    /// Reads still succeed.
    pub fn fails(&self) -> anyhow::Result<()> {
        OpenOptions::new().write(true).open(self.folder.path().join("disk"))?.set_len(LEFT)?;
        run(Command::new("losetup").arg("--set-capacity").arg(&self.device)).map(drop)
    }

    fn mount(&mut self, what: &Path, place: &Path, options: &[&str]) -> anyhow::Result<()> {
        run(Command::new("mount").args(options).arg(what).arg(place))?;
        self.mounted.push(place.to_owned());
        Ok(())
    }

    fn unmount(&mut self) {
        for place in self.mounted.drain(..).rev() {
            if let Err(error) = run(Command::new("umount").arg(&place)) {
                eprintln!("a failing disk is left behind: {error:#}");
            }
        }
    }
}

impl Drop for FailingDisk {
    fn drop(&mut self) {
        self.unmount();
        if let Err(error) = run(Command::new("losetup").arg("--detach").arg(&self.device)) {
            eprintln!("a failing disk is left behind: {error:#}");
        }
    }
}
