// SPDX-License-Identifier: MIT OR Apache-2.0
//! A disk that fails: what is read of it after that is EIO.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::Command;

use rewake_testkit::process::output as run;

/// Besides the files: what the file system needs for itself.
const ROOM: u64 = 32 << 20;
/// What is left of it: its own tables. All files are behind that.
const LEFT: u64 = 256 << 10;

/// It has some files, each of which is still in its place, too. Dropped, it is gone, and so are they.
#[derive(Debug)]
pub struct FailingDisk {
    folder: tempfile::TempDir,
    device: String,
    mounted: Vec<PathBuf>,
}

impl FailingDisk {
    /// Moves these files there. None of their bytes is in the page cache then.
    ///
    /// # Errors
    /// The machine has no loop devices, or not enough room.
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
            // Whoever opens it finds the one on the disk.
            File::create(file)?;
            disk.mount(&there(file), file, &["--bind"])?;
            // Where the file system has put its bytes is in memory, and they are not.
            let from = format!("if={}", file.display());
            run(Command::new("dd").args([&from, "of=/dev/null", "bs=1M", "iflag=direct"]))?;
        }
        Ok(disk)
    }

    /// From now on nothing can be read of its files.
    ///
    /// # Errors
    /// It goes on.
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
                eprintln!("a disk that fails stays: {error:#}");
            }
        }
    }
}

impl Drop for FailingDisk {
    fn drop(&mut self) {
        self.unmount();
        if let Err(error) = run(Command::new("losetup").arg("--detach").arg(&self.device)) {
            eprintln!("a disk that fails stays: {error:#}");
        }
    }
}
