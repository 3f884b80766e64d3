// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rules for calls that must not happen while their memory is missing: they make it accessible to another
//! process or to CPUs, or would remove such a rule.
//!
//! A part is compared with the argument. The driver uses that id to find the GPU among the process's GPUs, as
//! the process names them. Only EXPORT_DMABUF uses the machine's ids (`kfd_device_by_id`). So on GPUs with
//! other ids than the image's, the driver refuses a process's own handles there (EINVAL).

use std::mem::offset_of;

use rewake_amdgpu_uapi::abi::*;

use crate::wait_rules::{byte, number};
use crate::{CallClass, DenyRule};

/// Makes a buffer available to another process. The part is the GPU of the buffer.
pub const EXPORT: CallClass = CallClass::one(0);
/// Replaces the record of an open file (Linux 7.2). Entries would not cover the new record, and the old one
/// could not be unblocked through that file. Part 0: the whole process. A caller that blocks any part of a
/// process also blocks this until all are unblocked.
pub const CREATE_PROCESS: CallClass = CallClass::one(1);
/// Copies memory of another process, named by pid, with GPUs. Part 0: the whole calling process.
pub const CROSS_COPY: CallClass = CallClass::one(2);
/// Gives a CPU access to memory on a GPU, by mprotect(2) of an inaccessible mapping. Part 0, of an open file
/// of a render node.
pub const ACCESS: CallClass = CallClass::one(3);

/// `AMDKFD_IOC_CREATE_PROCESS`; Linux 6.12 has no ioctl of that number.
const ANOTHER_PROCESS: u8 = 0x27;
/// IPC_EXPORT_HANDLE, which only the driver of ROCm's own packages has (`include/uapi/linux/kfd_ioctl.h` of
/// ROCK-Kernel-Driver, "non-upstream ioctls"). Its argument: a handle, 16 bytes for the answer, the id of the
/// buffer's GPU, 4 bytes more.
const IPC_EXPORT: u8 = 0x81;
const IPC_EXPORT_GPU: u8 = 24;
/// CROSS_MEMORY_COPY, of the same driver.
const CROSS_MEMORY_COPY: u8 = 0x83;

/// Returns rules for EXPORT_DMABUF, IPC_EXPORT_HANDLE, CREATE_PROCESS and CROSS_MEMORY_COPY. `kfd` is the
/// `st_rdev` of `/dev/kfd`.
#[must_use]
pub(crate) fn calls(kfd: libc::dev_t) -> [DenyRule; 4] {
    let call = |number, part, class| DenyRule { devices: vec![kfd], number, part, class };
    let export = const { gpu_of(offset_of!(kfd_ioctl_export_dmabuf_args, handle)) };
    [
        call(number(IOC_EXPORT_DMABUF), Some(export), EXPORT),
        call(IPC_EXPORT, Some(IPC_EXPORT_GPU), EXPORT),
        call(ANOTHER_PROCESS, None, CREATE_PROCESS),
        call(CROSS_MEMORY_COPY, None, CROSS_COPY),
    ]
}

/// Returns the offset of the GPU's id in a handle, which is its upper half (`MAKE_HANDLE`,
/// `drivers/gpu/drm/amd/amdkfd/kfd_chardev.c`).
const fn gpu_of(handle: usize) -> u8 {
    byte(if cfg!(target_endian = "little") { handle + 4 } else { handle })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_at_the_kernels_offsets() {
        let rules = calls(7).map(|call| (call.number, call.part));
        assert_eq!(rules, [(0x24, Some(4)), (0x81, Some(24)), (0x27, None), (0x83, None)]);
    }
}
