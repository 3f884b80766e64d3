// SPDX-License-Identifier: GPL-2.0 OR MIT
/* KFD's view of dma-bufs: allocations that are shared between processes and drivers. */
#include <drm/drm_vma_manager.h>
#include <linux/dma-buf.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "leak.h"
#include "mem.h"
#include "prime.h"

struct dma_buf *sg_mem_dmabuf(struct sg_mem *mem)
{
	struct dma_buf *dmabuf;

	if (mem->dmabuf)
		return mem->dmabuf;
	dmabuf = sg_prime_export_bo(mem->bo);
	if (!IS_ERR(dmabuf))
		mem->dmabuf = dmabuf;
	return dmabuf;
}

static u32 sg_dmabuf_flags(const struct sg_bo *bo)
{
	u32 flags = bo->domain == AMDGPU_GEM_DOMAIN_VRAM ? KFD_IOC_ALLOC_MEM_FLAGS_VRAM :
							   KFD_IOC_ALLOC_MEM_FLAGS_GTT;

	if (bo->flags & AMDGPU_GEM_CREATE_CPU_ACCESS_REQUIRED)
		flags |= KFD_IOC_ALLOC_MEM_FLAGS_PUBLIC;
	return flags;
}

int sg_dmabuf_info(struct sg_process *p, struct kfd_ioctl_get_dmabuf_info_args *args)
{
	struct dma_buf *dmabuf = dma_buf_get(args->dmabuf_fd);
	u32 room = args->metadata_size;
	struct sg_bo *bo;
	int err = -EINVAL;

	if (IS_ERR(dmabuf))
		return PTR_ERR(dmabuf);
	bo = sg_prime_bo(dmabuf);
	if (!bo)
		goto out;
	err = 0;
	args->size = bo->base.size;
	args->gpu_id = bo->dev->gpu_id;
	args->flags = sg_dmabuf_flags(bo);
	mutex_lock(&bo->metadata_lock);
	args->metadata_size = bo->metadata_size;
	if (args->metadata_ptr && room) {
		if (room < bo->metadata_size)
			err = -EINVAL;
		else if (copy_to_user(u64_to_user_ptr(args->metadata_ptr), bo->metadata, bo->metadata_size))
			err = -EFAULT;
	}
	mutex_unlock(&bo->metadata_lock);
out:
	dma_buf_put(dmabuf);
	return err;
}

static struct sg_mem *sg_dmabuf_mem(struct sg_pdd *pdd, struct dma_buf *dmabuf, u64 va)
{
	struct drm_file *file = pdd->drm_file->private_data;
	struct sg_mem *mem = kzalloc(sizeof(*mem), GFP_KERNEL_ACCOUNT);
	int err = -ENOMEM;

	if (!mem)
		return ERR_PTR(-ENOMEM);
	mem->bo = sg_prime_import_bo(pdd->dev, dmabuf);
	if (IS_ERR(mem->bo)) {
		err = PTR_ERR(mem->bo);
		goto free;
	}
	mem->pdd = pdd;
	mem->va = va;
	mem->size = mem->bo->base.size;
	mem->imported = true;
	mem->alloc_flags = KFD_IOC_ALLOC_MEM_FLAGS_WRITABLE | KFD_IOC_ALLOC_MEM_FLAGS_EXECUTABLE |
			   (sg_dmabuf_flags(mem->bo) & ~KFD_IOC_ALLOC_MEM_FLAGS_PUBLIC);
	INIT_LIST_HEAD(&mem->host_link);
	err = drm_vma_node_allow(&mem->bo->base.vma_node, file);
	if (err)
		goto bo;
	mem->handle = idr_alloc(&pdd->handles, mem, 0, 0, GFP_KERNEL);
	if (mem->handle < 0) {
		err = -EFAULT;
		goto revoke;
	}
	get_dma_buf(dmabuf);
	mem->dmabuf = dmabuf;
	sg_leak_adopt(mem);
	return mem;
revoke:
	drm_vma_node_revoke(&mem->bo->base.vma_node, file);
bo:
	sg_bo_put(mem->bo);
free:
	kfree(mem);
	return ERR_PTR(err);
}

int sg_dmabuf_import(struct sg_process *p, struct kfd_ioctl_import_dmabuf_args *args)
{
	struct dma_buf *dmabuf;
	struct sg_pdd *pdd;
	struct sg_mem *mem;
	int err = 0;

	mutex_lock(&p->lock);
	pdd = sg_pdd_by_user_id(p, args->gpu_id);
	if (!pdd || !pdd->vm) {
		err = pdd ? -ENODEV : -EINVAL;
		goto out;
	}
	dmabuf = dma_buf_get(args->dmabuf_fd);
	if (IS_ERR(dmabuf)) {
		err = PTR_ERR(dmabuf);
		goto out;
	}
	mem = sg_dmabuf_mem(pdd, dmabuf, args->va_addr);
	if (IS_ERR(mem))
		err = PTR_ERR(mem);
	else
		args->handle = sg_mem_handle(pdd, mem->handle);
	dma_buf_put(dmabuf);
out:
	mutex_unlock(&p->lock);
	return err;
}

int sg_dmabuf_export(struct sg_process *p, struct kfd_ioctl_export_dmabuf_args *args)
{
	struct dma_buf *dmabuf = ERR_PTR(-EINVAL);
	struct sg_mem *mem;
	int fd;

	mutex_lock(&p->lock);
	mem = sg_mem_find(p, args->handle);
	if (mem)
		dmabuf = sg_mem_dmabuf(mem);
	if (!IS_ERR(dmabuf))
		get_dma_buf(dmabuf);
	mutex_unlock(&p->lock);
	if (IS_ERR(dmabuf))
		return PTR_ERR(dmabuf);
	fd = dma_buf_fd(dmabuf, args->flags);
	if (fd < 0) {
		dma_buf_put(dmabuf);
		return fd;
	}
	args->dmabuf_fd = fd;
	return 0;
}
