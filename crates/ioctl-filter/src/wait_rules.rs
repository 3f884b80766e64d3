// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rules for calls that pass a program's memory to the driver, which accesses its pages before they return.

use std::mem::{offset_of, size_of};

use rewake_amdgpu_uapi::abi::*;

use crate::{ArgMatch, WaitRule};

/// Bytes of `struct kfd_ioctl_svm_args` without its array.
const SVM_BYTES: u8 = 24;
const SVM_ADDRESS: u8 = 0;
const SVM_LENGTH: u8 = 8;
const SVM_OP: u8 = 16;

/// Returns rules for ALLOC_MEMORY_OF_GPU with USERPTR, SVM's SET_ATTR and GEM_USERPTR. `kfd` and `render` are
/// the devices' `st_rdev`.
#[must_use]
pub(crate) fn calls(kfd: libc::dev_t, render: &[libc::dev_t]) -> [WaitRule; 3] {
    let userptr = KFD_IOC_ALLOC_MEM_FLAGS_USERPTR.cast_signed();
    [
        WaitRule {
            devices: vec![kfd],
            number: number(IOC_ALLOC_MEMORY_OF_GPU),
            bytes: const { byte(size_of::<kfd_ioctl_alloc_memory_of_gpu_args>()) },
            address: const { byte(offset_of!(kfd_ioctl_alloc_memory_of_gpu_args, mmap_offset)) },
            length: const { byte(offset_of!(kfd_ioctl_alloc_memory_of_gpu_args, size)) },
            only: Some(ArgMatch {
                at: const { byte(offset_of!(kfd_ioctl_alloc_memory_of_gpu_args, flags)) },
                mask: userptr,
                wanted: userptr,
            }),
        },
        WaitRule {
            devices: vec![kfd],
            number: number(IOC_SVM),
            bytes: SVM_BYTES,
            address: SVM_ADDRESS,
            length: SVM_LENGTH,
            only: Some(ArgMatch { at: SVM_OP, mask: -1, wanted: KFD_IOCTL_SVM_OP_SET_ATTR.cast_signed() }),
        },
        WaitRule {
            devices: render.to_vec(),
            number: number(DRM_AMD_GEM_USERPTR),
            bytes: const { byte(size_of::<drm_amdgpu_gem_userptr>()) },
            address: const { byte(offset_of!(drm_amdgpu_gem_userptr, addr)) },
            length: const { byte(offset_of!(drm_amdgpu_gem_userptr, size)) },
            only: None,
        },
    ]
}

/// Returns the `_IOC_NR`, the only part that the driver checks.
pub(crate) fn number(ioctl: u32) -> u8 {
    ioctl.to_le_bytes()[0]
}

pub(crate) const fn byte(of: usize) -> u8 {
    assert!(of <= u8::MAX as usize);
    of.to_le_bytes()[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_at_the_kernels_offsets() {
        let rules = calls(7, &[8, 9]).map(|call| (call.number, call.bytes, call.address, call.length));
        assert_eq!(rules, [(0x16, 40, 24, 8), (0x20, 24, 0, 8), (0x51, 24, 0, 8)]);
    }
}
