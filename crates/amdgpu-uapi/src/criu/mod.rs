// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checkpoint operations. All but [`resume`] need the target's own `/dev/kfd` descriptor and a caller that is the
//! target itself, or the thread that traces its leader; and CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN.
//!
//! The kernel's rules, which are not checked here: pause and unpause strictly in turn, resume exactly once.
//!
//! No operation is made again here, whatever its error is. A [`process_info`] or [`checkpoint`] that failed has left
//! nothing behind and may be tried again (EINTR, EAGAIN). A [`restore`] that failed may have made a part: the process
//! is lost. A [`resume`] that failed has counted: trying again looks like success and leaves memory unprotected
//! (`amdgpu_amdkfd_criu_resume`, `kfd_criu_resume_svm`).

pub mod blob;

use std::os::fd::{BorrowedFd, OwnedFd};

use crate::abi::call::Argument as _;
use crate::abi::{call, *};
use crate::{Error, FailedCall};

/// What a paused process has; [`checkpoint`] wants exactly these counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// The target, in its own pid namespace.
    pub pid: u32,
    /// GPUs.
    pub devices: u32,
    /// Buffers.
    pub bos: u32,
    /// Queues, events and ranges.
    pub objects: u32,
    /// Bytes of private data.
    pub private: u64,
}

/// What the kernel tells of a paused process, and takes to restore one.
#[derive(Debug)]
pub struct Image {
    /// GPUs; a restore sets `drm_fd` and `actual_gpu_id` first.
    pub devices: Vec<kfd_criu_device_bucket>,
    /// Buffers.
    pub bos: Vec<kfd_criu_bo_bucket>,
    /// Private data: see [`blob`].
    pub private: Vec<u8>,
    /// How many objects the private data has.
    pub objects: u32,
    /// For each buffer that has bytes of its own, a dma-buf.
    pub dmabufs: Vec<Option<OwnedFd>>,
}

/// Pauses all queues of the target and counts what it has.
///
/// # Errors
/// CRIU_OP failed: EBADF for another process's descriptor, EACCES without the capability, ENODEV without GPUs.
pub fn process_info(kfd: BorrowedFd<'_>) -> Result<Counts, Error> {
    let mut argument = operation(KFD_CRIU_OP_PROCESS_INFO);
    call::criu(kfd, &mut argument, &mut [], &mut [], &mut [])
        .map_err(FailedCall::named("CRIU_OP PROCESS_INFO").failed())?;
    Ok(Counts {
        pid: argument.pid,
        devices: argument.num_devices,
        bos: argument.num_bos,
        objects: argument.num_objects,
        private: argument.priv_data_size,
    })
}

/// Everything the kernel tells of a paused process.
///
/// # Errors
/// CRIU_OP failed: EINVAL if it is not paused or has other counts.
pub fn checkpoint(kfd: BorrowedFd<'_>, counts: &Counts) -> Result<Image, Error> {
    let private = usize::try_from(counts.private).unwrap_or(usize::MAX);
    let mut image = Image {
        devices: vec![kfd_criu_device_bucket::zeroed(); counts.devices as usize],
        bos: vec![kfd_criu_bo_bucket::zeroed(); counts.bos as usize],
        private: vec![0; private],
        objects: counts.objects,
        dmabufs: Vec::new(),
    };
    let mut argument = image.operation(KFD_CRIU_OP_CHECKPOINT);
    argument.pid = counts.pid;
    image.dmabufs = call::criu(kfd, &mut argument, &mut image.devices, &mut image.bos, &mut image.private)
        .map_err(FailedCall::named("CRIU_OP CHECKPOINT").failed())?;
    Ok(image)
}

/// Lets a paused process's queues run again.
///
/// # Errors
/// CRIU_OP failed: EINVAL if it is not paused.
pub fn unpause(kfd: BorrowedFd<'_>) -> Result<(), Error> {
    let mut argument = operation(KFD_CRIU_OP_UNPAUSE);
    let result = call::criu(kfd, &mut argument, &mut [], &mut [], &mut []);
    result.map(drop).map_err(FailedCall::named("CRIU_OP UNPAUSE").failed())
}

/// Makes everything in `image` anew in the process that opened `kfd`, evicted; fills in the buffers' dma-bufs and
/// `restored_offset`s.
///
/// # Errors
/// CRIU_OP failed: EINVAL for other GPUs than the process sees, EBUSY for an address space or copy engine in use.
pub fn restore(kfd: BorrowedFd<'_>, image: &mut Image) -> Result<(), Error> {
    let mut argument = image.operation(KFD_CRIU_OP_RESTORE);
    image.dmabufs = call::criu(kfd, &mut argument, &mut image.devices, &mut image.bos, &mut image.private)
        .map_err(FailedCall::named("CRIU_OP RESTORE").failed())?;
    Ok(())
}

/// Lets a restored process's queues run. Exactly once: a second time does harm.
///
/// # Errors
/// CRIU_OP failed: ESRCH for no such process, EFAULT where memory is missing.
pub fn resume(kfd: BorrowedFd<'_>, pid: u32) -> Result<(), Error> {
    let mut argument = operation(KFD_CRIU_OP_RESUME);
    argument.pid = pid;
    let result = call::criu(kfd, &mut argument, &mut [], &mut [], &mut []);
    result.map(drop).map_err(FailedCall::named("CRIU_OP RESUME").failed())
}

fn operation(op: kfd_criu_op) -> kfd_ioctl_criu_args {
    kfd_ioctl_criu_args { op, ..kfd_ioctl_criu_args::zeroed() }
}

impl Image {
    /// The private data, read.
    ///
    /// # Errors
    /// [`Error::Blob`].
    pub fn private(&self) -> Result<blob::Private, Error> {
        blob::Private::read(&self.private, self.devices.len(), self.bos.len(), self.objects as usize)
    }

    fn operation(&self, op: kfd_criu_op) -> kfd_ioctl_criu_args {
        let mut argument = operation(op);
        argument.num_devices = u32::try_from(self.devices.len()).unwrap_or(u32::MAX);
        argument.num_bos = u32::try_from(self.bos.len()).unwrap_or(u32::MAX);
        argument.num_objects = self.objects;
        argument.priv_data_size = self.private.len() as u64;
        argument
    }
}
