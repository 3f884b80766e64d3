/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* KFD's allocations: what ALLOC_MEMORY_OF_GPU makes and handles name. */
#ifndef SOFTGPU_MEM_H
#define SOFTGPU_MEM_H

#include "softgpu.h"

struct sg_mem_request {
	u64 va;
	u64 size;
	u32 flags;
	u64 user_addr;		/* USERPTR */
	int handle;		/* exactly this one, or -1 */
	bool restore;		/* from RESTORE: contents are missing */
};

/* All under p->lock. */
int sg_mem_create(struct sg_pdd *pdd, const struct sg_mem_request *request, struct sg_mem **out);
int sg_mem_map(struct sg_mem *mem, struct sg_device *dev);
void sg_mem_destroy(struct sg_mem *mem);
void sg_pdd_free_mems(struct sg_pdd *pdd);
/* -EPERM: the event page; -EBUSY: still mapped on a GPU; -EINVAL: no such handle. */
int sg_mem_free_checked(struct sg_process *p, u64 handle);
/* On the GPU that the process knows by this id. */
int sg_mem_map_one(struct sg_mem *mem, u32 gpu_id, bool map);
/* The offset that user space passes to mmap. */
u64 sg_mem_mmap_offset(const struct sg_mem *mem);

static inline u64 sg_mem_handle(const struct sg_pdd *pdd, int handle)
{
	return (u64)pdd->user_gpu_id << 32 | (u32)handle;
}

/* ioctls */
int sg_mem_available(struct sg_process *p, struct kfd_ioctl_get_available_memory_args *args);
int sg_mem_alloc_ioctl(struct sg_process *p, struct kfd_ioctl_alloc_memory_of_gpu_args *args);
int sg_mem_free_ioctl(struct sg_process *p, struct kfd_ioctl_free_memory_of_gpu_args *args);
int sg_mem_map_ioctl(struct sg_process *p, struct kfd_ioctl_map_memory_to_gpu_args *args);
int sg_mem_unmap_ioctl(struct sg_process *p, struct kfd_ioctl_unmap_memory_from_gpu_args *args);

/* dmabuf.c */
int sg_dmabuf_info(struct sg_process *p, struct kfd_ioctl_get_dmabuf_info_args *args);
int sg_dmabuf_import(struct sg_process *p, struct kfd_ioctl_import_dmabuf_args *args);
int sg_dmabuf_export(struct sg_process *p, struct kfd_ioctl_export_dmabuf_args *args);
/* The allocation's dma-buf, kept by it, or an error. No reference. */
struct dma_buf *sg_mem_dmabuf(struct sg_mem *mem);

#endif
