// SPDX-License-Identifier: MIT OR Apache-2.0
//! Attributes of ordinary memory that GPUs use in place. Linux 7.2 in Debian has them; 6.12 there has not
//! (EPERM).

use std::os::fd::AsFd as _;

use rewake_amdgpu_uapi::abi::memory::Mapping;
use rewake_amdgpu_uapi::abi::{call, *};
use rewake_amdgpu_uapi::{Error, FailedCall, Kfd};

use super::Device;

/// One attribute: `KFD_IOCTL_SVM_ATTR_*` and its value.
pub type Attribute = (kfd_ioctl_svm_attr_type, u32);

/// Sets attributes of a range.
///
/// # Errors
/// SVM failed: EPERM without SVM, EFAULT if a page is missing, EINVAL for an unknown attribute.
pub fn set(kfd: &Kfd, start: u64, size: u64, attributes: &[Attribute]) -> Result<(), Error> {
    let mut list = list(attributes);
    call::svm(kfd.as_fd(), start, size, KFD_IOCTL_SVM_OP_SET_ATTR, &mut list)
        .map_err(FailedCall::named("SVM SET_ATTR").at(start, size).failed())
}

/// Gets attributes of a range.
///
/// # Errors
/// As [`set`].
pub fn get(
    kfd: &Kfd,
    start: u64,
    size: u64,
    wanted: &[kfd_ioctl_svm_attr_type],
) -> Result<Vec<Attribute>, Error> {
    let mut list = list(&wanted.iter().map(|kind| (*kind, 0)).collect::<Vec<_>>());
    call::svm(kfd.as_fd(), start, size, KFD_IOCTL_SVM_OP_GET_ATTR, &mut list)
        .map_err(FailedCall::named("SVM GET_ATTR").at(start, size).failed())?;
    Ok(list.iter().map(|attribute| (attribute.type_, attribute.value)).collect())
}

/// Keeps memory accessible to a GPU at all times, as queues' save areas must be.
///
/// # Errors
/// As [`set`].
pub fn map_always(device: &Device, memory: &Mapping) -> Result<(), Error> {
    let flags = KFD_IOCTL_SVM_FLAG_HOST_ACCESS
        | KFD_IOCTL_SVM_FLAG_GPU_EXEC
        | KFD_IOCTL_SVM_FLAG_COHERENT
        | KFD_IOCTL_SVM_FLAG_GPU_ALWAYS_MAPPED;
    let attributes = [
        (KFD_IOCTL_SVM_ATTR_PREFETCH_LOC, KFD_IOCTL_SVM_LOCATION_SYSMEM),
        (KFD_IOCTL_SVM_ATTR_PREFERRED_LOC, KFD_IOCTL_SVM_LOCATION_SYSMEM),
        (KFD_IOCTL_SVM_ATTR_CLR_FLAGS, !flags),
        (KFD_IOCTL_SVM_ATTR_SET_FLAGS, flags),
        (KFD_IOCTL_SVM_ATTR_ACCESS, device.gpu_id()),
    ];
    set(device.kfd(), memory.address(), memory.len(), &attributes)
}

fn list(attributes: &[Attribute]) -> Vec<kfd_ioctl_svm_attribute> {
    attributes.iter().map(|(type_, value)| kfd_ioctl_svm_attribute { type_: *type_, value: *value }).collect()
}
