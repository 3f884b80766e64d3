// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checkpoint operations. All except [`resume`] need the target's own `/dev/kfd` descriptor. The caller must
//! be the target itself or the thread that traces its leader, with CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN.
//!
//! The kernel's rules are not checked here: pause and unpause alternate, and resume happens exactly once.
//!
//! No operation is repeated here, whatever its error. A [`process_info`] or [`checkpoint`] that failed has
//! changed nothing, and may be repeated (EINTR, EAGAIN). A [`restore`] that failed may have created a part,
//! and the process is lost. A [`resume`] that failed counts: a second one seems to succeed and leaves memory
//! unprotected (`amdgpu_amdkfd_criu_resume`, `kfd_criu_resume_svm`).

pub mod blob;
pub mod queues;

use std::os::fd::{BorrowedFd, OwnedFd};

use crate::abi::call::Argument as _;
use crate::abi::{call, *};
use crate::{Error, FailedCall};

/// The counts of a paused process; [`checkpoint`] needs exactly these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// The target, in its own PID namespace.
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

/// The kernel's description of a paused process, from which it restores one.
#[derive(Debug)]
pub struct Checkpoint {
    /// GPUs. A restore sets `drm_fd` and `actual_gpu_id` first.
    pub devices: Vec<kfd_criu_device_bucket>,
    /// Buffers.
    pub bos: Vec<kfd_criu_bo_bucket>,
    /// Private data: see [`blob`].
    pub private: Vec<u8>,
    /// The number of objects in the private data.
    pub objects: u32,
    /// A dma-buf for each buffer with bytes of its own.
    pub dmabufs: Vec<Option<OwnedFd>>,
}

/// Pauses all queues of the target, and counts its objects.
///
/// # Errors
/// CRIU_OP failed: EBADF for another process's descriptor, EACCES without the capability, ENODEV without
/// GPUs.
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

/// Returns the kernel's description of a paused process.
///
/// # Errors
/// CRIU_OP failed: EINVAL if it is not paused or has other counts.
pub fn checkpoint(kfd: BorrowedFd<'_>, counts: &Counts) -> Result<Checkpoint, Error> {
    let private = usize::try_from(counts.private).unwrap_or(usize::MAX);
    let mut checkpoint = Checkpoint {
        devices: vec![kfd_criu_device_bucket::zeroed(); counts.devices as usize],
        bos: vec![kfd_criu_bo_bucket::zeroed(); counts.bos as usize],
        private: vec![0; private],
        objects: counts.objects,
        dmabufs: Vec::new(),
    };
    let mut argument = checkpoint.operation(KFD_CRIU_OP_CHECKPOINT);
    argument.pid = counts.pid;
    checkpoint.dmabufs =
        call::criu(kfd, &mut argument, &mut checkpoint.devices, &mut checkpoint.bos, &mut checkpoint.private)
            .map_err(FailedCall::named("CRIU_OP CHECKPOINT").failed())?;
    Ok(checkpoint)
}

/// Resumes a paused process's queues.
///
/// # Errors
/// CRIU_OP failed: EINVAL if it is not paused.
pub fn unpause(kfd: BorrowedFd<'_>) -> Result<(), Error> {
    let mut argument = operation(KFD_CRIU_OP_UNPAUSE);
    let result = call::criu(kfd, &mut argument, &mut [], &mut [], &mut []);
    result.map(drop).map_err(FailedCall::named("CRIU_OP UNPAUSE").failed())
}

/// Restores everything in `checkpoint` in the process that opened `kfd`, with its queues evicted. Fills in
/// the buffers' dma-bufs and `restored_offset`s.
///
/// # Errors
/// CRIU_OP failed: EINVAL for other GPUs than the process sees, EBUSY for an address space or copy engine in
/// use.
pub fn restore(kfd: BorrowedFd<'_>, checkpoint: &mut Checkpoint) -> Result<(), Error> {
    let mut argument = checkpoint.operation(KFD_CRIU_OP_RESTORE);
    checkpoint.dmabufs =
        call::criu(kfd, &mut argument, &mut checkpoint.devices, &mut checkpoint.bos, &mut checkpoint.private)
            .map_err(FailedCall::named("CRIU_OP RESTORE").failed())?;
    Ok(())
}

/// Resumes a restored process's queues. A second call does harm.
///
/// # Errors
/// CRIU_OP failed: ESRCH if the process does not exist, EFAULT if memory is missing.
pub fn resume(kfd: BorrowedFd<'_>, pid: u32) -> Result<(), Error> {
    let mut argument = operation(KFD_CRIU_OP_RESUME);
    argument.pid = pid;
    let result = call::criu(kfd, &mut argument, &mut [], &mut [], &mut []);
    result.map(drop).map_err(FailedCall::named("CRIU_OP RESUME").failed())
}

fn operation(op: kfd_criu_op) -> kfd_ioctl_criu_args {
    kfd_ioctl_criu_args { op, ..kfd_ioctl_criu_args::zeroed() }
}

impl Checkpoint {
    /// Parses the private data.
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
