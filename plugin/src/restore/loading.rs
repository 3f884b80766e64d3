// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loads the buffers' memory in CRIU's main process when every task is complete: for all processes at once,
//! with one staging memory. There io_uring may leave kernel threads, which CRIU would count as a task's.
//! Tasks pass their buffers as dma-bufs.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg, sendmsg,
    setsockopt, socketpair, sockopt,
};
use rewake_bo_contents::{GpuPagesFile, ProcessBuffers};
use rewake_criu_images::{ARRIVING_NAME, ImageDir, ImageError};
use rewake_criu_plugin::{Answer, Host};
use rewake_manifest::read_checksums;
use rewake_plugin_protocol::MAX_DESCRIPTORS;

use super::Restore;
use super::gpu_assignment::gpus;
use crate::contents;

/// Bytes of a buffer's number in a message.
const NUMBER_BYTES: usize = 4;
/// The socket's buffer: some KiB for a message, and a hundred messages more than the largest process had.
const SOCKET_BYTES: usize = 16 << 20;

#[derive(Debug, thiserror::Error)]
enum HandoverError {
    #[error("pass {0} buffers to CRIU's main process: the socket's buffer is full")]
    Full(usize),
    #[error(
        "{0}: the image's GPU memory has not arrived from another host, and no streamer listens that brings \
         it: only the migration can restore this image"
    )]
    NotArrived(&'static str),
    #[error(transparent)]
    List(#[from] ImageError),
    #[error("the message with the buffers of process {0} is malformed: report this fault of the plugin")]
    Garbled(u32),
    #[error(
        "the message with the buffers of the render node of file {0:#x} is malformed: report this fault of \
         the plugin"
    )]
    NodeGarbled(u32),
}

impl Restore {
    /// In a task: passes buffers to the main process. Returns the id of the socket with them in CRIU's store.
    pub(super) fn send_dmabufs(host: &Host, dmabufs: &[Option<OwnedFd>]) -> Answer<i32> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let (to, from) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
        // Without the right to exceed the system's limit, the default has to do.
        let _ = setsockopt(&to, sockopt::SndBufForce, &SOCKET_BYTES);
        let with_bytes: Vec<(usize, &OwnedFd)> = dmabufs
            .iter()
            .enumerate()
            .filter_map(|(buffer, dmabuf)| Some((buffer, dmabuf.as_ref()?)))
            .collect();
        for part in with_bytes.chunks(MAX_DESCRIPTORS) {
            let numbers: Vec<u8> = part
                .iter()
                .flat_map(|(buffer, _)| u32::try_from(*buffer).unwrap_or(u32::MAX).to_le_bytes())
                .collect();
            let fds: Vec<i32> = part.iter().map(|(_, fd)| fd.as_raw_fd()).collect();
            let rights = [ControlMessage::ScmRights(&fds)];
            let bytes = [IoSlice::new(&numbers)];
            match sendmsg::<()>(to.as_raw_fd(), &bytes, &rights, MsgFlags::MSG_DONTWAIT, None) {
                Ok(_) => {}
                Err(Errno::EAGAIN) => return Err(HandoverError::Full(with_bytes.len()).into()),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(host.store_fd(from.as_fd())?)
    }

    /// In the main process: loads the memory of all buffers, except those that the streamer loads.
    pub(super) fn load(&self, host: &Host) -> Answer {
        let mut memory = self.receive_all(host)?;
        if let Some(streamer) = &self.streamer {
            streamer.hand_over(host, self, &mut memory)?;
        }
        let now: Vec<ProcessBuffers<'_>> = memory.iter().map(UnloadedBuffers::process).collect();
        contents::load(host, &now)
    }

    fn receive_all(&self, host: &Host) -> Answer<Vec<UnloadedBuffers>> {
        let folder = host.image_dir()?;
        let images = ImageDir::of(folder.try_clone_to_owned()?, "the image directory")?;
        let sealed = read_checksums(&images)?;
        let arriving = images.arriving_files()?;
        let may_be_missing = !arriving.is_empty() || sealed.as_ref().is_some_and(|sealed| sealed.is_partial);
        let verify = |file: &GpuPagesFile| {
            if arriving.iter().any(|name| name == file.name()) {
                file.allow_arrival();
            }
            sealed.as_ref().map_or(Ok(()), |sealed| file.verify_with(sealed))
        };
        let mut memory = Vec::new();
        for (index, (id, image)) in self.images.kfd.iter().enumerate() {
            let Some(stored) = self.shared_state.contents(index) else { continue };
            let mut files = Vec::new();
            for gpu in gpus(image) {
                let minor = self.assignment.of(gpu)?.minor;
                files.push(GpuPagesFile::open(folder, *id, image, gpu.gpu_id, minor)?);
            }
            let dmabufs = receive(&host.stored_fd(stored)?, image.buffers.len())?;
            let dmabufs = dmabufs.ok_or(HandoverError::Garbled(image.pid))?;
            memory.push(UnloadedBuffers { process: Some(index), files, dmabufs, may_be_missing });
        }
        for (index, node) in self.nodes.iter().enumerate() {
            let Some(stored) = self.shared_state.node_contents(index) else { continue };
            let dmabufs = receive(&host.stored_fd(stored)?, node.contents.buffers.len())?;
            let dmabufs = dmabufs.ok_or(HandoverError::NodeGarbled(node.id))?;
            let files = node.files(folder, &dmabufs)?;
            memory.push(UnloadedBuffers { process: None, files, dmabufs, may_be_missing });
        }
        memory.iter().flat_map(|of| &of.files).try_for_each(verify)?;
        Ok(memory)
    }
}

/// Refuses an image whose GPU memory arrives from another host, where no streamer brings it: nothing else
/// would find zeros in the place of memory.
pub(super) fn refuse_arriving_files(host: &Host) -> Answer {
    let images = ImageDir::of(host.image_dir()?.try_clone_to_owned()?, "the image directory")?;
    Ok(expect_no_arriving_files(&images)?)
}

fn expect_no_arriving_files(images: &ImageDir) -> Result<(), HandoverError> {
    match images.arriving_files()?.is_empty() {
        true => Ok(()),
        false => Err(HandoverError::NotArrived(ARRIVING_NAME)),
    }
}

/// Buffers of a process or of a render node whose memory is to be loaded.
pub(super) struct UnloadedBuffers {
    /// The process's index, if these are buffers of a process that computes.
    pub(super) process: Option<usize>,
    files: Vec<GpuPagesFile>,
    /// By the image's number of the buffer. A buffer without one is not loaded.
    pub(super) dmabufs: Vec<Option<OwnedFd>>,
    /// Whether some of their bytes may be on another host.
    pub(super) may_be_missing: bool,
}

impl UnloadedBuffers {
    pub(super) fn process(&self) -> ProcessBuffers<'_> {
        ProcessBuffers { files: &self.files, dmabufs: &self.dmabufs }
    }
}

/// Receives the dma-bufs of `count` buffers. Returns `None` if a message is malformed.
fn receive(from: &OwnedFd, count: usize) -> Answer<Option<Vec<Option<OwnedFd>>>> {
    let mut dmabufs: Vec<Option<OwnedFd>> = (0..count).map(|_| None).collect();
    let mut space = nix::cmsg_space!([i32; MAX_DESCRIPTORS]);
    loop {
        let mut numbers = [0; MAX_DESCRIPTORS * NUMBER_BYTES];
        let (length, fds) = {
            let mut bytes = [IoSliceMut::new(&mut numbers)];
            let message = recvmsg::<()>(
                from.as_raw_fd(),
                &mut bytes,
                Some(&mut space),
                MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT,
            )?;
            let mut fds = Vec::new();
            for control in message.cmsgs()? {
                if let ControlMessageOwned::ScmRights(received) = control {
                    fds.extend(crate::abi::adopt(received));
                }
            }
            (message.bytes, fds)
        };
        // The sender closed its end after the last message.
        if length == 0 {
            return Ok(Some(dmabufs));
        }
        let (numbers, rest) = numbers[..length].as_chunks::<NUMBER_BYTES>();
        if !rest.is_empty() || numbers.len() != fds.len() {
            return Ok(None);
        }
        for (number, fd) in numbers.iter().zip(fds) {
            let Some(place) = dmabufs.get_mut(u32::from_le_bytes(*number) as usize) else { return Ok(None) };
            *place = Some(fd);
        }
    }
}

#[cfg(test)]
mod tests {
    use rewake_criu_images::add_arriving_file;

    use super::*;

    #[test]
    fn an_image_with_files_that_arrive_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let images = ImageDir::open(folder.path()).unwrap();
        expect_no_arriving_files(&images).unwrap();
        add_arriving_file(folder.path(), "amdgpu-pages-1-00ab.img").unwrap();
        let refused = expect_no_arriving_files(&images);
        assert!(matches!(refused, Err(HandoverError::NotArrived(ARRIVING_NAME))), "{refused:?}");
    }
}
