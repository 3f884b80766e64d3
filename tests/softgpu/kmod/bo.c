// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Buffer objects: creation, accounting, pages that are allocated at the first write. */
#include <linux/dma-buf.h>
#include <linux/highmem.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>

#include "cpu_map.h"
#include "gem.h"
#include "host.h"
#include "prime.h"
#include "softgpu.h"
#include "vm.h"

u8 sg_bo_fresh(const struct sg_bo *bo)
{
	return sg_params.fresh_poison && bo->domain == AMDGPU_GEM_DOMAIN_VRAM ? SG_POISON : 0;
}

static atomic64_t *sg_bo_account(struct sg_bo *bo, u64 *limit)
{
	if (bo->store != SG_STORE_OWN)
		return NULL;
	if (bo->domain == AMDGPU_GEM_DOMAIN_VRAM) {
		*limit = bo->dev->vram_bytes;
		return &bo->dev->vram_used;
	}
	*limit = bo->dev->gtt_bytes;
	return &bo->dev->gtt_used;
}

static int sg_bo_charge(struct sg_bo *bo)
{
	u64 limit;
	atomic64_t *used = sg_bo_account(bo, &limit);

	if (!used)
		return 0;
	if (atomic64_add_return(bo->base.size, used) <= limit)
		return 0;
	atomic64_sub(bo->base.size, used);
	return -ENOMEM;
}

static bool sg_bo_visible(const struct sg_bo *bo)
{
	return bo->store == SG_STORE_OWN && bo->domain == AMDGPU_GEM_DOMAIN_VRAM &&
	       bo->flags & AMDGPU_GEM_CREATE_CPU_ACCESS_REQUIRED;
}

static void sg_bo_page_free(struct sg_bo_page *entry)
{
	sg_died(SG_PAGES);
	__free_page(entry->page);
	bitmap_free(entry->dwords);
	kfree(entry);
}

static void sg_bo_free_pages(struct sg_bo *bo)
{
	struct sg_bo_page *entry;
	unsigned long index;

	xa_for_each(&bo->pages, index, entry) {
		sg_bo_page_free(entry);
		cond_resched();
	}
	xa_destroy(&bo->pages);
}

static void sg_bo_free(struct drm_gem_object *obj)
{
	struct sg_bo *bo = sg_bo_of(obj);
	u64 limit;
	atomic64_t *used = sg_bo_account(bo, &limit);

	if (used)
		atomic64_sub(obj->size, used);
	if (sg_bo_visible(bo))
		atomic64_sub(obj->size, &bo->dev->visible_used);
	if (bo->host)
		sg_host_free(bo->host);
	if (bo->foreign)
		sg_prime_release(bo);
	if (bo->origin)
		sg_bo_put(bo->origin);
	sg_bo_free_pages(bo);
	kvfree(bo->missing);
	mutex_destroy(&bo->metadata_lock);
	drm_gem_object_release(obj);
	kfree(bo);
	sg_died(SG_BOS);
}

static const struct drm_gem_object_funcs sg_bo_funcs = {
	.free = sg_bo_free,
	.open = sg_gem_open_object,
	.close = sg_gem_close_object,
	.export = sg_prime_export,
	.mmap = sg_cpu_mmap,
	.vm_ops = &sg_cpu_vm_ops,
};

struct sg_bo *sg_bo_create_store(struct sg_device *dev, enum sg_store store, u64 size,
				 u32 domain, u64 flags)
{
	struct sg_bo *bo;
	int err;

	if (!size)
		return ERR_PTR(-EINVAL);
	/* More than any chip can address. */
	if (size > 16ULL * SZ_1T)
		return ERR_PTR(-ENOMEM);
	bo = kzalloc(sizeof(*bo), GFP_KERNEL);
	if (!bo)
		return ERR_PTR(-ENOMEM);
	sg_born(SG_BOS);
	bo->dev = dev;
	bo->store = store;
	bo->domain = bo->preferred = domain;
	bo->flags = flags;
	bo->alignment = PAGE_SIZE;
	bo->pid = task_tgid_nr(current);
	mutex_init(&bo->metadata_lock);
	spin_lock_init(&bo->lock);
	xa_init(&bo->pages);
	bo->base.funcs = &sg_bo_funcs;
	drm_gem_private_object_init(&dev->drm, &bo->base, PAGE_ALIGN(size));
	err = sg_bo_charge(bo);
	if (err) {
		bo->store = SG_STORE_FIXED;	/* nothing was charged: nothing to uncharge */
		goto fail;
	}
	if (sg_bo_visible(bo))
		atomic64_add(bo->base.size, &dev->visible_used);
	/*
	 * The range of offsets is some pages longer than the object, so that
	 * offsets differ after a restore.
	 */
	err = drm_gem_create_mmap_offset_size(&bo->base, bo->base.size +
					      get_random_u32_below(16) * PAGE_SIZE);
	if (err)
		goto fail;
	return bo;
fail:
	sg_bo_put(bo);
	return ERR_PTR(err);
}

struct sg_bo *sg_bo_create(struct sg_device *dev, u64 size, u64 alignment, u32 domain, u64 flags)
{
	struct sg_bo *bo = sg_bo_create_store(dev, SG_STORE_OWN, size, domain, flags);

	if (!IS_ERR(bo))
		bo->alignment = max_t(u64, alignment, PAGE_SIZE);
	return bo;
}

/* The page with this index, allocated if it is missing. Errors: -EAGAIN no memory. */
static struct sg_bo_page *sg_bo_make_page(struct sg_bo *bo, unsigned long index, gfp_t gfp)
{
	struct sg_bo_page *entry, *there;

	entry = kzalloc(sizeof(*entry), gfp);
	if (!entry)
		return ERR_PTR(-EAGAIN);
	entry->page = alloc_page(gfp);
	if (!entry->page) {
		kfree(entry);
		return ERR_PTR(-EAGAIN);
	}
	memset(page_address(entry->page), sg_bo_fresh(bo), PAGE_SIZE);
	sg_born(SG_PAGES);
	there = xa_cmpxchg(&bo->pages, index, NULL, entry, gfp);
	if (!there)
		return entry;
	sg_bo_page_free(entry);
	return xa_is_err(there) ? ERR_PTR(-EAGAIN) : there;
}

static int sg_bo_own_page(struct sg_bo *bo, unsigned long index, bool alloc, gfp_t gfp,
			  struct sg_page_ref *ref)
{
	struct sg_bo_page *entry = xa_load(&bo->pages, index);

	if (!entry && alloc) {
		/* Memory of a GPU that the machine does not have is an error, not a reason to kill. */
		entry = sg_bo_make_page(bo, index, gfp | __GFP_NOWARN |
					(gfp & __GFP_DIRECT_RECLAIM ? __GFP_RETRY_MAYFAIL : 0));
		if (IS_ERR(entry))
			return PTR_ERR(entry);
	}
	ref->page = entry ? entry->page : NULL;
	return 0;
}

int sg_bo_page(struct sg_bo *bo, unsigned long index, bool alloc, gfp_t gfp, struct sg_page_ref *ref)
{
	struct sg_mapping *mapping = ref->mapping;

	while (bo->store == SG_STORE_ALIAS)
		bo = bo->origin;
	memset(ref, 0, sizeof(*ref));
	ref->mapping = mapping;
	ref->bo = bo;
	ref->index = index;
	switch (bo->store) {
	case SG_STORE_OWN:
		return sg_bo_own_page(bo, index, alloc, gfp, ref);
	case SG_STORE_HOST:
		return sg_host_page(bo->host, index, ref);
	case SG_STORE_FOREIGN: {
		void *at = bo->vmap + index * PAGE_SIZE;

		ref->page = is_vmalloc_addr(at) ? vmalloc_to_page(at) : virt_to_page(at);
		return 0;
	}
	default:
		ref->page = bo->fixed + index;
		return 0;
	}
}

void sg_page_put(struct sg_page_ref *ref)
{
	if (ref->host)
		sg_host_put(ref);
	if (ref->mapping)
		sg_mapping_put(ref->mapping);
	ref->host = NULL;
	ref->mapping = NULL;
}

void *sg_bo_kmap(struct sg_bo *bo, unsigned long npages)
{
	struct sg_page_ref ref = {};
	struct page **pages;
	unsigned long i;
	void *at = NULL;

	if (npages > sg_bo_npages(bo))
		return NULL;
	pages = kvmalloc_array(npages, sizeof(*pages), GFP_KERNEL);
	if (!pages)
		return NULL;
	for (i = 0; i < npages; i++) {
		if (sg_bo_page(bo, i, true, GFP_KERNEL, &ref) || ref.host) {
			sg_page_put(&ref);
			goto out;
		}
		pages[i] = ref.page;
	}
	at = vmap(pages, npages, VM_MAP, PAGE_KERNEL);
	if (at)
		sg_bo_get(bo);
out:
	kvfree(pages);
	return at;
}

void sg_bo_kunmap(struct sg_bo *bo, void *at)
{
	vunmap(at);
	sg_bo_put(bo);
}
