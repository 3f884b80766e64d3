// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes open dma-bufs that amdgpu exported, and refuses other descriptors that GPU drivers export.

use std::fs;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;

use nix::sys::stat::fstat;
use rewake_bo_contents::folder;
use rewake_criu_images::amdgpu::{DmabufImage, dmabuf_name};
use rewake_criu_plugin::{Answer, Host};
use rewake_process::names::field;

use super::shared::DumpSharing;

/// Start of the link of every dma-buf's file in /proc; the dma-buf's own name may follow.
const LINK_PREFIX: &[u8] = b"/dmabuf:";
/// The line of a dma-buf's `fdinfo` that names its exporter. The dma-buf's own name is below it.
const EXPORTER_KEY: &str = "exp_name:";
const AMDGPU: &str = "amdgpu";

/// A dma-buf cannot be restored if no image has its buffer.
#[derive(Debug, thiserror::Error)]
#[error(
    "the dma-buf of file {0:#x} is open, and no process that is dumped has its buffer as compute memory: \
     close it, or also dump the process that has the buffer"
)]
pub(super) struct OwnerlessDmabuf(pub(super) u32);

/// A descriptor of a fence cannot be restored: no call returns what it belongs to.
#[derive(Debug, thiserror::Error)]
#[error(
    "file {id:#x} is a descriptor of a GPU driver's {what}, which cannot be restored: the program has to \
     import or close it before the dump"
)]
struct ExportedFence {
    id: u32,
    what: &'static str,
}

/// Refuses a descriptor of a syncobj or of a fence, of whichever driver: only GPU drivers export them.
pub(super) fn refuse_fence(file: BorrowedFd<'_>, id: u32) -> Answer {
    let link = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    let what = match link.as_os_str().as_bytes() {
        b"anon_inode:syncobj_file" => "syncobj",
        b"anon_inode:sync_file" => "fence (sync_file)",
        _ => return Ok(()),
    };
    Err(ExportedFence { id, what }.into())
}

/// Returns whether a file is a dma-buf of an AMD GPU's memory.
pub(super) fn is_amdgpu_dmabuf(file: BorrowedFd<'_>) -> Answer<bool> {
    let number = file.as_raw_fd();
    let link = fs::read_link(format!("/proc/self/fd/{number}"))?;
    if !link.as_os_str().as_bytes().starts_with(LINK_PREFIX) {
        return Ok(false);
    }
    let info = fs::read(format!("/proc/self/fdinfo/{number}"))?;
    Ok(field(&info, EXPORTER_KEY) == Some(AMDGPU))
}

/// Returns the inode of a dma-buf, which identifies it among all dma-bufs.
pub(super) fn inode(file: BorrowedFd<'_>) -> nix::Result<u64> {
    Ok(fstat(file)?.st_ino)
}

/// Writes the image of an open dma-buf.
pub(super) fn dump(host: &Host, file: BorrowedFd<'_>, id: u32, shared: &mut DumpSharing) -> Answer {
    let handle = shared.add_dmabuf(id, inode(file)?);
    folder::write(host.image_dir()?, &dmabuf_name(id), &DmabufImage { handle }.to_bytes())?;
    shared.write(host)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn fdinfo_names_the_exporter() {
        let info =
            b"pos:\t0\nflags:\t02000002\nmnt_id:\t16\nino:\t3\nsize:\t4096\ncount:\t3\nexp_name:\tamdgpu\n\
            name:\tcaf\xe9\nexp_name:\tother\n";
        assert_eq!(field(info, EXPORTER_KEY), Some(AMDGPU));
    }

    #[test]
    fn other_files_are_no_dma_bufs() {
        assert!(!is_amdgpu_dmabuf(fs::File::open("/proc/self/exe").unwrap().as_fd()).unwrap());
    }
}
