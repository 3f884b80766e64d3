// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks the drivers' ABI when this compiles: sizes, offsets, ioctl numbers.
//!
//! The sizes are from Linux 7.2. Linux 6.12 has shorter `drm_amdgpu_gem_va` (40 bytes) and
//! `drm_amdgpu_gem_op` (16). Both kernels cut or zero-extend an argument by the size in the ioctl's number.

use std::mem::offset_of;

use super::generated::*;

macro_rules! sizes {
    ($($name:ident = $size:literal),* $(,)?) => {
        const _: () = { $(assert!(size_of::<$name>() == $size);)* };
    };
}
macro_rules! offsets {
    ($name:ident: $($field:ident = $offset:literal),* $(,)?) => {
        const _: () = { $(assert!(offset_of!($name, $field) == $offset);)* };
    };
}
macro_rules! numbers {
    ($($name:ident = $number:literal),* $(,)?) => { const _: () = { $(assert!($name == $number);)* }; };
}

sizes! {
    kfd_ioctl_get_version_args = 8,
    kfd_ioctl_create_queue_args = 96,
    kfd_ioctl_destroy_queue_args = 8,
    kfd_ioctl_update_queue_args = 24,
    kfd_ioctl_create_event_args = 32,
    kfd_ioctl_set_event_args = 8,
    kfd_event_data = 48,
    kfd_hsa_memory_exception_data = 32,
    kfd_ioctl_wait_events_args = 24,
    kfd_process_device_apertures = 56,
    kfd_ioctl_get_process_apertures_new_args = 16,
    kfd_ioctl_acquire_vm_args = 8,
    kfd_ioctl_alloc_memory_of_gpu_args = 40,
    kfd_ioctl_free_memory_of_gpu_args = 8,
    kfd_ioctl_map_memory_to_gpu_args = 24,
    kfd_ioctl_unmap_memory_from_gpu_args = 24,
    kfd_ioctl_get_dmabuf_info_args = 32,
    kfd_ioctl_import_dmabuf_args = 24,
    kfd_ioctl_export_dmabuf_args = 16,
    kfd_ioctl_smi_events_args = 8,
    kfd_ioctl_svm_attribute = 8,
    kfd_ioctl_set_xnack_mode_args = 4,
    kfd_ioctl_get_available_memory_args = 16,
    kfd_ioctl_runtime_enable_args = 16,
    kfd_ioctl_criu_args = 56,
    kfd_criu_device_bucket = 16,
    kfd_criu_bo_bucket = 48,
    drm_amdgpu_gem_create = 32,
    drm_amdgpu_gem_mmap = 8,
    drm_amdgpu_gem_metadata = 288,
    drm_amdgpu_gem_userptr = 24,
    drm_amdgpu_gem_va = 64,
    drm_amdgpu_ctx = 16,
    drm_amdgpu_bo_list = 24,
    drm_amdgpu_bo_list_in = 24,
    drm_amdgpu_bo_list_entry = 8,
    drm_amdgpu_cs = 24,
    drm_amdgpu_cs_chunk = 16,
    drm_amdgpu_cs_chunk_ib = 32,
    drm_amdgpu_cs_chunk_dep = 24,
    drm_amdgpu_cs_chunk_fence = 8,
    drm_amdgpu_cs_chunk_syncobj = 16,
    drm_amdgpu_wait_cs = 32,
    drm_amdgpu_info = 32,
    drm_amdgpu_info_hw_ip = 40,
    drm_amdgpu_memory_info = 96,
    drm_amdgpu_info_device = 440,
    drm_amdgpu_gem_op = 24,
    drm_amdgpu_gem_vm_entry = 32,
    drm_amdgpu_gem_list_handles = 16,
    drm_amdgpu_gem_list_handles_entry = 40,
}

offsets! { kfd_ioctl_criu_args:
devices = 0, bos = 8, priv_data = 16, priv_data_size = 24, num_devices = 32, num_bos = 36, num_objects = 40,
pid = 44, op = 48 }
offsets! { kfd_criu_device_bucket: user_gpu_id = 0, actual_gpu_id = 4, drm_fd = 8, pad = 12 }
offsets! { kfd_criu_bo_bucket:
addr = 0, size = 8, offset = 16, restored_offset = 24, gpu_id = 32, alloc_flags = 36, dmabuf_fd = 40,
pad = 44 }
offsets! { kfd_ioctl_create_queue_args:
ring_base_address = 0, write_pointer_address = 8, read_pointer_address = 16, doorbell_offset = 24,
ring_size = 32, gpu_id = 36, queue_type = 40, queue_percentage = 44, queue_priority = 48, queue_id = 52,
eop_buffer_address = 56, eop_buffer_size = 64, ctx_save_restore_address = 72, ctx_save_restore_size = 80,
ctl_stack_size = 84, sdma_engine_id = 88, metadata_ring_size = 92 }
offsets! { kfd_ioctl_update_queue_args:
ring_base_address = 0, queue_id = 8, ring_size = 12, queue_percentage = 16, queue_priority = 20 }
offsets! { kfd_ioctl_alloc_memory_of_gpu_args:
va_addr = 0, size = 8, handle = 16, mmap_offset = 24, gpu_id = 32, flags = 36 }
offsets! { kfd_ioctl_map_memory_to_gpu_args:
handle = 0, device_ids_array_ptr = 8, n_devices = 16, n_success = 20 }
offsets! { kfd_ioctl_create_event_args:
event_page_offset = 0, event_trigger_data = 8, event_type = 12, auto_reset = 16, node_id = 20, event_id = 24,
event_slot_index = 28 }
offsets! { kfd_event_data: kfd_event_data_ext = 32, event_id = 40 }
offsets! { kfd_ioctl_wait_events_args:
events_ptr = 0, num_events = 8, wait_for_all = 12, timeout = 16, wait_result = 20 }
offsets! { kfd_ioctl_import_dmabuf_args: va_addr = 0, handle = 8, gpu_id = 16, dmabuf_fd = 20 }
offsets! { kfd_ioctl_export_dmabuf_args: handle = 0, flags = 8, dmabuf_fd = 12 }
offsets! { drm_amdgpu_gem_va:
handle = 0, operation = 8, flags = 12, va_address = 16, offset_in_bo = 24, map_size = 32,
vm_timeline_point = 40 }
offsets! { drm_amdgpu_cs_in: ctx_id = 0, bo_list_handle = 4, num_chunks = 8, flags = 12, chunks = 16 }
offsets! { drm_amdgpu_cs_chunk_ib:
flags = 4, va_start = 8, ib_bytes = 16, ip_type = 20, ip_instance = 24, ring = 28 }
offsets! { drm_amdgpu_wait_cs_in:
handle = 0, timeout = 8, ip_type = 16, ip_instance = 20, ring = 24, ctx_id = 28 }
offsets! { drm_amdgpu_gem_list_handles_entry:
gem_handle = 0, flags = 4, size = 8, preferred_domains = 16, alloc_flags = 24, alignment = 32 }

numbers! {
    IOC_GET_VERSION = 0x8008_4b01,
    IOC_CREATE_QUEUE = 0xc060_4b02,
    IOC_DESTROY_QUEUE = 0xc008_4b03,
    IOC_UPDATE_QUEUE = 0x4018_4b07,
    IOC_CREATE_EVENT = 0xc020_4b08,
    IOC_DESTROY_EVENT = 0x4008_4b09,
    IOC_SET_EVENT = 0x4008_4b0a,
    IOC_RESET_EVENT = 0x4008_4b0b,
    IOC_WAIT_EVENTS = 0xc018_4b0c,
    IOC_GET_PROCESS_APERTURES_NEW = 0xc010_4b14,
    IOC_ACQUIRE_VM = 0x4008_4b15,
    IOC_ALLOC_MEMORY_OF_GPU = 0xc028_4b16,
    IOC_FREE_MEMORY_OF_GPU = 0x4008_4b17,
    IOC_MAP_MEMORY_TO_GPU = 0xc018_4b18,
    IOC_UNMAP_MEMORY_FROM_GPU = 0xc018_4b19,
    IOC_GET_DMABUF_INFO = 0xc020_4b1c,
    IOC_IMPORT_DMABUF = 0xc018_4b1d,
    IOC_SMI_EVENTS = 0xc008_4b1f,
    IOC_SVM = 0xc018_4b20,
    IOC_SET_XNACK_MODE = 0xc004_4b21,
    IOC_CRIU_OP = 0xc038_4b22,
    IOC_AVAILABLE_MEMORY = 0xc010_4b23,
    IOC_EXPORT_DMABUF = 0xc010_4b24,
    IOC_RUNTIME_ENABLE = 0xc010_4b25,
    IOC_DBG_TRAP = 0xc020_4b26,
    DRM_VERSION = 0xc040_6400,
    DRM_GEM_CLOSE = 0x4008_6409,
    DRM_PRIME_HANDLE_TO_FD = 0xc00c_642d,
    DRM_PRIME_FD_TO_HANDLE = 0xc00c_642e,
    DRM_SYNCOBJ_CREATE = 0xc008_64bf,
    DRM_SYNCOBJ_DESTROY = 0xc008_64c0,
    DRM_SYNCOBJ_WAIT = 0xc028_64c3,
    DRM_SYNCOBJ_TIMELINE_WAIT = 0xc030_64ca,
    DRM_SYNCOBJ_QUERY = 0xc018_64cb,
    DRM_SYNCOBJ_EVENTFD = 0xc018_64cf,
    DRM_AMD_GEM_CREATE = 0xc020_6440,
    DRM_AMD_GEM_MMAP = 0xc008_6441,
    DRM_AMD_CTX = 0xc010_6442,
    DRM_AMD_BO_LIST = 0xc018_6443,
    DRM_AMD_CS = 0xc018_6444,
    DRM_AMD_INFO = 0x4020_6445,
    DRM_AMD_GEM_VA = 0x4040_6448,
    DRM_AMD_WAIT_CS = 0xc020_6449,
    DRM_AMD_GEM_METADATA = 0xc120_6446,
    DRM_AMD_GEM_OP = 0xc018_6450,
    DRM_AMD_GEM_USERPTR = 0xc018_6451,
    DRM_AMD_USERQ = 0xc048_6456,
    DRM_AMD_GEM_LIST_HANDLES = 0xc010_6459,
    KFD_IOC_ALLOC_MEM_FLAGS_VRAM = 1,
    KFD_IOC_ALLOC_MEM_FLAGS_MMIO_REMAP = 16,
    KFD_IOC_ALLOC_MEM_FLAGS_WRITABLE = 0x8000_0000,
    KFD_IOC_ALLOC_MEM_FLAGS_CONTIGUOUS = 0x80_0000,
    KFD_IOC_QUEUE_TYPE_COMPUTE_AQL = 2,
    KFD_CRIU_OP_RESUME = 4,
    KFD_INVALID_FD = 0xffff_ffff,
}
