// SPDX-License-Identifier: GPL-2.0 OR MIT
/* GEM_USERPTR: host memory for command submission on a render node. */
#include <linux/dma-resv.h>
#include <linux/mm.h>
#include <linux/sched/mm.h>

#include "gem.h"
#include "host.h"

/*
 * The driver waits for submitted jobs before the CPU may change the pages; the
 * next submission looks them up again.
 */
static bool sg_gem_host_changed(struct mmu_interval_notifier *notifier,
				const struct mmu_notifier_range *range, unsigned long seq)
{
	struct sg_host *host = container_of(notifier, struct sg_host, notifier);
	struct sg_bo *bo = host->owner;

	if (!mmu_notifier_range_blockable(range))
		return false;
	mmu_interval_set_seq(notifier, seq);
	dma_resv_wait_timeout(bo->base.resv, DMA_RESV_USAGE_BOOKKEEP, false, MAX_SCHEDULE_TIMEOUT);
	sg_host_invalidate(host, seq, false);
	return true;
}

static const struct mmu_interval_notifier_ops sg_gem_host_ops = {
	.invalidate = sg_gem_host_changed,
};

/* A handle of another process's memory is of no use: only the owner may have one. */
int sg_gem_open_object(struct drm_gem_object *obj, struct drm_file *file)
{
	struct sg_bo *bo = sg_bo_of(obj);

	return bo->host && bo->host->mm != current->mm ? -EPERM : 0;
}

int sg_bo_validate(struct sg_bo *bo)
{
	if (bo->store != SG_STORE_HOST || READ_ONCE(bo->host->valid))
		return 0;
	return sg_host_fault(bo->host);
}

static bool sg_range_anonymous(u64 addr, u64 size)
{
	VMA_ITERATOR(vmi, current->mm, addr);
	struct vm_area_struct *vma;
	bool anonymous = true;

	mmap_read_lock(current->mm);
	for_each_vma_range(vmi, vma, addr + size)
		anonymous &= !vma->vm_file;
	mmap_read_unlock(current->mm);
	return anonymous;
}

static int sg_userptr_check(const struct drm_amdgpu_gem_userptr *args)
{
	if (offset_in_page(args->addr | args->size))
		return -EINVAL;
	if (!access_ok(u64_to_user_ptr(args->addr), args->size))
		return -EFAULT;
	if (args->flags & ~(AMDGPU_GEM_USERPTR_READONLY | AMDGPU_GEM_USERPTR_ANONONLY |
			    AMDGPU_GEM_USERPTR_VALIDATE | AMDGPU_GEM_USERPTR_REGISTER))
		return -EINVAL;
	if (!(args->flags & (AMDGPU_GEM_USERPTR_READONLY | AMDGPU_GEM_USERPTR_REGISTER)))
		return -EACCES;
	return 0;
}

int sg_gem_userptr_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	struct drm_amdgpu_gem_userptr *args = data;
	struct sg_host *host;
	struct sg_bo *bo;
	int err = sg_userptr_check(args);

	if (err)
		return err;
	bo = sg_bo_create_store(sg_device_of(drm), SG_STORE_HOST, args->size, AMDGPU_GEM_DOMAIN_GTT, 0);
	if (IS_ERR(bo))
		return PTR_ERR(bo);
	host = sg_host_create(current->mm, args->addr, args->size >> PAGE_SHIFT,
			      args->flags & AMDGPU_GEM_USERPTR_READONLY, &sg_gem_host_ops, bo);
	if (IS_ERR(host)) {
		err = PTR_ERR(host);
		goto out;
	}
	bo->host = host;
	if (args->flags & AMDGPU_GEM_USERPTR_VALIDATE) {
		if (args->flags & AMDGPU_GEM_USERPTR_ANONONLY && !sg_range_anonymous(args->addr, args->size))
			err = -EPERM;
		else
			err = sg_host_fault(host);
	}
	if (!err)
		err = drm_gem_handle_create(file, &bo->base, &args->handle);
out:
	sg_bo_put(bo);
	return err;
}
