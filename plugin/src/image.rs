// SPDX-License-Identifier: MIT OR Apache-2.0
//! What CRIU's plugin leaves in an image.

use std::os::fd::BorrowedFd;

use nix::errno::Errno;
use nix::fcntl::AtFlags;
use nix::sys::stat::fstatat;

/// The image file with the GPU state of the open file `id`; none if the file is no GPU's.
pub(crate) fn gpu_state(images: BorrowedFd<'_>, id: u32) -> nix::Result<Option<String>> {
    for kind in ["kfd-", "renderD-", "dmabuf_"] {
        let name = format!("amdgpu-{kind}{id}.img");
        match fstatat(images, name.as_str(), AtFlags::empty()) {
            Ok(_) => return Ok(Some(name)),
            Err(Errno::ENOENT) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn the_state_of_a_file_is_found_by_its_id() {
        let folder = tempfile::tempdir().unwrap();
        for name in
            ["amdgpu-kfd-7.img", "amdgpu-renderD-8.img", "amdgpu-dmabuf_9.img", "amdgpu-pages-6-0000.img"]
        {
            fs::write(folder.path().join(name), "").unwrap();
        }
        let images = File::open(folder.path()).unwrap();
        let state = |id| gpu_state(images.as_fd(), id).unwrap();
        assert_eq!(state(7).as_deref(), Some("amdgpu-kfd-7.img"));
        assert_eq!(state(8).as_deref(), Some("amdgpu-renderD-8.img"));
        assert_eq!(state(9).as_deref(), Some("amdgpu-dmabuf_9.img"));
        assert_eq!(state(6), None);
    }
}
