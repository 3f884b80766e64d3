// SPDX-License-Identifier: MIT OR Apache-2.0
//! Open dma-bufs of amdgpu's buffers.

use std::fs;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use nix::sys::stat::fstat;
use rewake_bo_contents::folder;
use rewake_criu_images::amdgpu::{DmabufImage, dmabuf_name};
use rewake_criu_plugin::{Answer, Host};

use super::shared::Shared;

/// How the kernel names every dma-buf's file, with or without a name of its own behind it.
const LINK: &str = "/dmabuf:";
/// What a dma-buf's `fdinfo` says of who exported it.
const EXPORTER: &str = "exp_name:";
const AMDGPU: &str = "amdgpu";

/// A dma-buf whose buffer is in no image has nowhere to come back from.
#[derive(Debug, thiserror::Error)]
#[error(
    "the dma-buf of file {0:#x} is open, and no process that is dumped has its buffer on a GPU's compute side: \
     close it, or dump the process that has the buffer, too"
)]
pub(super) struct Ownerless(pub(super) u32);

/// Whether a file is a dma-buf of an AMD GPU's memory.
pub(super) fn is_one(file: BorrowedFd<'_>) -> Answer<bool> {
    let number = file.as_raw_fd();
    let link = fs::read_link(format!("/proc/self/fd/{number}"))?;
    if !link.to_string_lossy().starts_with(LINK) {
        return Ok(false);
    }
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{number}"))?;
    Ok(exporter(&info) == Some(AMDGPU))
}

fn exporter(info: &str) -> Option<&str> {
    info.lines().find_map(|line| line.strip_prefix(EXPORTER)).map(str::trim)
}

/// Its name among all dma-bufs.
pub(super) fn inode(file: BorrowedFd<'_>) -> nix::Result<u64> {
    Ok(fstat(file)?.st_ino)
}

/// Writes what images keep of an open dma-buf.
pub(super) fn dump(host: &Host, file: BorrowedFd<'_>, id: u32, shared: &mut Shared) -> Answer {
    let handle = shared.dmabuf(id, inode(file)?);
    folder::write(host.image_dir()?, &dmabuf_name(id), &DmabufImage { handle }.to_bytes())?;
    shared.write(host)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn the_exporter_is_told_by_the_kernel() {
        let info =
            "pos:\t0\nflags:\t02000002\nmnt_id:\t16\nino:\t3\nsize:\t4096\ncount:\t3\nexp_name:\tamdgpu\n";
        assert_eq!(exporter(info), Some("amdgpu"));
        assert_eq!(exporter("pos:\t0\n"), None);
    }

    #[test]
    fn other_files_are_none() {
        assert!(!is_one(fs::File::open("/proc/self/exe").unwrap().as_fd()).unwrap());
    }
}
