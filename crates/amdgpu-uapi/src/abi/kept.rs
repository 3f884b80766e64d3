// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls that must not happen while what they concern is not ready: they make a buffer reach further, or have queues run.
//!
//! A part is compared with what the argument says. By that id the driver looks for the GPU among those of the process, as the process
//! calls them; EXPORT_DMABUF alone goes by the machine's ids (`kfd_device_by_id`), so that on GPUs with other ids than the image's a
//! process's own handles are refused there (EINVAL).

use std::mem::offset_of;

use rewake_ioctl_filter::{CallClass, DenyRule};

use super::generated::*;
use super::registering::{byte, number};

/// A buffer's handle becomes something that another process can have. Its part is the GPU of the buffer.
pub const EXPORT: CallClass = CallClass::one(0);
/// A buffer is mapped to GPUs. Its part is the GPU of the buffer, not those that it is mapped to.
pub const MAP: CallClass = CallClass::one(1);
/// A queue is made. Of the whole process: part 0.
pub const CREATE_QUEUE: CallClass = CallClass::one(2);
/// A queue has another ring, or share of time. Of the whole process: part 0.
pub const UPDATE_QUEUE: CallClass = CallClass::one(3);
/// The driver puts another record in the place of the open file's (Linux 7.2), which a mark would not be of, and the old one could
/// not be opened through that file. Of the whole process: part 0. Whoever marks any part of a process has this kept away until the last is opened.
pub const CREATE_PROCESS: CallClass = CallClass::one(4);

/// Memory of another process is copied by GPUs, by that one's pid. Of the whole process that asks for it: part 0.
pub const CROSS_COPY: CallClass = CallClass::one(5);
/// A CPU is given access to memory on a GPU, by mprotect(2) of a mapping that had none. Of an open file of a render node: part 0.
pub const ACCESS: CallClass = CallClass::one(6);

/// `AMDKFD_IOC_CREATE_PROCESS`; Linux 6.12 has nothing of that number.
const ANOTHER_PROCESS: u8 = 0x27;
/// IPC_EXPORT_HANDLE, which only the driver of ROCm's own packages has (`include/uapi/linux/kfd_ioctl.h` of ROCK-Kernel-Driver, "non-upstream
/// ioctls"): a handle, 16 bytes for the answer, the GPU's id by which it looks for the buffer, 4 bytes more.
const IPC_EXPORT: u8 = 0x81;
const IPC_EXPORT_GPU: u8 = 24;
/// CROSS_MEMORY_COPY, of the same driver.
const CROSS_MEMORY_COPY: u8 = 0x83;

/// EXPORT_DMABUF, IPC_EXPORT_HANDLE, MAP_MEMORY_TO_GPU, CREATE_QUEUE, UPDATE_QUEUE, CREATE_PROCESS, CROSS_MEMORY_COPY. Of `/dev/kfd` as `st_rdev` tells it.
#[must_use]
pub fn calls(kfd: libc::dev_t) -> [DenyRule; 7] {
    let call = |number, part, class| DenyRule { devices: vec![kfd], number, part, class };
    let export = const { gpu_of(offset_of!(kfd_ioctl_export_dmabuf_args, handle)) };
    let map = const { gpu_of(offset_of!(kfd_ioctl_map_memory_to_gpu_args, handle)) };
    [
        call(number(IOC_EXPORT_DMABUF), Some(export), EXPORT),
        call(IPC_EXPORT, Some(IPC_EXPORT_GPU), EXPORT),
        call(number(IOC_MAP_MEMORY_TO_GPU), Some(map), MAP),
        call(number(IOC_CREATE_QUEUE), None, CREATE_QUEUE),
        call(number(IOC_UPDATE_QUEUE), None, UPDATE_QUEUE),
        call(ANOTHER_PROCESS, None, CREATE_PROCESS),
        call(CROSS_MEMORY_COPY, None, CROSS_COPY),
    ]
}

/// Where a handle has its GPU's id: in its upper half (`MAKE_HANDLE`, `drivers/gpu/drm/amd/amdkfd/kfd_chardev.c`).
const fn gpu_of(handle: usize) -> u8 {
    byte(if cfg!(target_endian = "little") { handle + 4 } else { handle })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_the_kernel_has_them() {
        let told = calls(7).map(|call| (call.number, call.part));
        let whole = [(0x02, None), (0x07, None), (0x27, None), (0x83, None)];
        assert_eq!(told[..3], [(0x24, Some(4)), (0x81, Some(24)), (0x18, Some(4))]);
        assert_eq!(told[3..], whole);
    }
}
