// SPDX-License-Identifier: MIT OR Apache-2.0
//! A file system that hangs, as a dead NFS server does: a FUSE mount whose server never answers.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// `FUSE_INIT` of `include/uapi/linux/fuse.h`.
const INIT: u32 = 26;
/// Bytes of a request at most, as far as these tests go.
const REQUEST: usize = 64 << 10;

/// A mount whose files cannot be opened or listed: each request waits. Dropping it fails them.
#[derive(Debug)]
pub struct SilentMount {
    device: File,
    path: PathBuf,
}

impl SilentMount {
    /// Makes a mount at a new folder.
    ///
    /// # Errors
    /// Why this machine has no FUSE.
    pub fn new(path: &Path) -> Result<Self, String> {
        let device = File::options().read(true).write(true).open("/dev/fuse");
        let device = device.map_err(|error| format!("/dev/fuse: {error}"))?;
        fs::create_dir(path).map_err(|error| error.to_string())?;
        let mount = Self { device, path: path.to_owned() };
        mount.mount().map_err(|error| format!("{error:#}"))?;
        Ok(mount)
    }

    /// Its folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits for a request, takes it, and never answers. The process that made it cannot be killed from now
    /// on.
    ///
    /// # Errors
    /// No request arrives in time.
    pub fn take_request(&mut self, limit: Duration) -> anyhow::Result<()> {
        self.receive(limit).map(drop)
    }

    fn mount(&self) -> anyhow::Result<()> {
        let number = self.device.as_raw_fd();
        // mount(8) has to inherit it.
        fcntl(&self.device, FcntlArg::F_SETFD(FdFlag::empty()))?;
        let options = format!("fd={number},rootmode=40000,user_id=0,group_id=0");
        let mut command = Command::new("mount");
        let output = command.args(["-i", "-t", "fuse", "-o", &options, "silent"]).arg(&self.path).output();
        fcntl(&self.device, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        let output = output.context("mount")?;
        ensure!(output.status.success(), "mount: {}", String::from_utf8_lossy(&output.stderr));
        let request = self.receive(crate::scene::ACT)?;
        ensure!(request.get(4..8) == Some(&INIT.to_le_bytes()), "another request came first");
        // `fuse_out_header` with the request's number, and `fuse_init_out`: version 7.31, writes of 4 KiB.
        let mut answer = vec![0; 80];
        answer[0] = 80;
        answer[8..16].copy_from_slice(&request[8..16]);
        (answer[16], answer[20], answer[37]) = (7, 31, 0x10);
        (&self.device).write_all(&answer).context("answer INIT")
    }

    fn receive(&self, limit: Duration) -> anyhow::Result<Vec<u8>> {
        let limit = PollTimeout::try_from(limit).context("time limit")?;
        let came = poll(&mut [PollFd::new(self.device.as_fd(), PollFlags::POLLIN)], limit)?;
        ensure!(came == 1, "no request came");
        let mut request = vec![0; REQUEST];
        let count = (&self.device).read(&mut request).context("read a request")?;
        request.truncate(count);
        Ok(request)
    }
}

impl Drop for SilentMount {
    fn drop(&mut self) {
        // The requests fail when the device is closed, right after this.
        let _ = Command::new("umount").args(["-i", "-l"]).arg(&self.path).status();
    }
}
