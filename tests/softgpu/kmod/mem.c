// SPDX-License-Identifier: GPL-2.0 OR MIT
/* KFD's allocations: VRAM, GTT, host memory, doorbells, MMIO, and their GPU addresses. */
#include <drm/drm_vma_manager.h>
#include <linux/dma-buf.h>
#include <linux/mm.h>
#include <linux/slab.h>

#include "chardev.h"
#include "doorbell.h"
#include "gem.h"
#include "leak.h"
#include "mem.h"
#include "userptr.h"

#define SG_USUAL_FLAGS	(AMDGPU_GEM_CREATE_VRAM_WIPE_ON_RELEASE | AMDGPU_GEM_CREATE_VRAM_CLEARED)

static struct drm_file *sg_pdd_file(struct sg_pdd *pdd)
{
	return pdd->drm_file->private_data;
}

static struct sg_bo *sg_mem_fixed_bo(struct sg_pdd *pdd, u64 size, struct page *pages)
{
	struct sg_bo *bo = sg_bo_create_store(pdd->dev, SG_STORE_FIXED, size, AMDGPU_GEM_DOMAIN_GTT, 0);

	if (!IS_ERR(bo))
		bo->fixed = pages;
	return bo;
}

static struct sg_bo *sg_mem_special_bo(struct sg_pdd *pdd, const struct sg_mem_request *request)
{
	int err;

	if (request->flags & KFD_IOC_ALLOC_MEM_FLAGS_USERPTR) {
		if (!request->user_addr || !PAGE_ALIGNED(request->user_addr))
			return ERR_PTR(-EINVAL);
		return sg_bo_create_store(pdd->dev, SG_STORE_HOST, request->size, AMDGPU_GEM_DOMAIN_GTT, 0);
	}
	if (request->flags & KFD_IOC_ALLOC_MEM_FLAGS_DOORBELL) {
		err = sg_doorbells_alloc(pdd);
		return err ? ERR_PTR(err) : sg_mem_fixed_bo(pdd, request->size, pdd->doorbell_page);
	}
	if (request->flags & KFD_IOC_ALLOC_MEM_FLAGS_MMIO_REMAP)
		return sg_mem_fixed_bo(pdd, request->size, pdd->dev->mmio);
	return ERR_PTR(-EINVAL);
}

static struct sg_bo *sg_mem_bo(struct sg_pdd *pdd, const struct sg_mem_request *request)
{
	u64 size = request->size;
	u64 flags = 0;

	/* The ring of an AQL queue is mapped twice, at consecutive addresses. */
	if (request->flags & KFD_IOC_ALLOC_MEM_FLAGS_AQL_QUEUE_MEM)
		size /= 2;
	if (!size)
		return ERR_PTR(-EINVAL);
	if (request->flags & KFD_IOC_ALLOC_MEM_FLAGS_VRAM) {
		flags = SG_USUAL_FLAGS;
		if (request->flags & KFD_IOC_ALLOC_MEM_FLAGS_PUBLIC)
			flags |= AMDGPU_GEM_CREATE_CPU_ACCESS_REQUIRED;
		return sg_bo_create(pdd->dev, size, 0, AMDGPU_GEM_DOMAIN_VRAM, flags);
	}
	if (request->flags & KFD_IOC_ALLOC_MEM_FLAGS_GTT)
		return sg_bo_create(pdd->dev, size, 0, AMDGPU_GEM_DOMAIN_GTT, flags);
	return sg_mem_special_bo(pdd, request);
}

/* Contents are loaded from the image: until then no access may read them. */
static int sg_mem_begin_restore(struct sg_bo *bo)
{
	return bo->store == SG_STORE_OWN ? sg_bo_mark_missing(bo) : 0;
}

int sg_mem_create(struct sg_pdd *pdd, const struct sg_mem_request *request, struct sg_mem **out)
{
	int first = max(request->handle, 0), end = request->handle < 0 ? 0 : request->handle + 1;
	struct sg_mem *mem = kzalloc(sizeof(*mem), GFP_KERNEL_ACCOUNT);
	int err;

	if (!mem)
		return -ENOMEM;
	mem->pdd = pdd;
	mem->va = request->va;
	mem->alloc_flags = request->flags;
	INIT_LIST_HEAD(&mem->host_link);
	mem->bo = sg_mem_bo(pdd, request);
	if (IS_ERR(mem->bo)) {
		err = PTR_ERR(mem->bo);
		goto free;
	}
	mem->size = mem->bo->base.size;
	mem->bo->kfd = true;
	if (request->restore) {
		err = sg_mem_begin_restore(mem->bo);
		if (err)
			goto bo;
	}
	err = drm_vma_node_allow(&mem->bo->base.vma_node, sg_pdd_file(pdd));
	if (err)
		goto bo;
	if (mem->bo->store == SG_STORE_HOST) {
		mem->user_addr = request->user_addr;
		err = sg_userptr_add(mem, request->restore);
		if (err)
			goto revoke;
	}
	mem->handle = idr_alloc(&pdd->handles, mem, first, end, GFP_KERNEL);
	if (mem->handle < 0) {
		err = request->restore ? -ENOMEM : -EFAULT;
		goto userptr;
	}
	if (mem->alloc_flags & KFD_IOC_ALLOC_MEM_FLAGS_VRAM)
		atomic64_add(mem->size, &pdd->vram);
	sg_leak_adopt(mem);
	*out = mem;
	return 0;
userptr:
	sg_userptr_remove(mem);
revoke:
	drm_vma_node_revoke(&mem->bo->base.vma_node, sg_pdd_file(pdd));
bo:
	sg_bo_put(mem->bo);
free:
	kfree(mem);
	return err;
}

static void sg_mem_unmap_all(struct sg_mem *mem, unsigned int index)
{
	int i;

	for (i = 0; i < ARRAY_SIZE(mem->maps[index]); i++) {
		if (mem->maps[index][i])
			sg_vm_unmap(mem->maps[index][i]);
		mem->maps[index][i] = NULL;
	}
}

void sg_mem_destroy(struct sg_mem *mem)
{
	struct sg_pdd *pdd = mem->pdd;
	unsigned int i;

	sg_userptr_remove(mem);
	for (i = 0; i < ARRAY_SIZE(mem->maps); i++)
		sg_mem_unmap_all(mem, i);
	idr_remove(&pdd->handles, mem->handle);
	if (mem->alloc_flags & KFD_IOC_ALLOC_MEM_FLAGS_VRAM && !mem->imported)
		atomic64_sub(mem->size, &pdd->vram);
	drm_vma_node_revoke(&mem->bo->base.vma_node, sg_pdd_file(pdd));
	if (mem->dmabuf)
		dma_buf_put(mem->dmabuf);
	sg_leak_disown(mem);
	sg_bo_put(mem->bo);
	kfree(mem);
}

void sg_pdd_free_mems(struct sg_pdd *pdd)
{
	struct sg_mem *mem;
	int handle;

	idr_for_each_entry(&pdd->handles, mem, handle)
		sg_mem_destroy(mem);
}

u64 sg_mem_mmap_offset(const struct sg_mem *mem)
{
	if (mem->alloc_flags & KFD_IOC_ALLOC_MEM_FLAGS_MMIO_REMAP)
		return sg_mmap_offset(SG_MMAP_MMIO, mem->pdd->user_gpu_id);
	return drm_vma_node_offset_addr(&mem->bo->base.vma_node);
}

struct sg_mem *sg_mem_find(struct sg_process *p, u64 handle)
{
	struct sg_pdd *pdd = sg_pdd_by_user_id(p, handle >> 32);

	return pdd && (u32)handle <= INT_MAX ? idr_find(&pdd->handles, (u32)handle) : NULL;
}

/* VRAM, doorbells and registers of another GPU are reached over XGMI only: Debian has no PCIe peers. */
static bool sg_mem_reachable(struct sg_mem *mem, struct sg_device *dev)
{
	struct sg_bo *bo = mem->bo->store == SG_STORE_ALIAS ? mem->bo->origin : mem->bo;

	if (bo->dev == dev || bo->store == SG_STORE_HOST || bo->domain == AMDGPU_GEM_DOMAIN_GTT)
		return bo->store != SG_STORE_FIXED || bo->dev == dev;
	return sg_params.xgmi;
}

static u32 sg_mem_map_flags(const struct sg_mem *mem)
{
	u32 flags = SG_MAP_READ;

	if (mem->alloc_flags & KFD_IOC_ALLOC_MEM_FLAGS_WRITABLE)
		flags |= SG_MAP_WRITE;
	if (mem->alloc_flags & KFD_IOC_ALLOC_MEM_FLAGS_EXECUTABLE)
		flags |= SG_MAP_EXEC;
	return flags;
}

/* Host memory that is not valid is mapped too: the GPU faults on it until it is. */
int sg_mem_map(struct sg_mem *mem, struct sg_device *dev)
{
	struct sg_process *p = mem->pdd->process;
	struct sg_pdd *peer = sg_pdd_of(p, dev);
	struct sg_mapping **maps = mem->maps[dev->index];
	int err;

	if (!peer || !peer->vm)
		return -ENODEV;
	if (!sg_mem_reachable(mem, dev))
		return -EINVAL;
	mutex_lock(&p->mem_lock);
	err = 0;
	if (maps[0])
		goto out;
	err = sg_vm_map(peer->vm, mem->bo, mem->va, 0, mem->size, sg_mem_map_flags(mem), &maps[0]);
	if (err || !(mem->alloc_flags & KFD_IOC_ALLOC_MEM_FLAGS_AQL_QUEUE_MEM))
		goto out;
	err = sg_vm_map(peer->vm, mem->bo, mem->va + mem->size, 0, mem->size, sg_mem_map_flags(mem), &maps[1]);
	if (err)
		sg_mem_unmap_all(mem, dev->index);
out:
	mutex_unlock(&p->mem_lock);
	return err;
}

static int sg_mem_unmap(struct sg_mem *mem, struct sg_device *dev)
{
	struct sg_process *p = mem->pdd->process;
	int err = 0;

	mutex_lock(&p->mem_lock);
	if (!mem->maps[dev->index][0])
		err = -EINVAL;
	else if (atomic_read(&mem->bo->queues))
		err = -EBUSY;
	else
		sg_mem_unmap_all(mem, dev->index);
	mutex_unlock(&p->mem_lock);
	return err;
}

static bool sg_mem_mapped(const struct sg_mem *mem)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(mem->maps); i++)
		if (mem->maps[i][0])
			return true;
	return false;
}

int sg_mem_free_checked(struct sg_process *p, u64 handle)
{
	struct sg_mem *mem;

	/* The event page is the kernel's as long as the process lives. */
	if (p->events.page_handle && p->events.page_handle == handle)
		return -EPERM;
	mem = sg_mem_find(p, handle);
	if (!mem)
		return -EINVAL;
	if (sg_mem_mapped(mem))
		return -EBUSY;
	sg_mem_destroy(mem);
	return 0;
}

int sg_mem_map_one(struct sg_mem *mem, u32 gpu_id, bool map)
{
	struct sg_pdd *peer = sg_pdd_by_user_id(mem->pdd->process, gpu_id);

	if (!peer)
		return -EINVAL;
	return map ? sg_mem_map(mem, peer->dev) : sg_mem_unmap(mem, peer->dev);
}
