// SPDX-License-Identifier: GPL-2.0 OR MIT
/* ioctls about KFD's allocations: their checks and results. */
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "mem.h"
#include "svm.h"

#define SG_VRAM_GRAIN	SZ_2M	/* the unit in which the driver counts free memory */

int sg_mem_available(struct sg_process *p, struct kfd_ioctl_get_available_memory_args *args)
{
	struct sg_pdd *pdd;
	s64 left;

	mutex_lock(&p->lock);
	pdd = sg_pdd_by_user_id(p, args->gpu_id);
	mutex_unlock(&p->lock);
	if (!pdd)
		return -EINVAL;
	left = pdd->dev->vram_bytes - atomic64_read(&pdd->dev->vram_used);
	args->available = left < 0 ? 0 : ALIGN_DOWN((u64)left, SG_VRAM_GRAIN);
	return 0;
}

static int sg_mem_check_svm(struct sg_process *p, const struct kfd_ioctl_alloc_memory_of_gpu_args *args)
{
	bool no_va = !args->va_addr && args->flags & KFD_IOC_ALLOC_MEM_FLAGS_VRAM;

	if (!no_va && sg_svm_overlaps(p, args->va_addr, args->size))
		return -EADDRINUSE;
	if (args->flags & KFD_IOC_ALLOC_MEM_FLAGS_USERPTR && sg_svm_overlaps(p, args->mmap_offset, args->size))
		return -EADDRINUSE;
	return 0;
}

static int sg_mem_check(struct sg_pdd *pdd, const struct kfd_ioctl_alloc_memory_of_gpu_args *args)
{
	const u32 visible = KFD_IOC_ALLOC_MEM_FLAGS_PUBLIC | KFD_IOC_ALLOC_MEM_FLAGS_VRAM;

	if (!pdd)
		return -EINVAL;
	if ((args->flags & visible) == visible && sg_params.small_bar)
		return -EINVAL;
	if (!pdd->vm)
		return -ENODEV;
	if (args->flags & KFD_IOC_ALLOC_MEM_FLAGS_DOORBELL)
		return args->size == SG_DOORBELL_BYTES ? 0 : -EINVAL;
	if (args->flags & KFD_IOC_ALLOC_MEM_FLAGS_MMIO_REMAP)
		return args->size == PAGE_SIZE ? 0 : -EINVAL;
	return 0;
}

int sg_mem_alloc_ioctl(struct sg_process *p, struct kfd_ioctl_alloc_memory_of_gpu_args *args)
{
	struct sg_mem_request request = {
		.va = args->va_addr,
		.size = args->size,
		.flags = args->flags,
		.user_addr = untagged_addr(args->mmap_offset),
		.handle = -1,
	};
	struct sg_pdd *pdd;
	struct sg_mem *mem;
	int err;

	if (!args->size)
		return -EINVAL;
	err = sg_mem_check_svm(p, args);
	if (err)
		return err;
	mutex_lock(&p->lock);
	pdd = sg_pdd_by_user_id(p, args->gpu_id);
	err = sg_mem_check(pdd, args);
	if (!err)
		err = sg_mem_create(pdd, &request, &mem);
	if (!err) {
		args->handle = sg_mem_handle(pdd, mem->handle);
		args->mmap_offset = sg_mem_mmap_offset(mem);
	}
	mutex_unlock(&p->lock);
	return err;
}

int sg_mem_free_ioctl(struct sg_process *p, struct kfd_ioctl_free_memory_of_gpu_args *args)
{
	int err;

	mutex_lock(&p->lock);
	err = sg_mem_free_checked(p, args->handle);
	mutex_unlock(&p->lock);
	return err;
}

/* Both ioctls: the GPUs from number *n_success on, one after the other, until one fails. */
static int sg_mem_map_all(struct sg_process *p, u64 handle, u64 ids_at, u32 count, u32 *n_success, bool map)
{
	struct sg_mem *mem;
	u32 *ids, i;
	int err = 0;

	if (!count || *n_success > count)
		return -EINVAL;
	ids = memdup_array_user(u64_to_user_ptr(ids_at), count, sizeof(*ids));
	if (IS_ERR(ids))
		return PTR_ERR(ids);
	mutex_lock(&p->lock);
	mem = sg_mem_find(p, handle);
	if (!sg_pdd_by_user_id(p, handle >> 32))
		err = -EINVAL;
	else if (!mem)
		err = -ENOMEM;
	for (i = *n_success; i < count && !err; i++) {
		err = sg_mem_map_one(mem, ids[i], map);
		if (!err)
			*n_success = i + 1;
	}
	mutex_unlock(&p->lock);
	kfree(ids);
	return err;
}

int sg_mem_map_ioctl(struct sg_process *p, struct kfd_ioctl_map_memory_to_gpu_args *args)
{
	return sg_mem_map_all(p, args->handle, args->device_ids_array_ptr, args->n_devices, &args->n_success,
			      true);
}

int sg_mem_unmap_ioctl(struct sg_process *p, struct kfd_ioctl_unmap_memory_from_gpu_args *args)
{
	return sg_mem_map_all(p, args->handle, args->device_ids_array_ptr, args->n_devices, &args->n_success,
			      false);
}
