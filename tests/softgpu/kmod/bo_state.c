// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Missing parts of a restored BO: a bit a page, and a bit a dword of partly loaded pages. */
#include <linux/bitmap.h>
#include <linux/slab.h>

#include "softgpu.h"

int sg_bo_mark_missing(struct sg_bo *bo)
{
	unsigned long npages = sg_bo_npages(bo);
	unsigned long *bits = kvcalloc(BITS_TO_LONGS(npages), sizeof(long), GFP_KERNEL);

	if (!bits)
		return -ENOMEM;
	bitmap_fill(bits, npages);
	bo->missing = bits;
	return 0;
}

static bool sg_tracked(const struct sg_page_ref *ref)
{
	return ref->bo && ref->bo->missing;
}

bool sg_page_missing(const struct sg_page_ref *ref, size_t at, size_t len)
{
	unsigned long first = at / sizeof(u32), end = DIV_ROUND_UP(at + len, sizeof(u32));
	struct sg_bo_page *entry;
	bool missing;

	if (!sg_tracked(ref) || !len || !test_bit(ref->index, ref->bo->missing))
		return false;
	spin_lock(&ref->bo->lock);
	missing = test_bit(ref->index, ref->bo->missing);
	entry = xa_load(&ref->bo->pages, ref->index);
	if (missing && entry && entry->dwords)
		missing = find_next_bit(entry->dwords, end, first) < end;
	spin_unlock(&ref->bo->lock);
	return missing;
}

static void sg_page_restored(struct sg_bo *bo, unsigned long index, struct sg_bo_page *entry)
{
	clear_bit(index, bo->missing);
	if (entry) {
		bitmap_free(entry->dwords);
		entry->dwords = NULL;
	}
}

void sg_page_written(struct sg_page_ref *ref, size_t at, size_t len)
{
	unsigned long first = DIV_ROUND_UP(at, sizeof(u32)), end = (at + len) / sizeof(u32);
	struct sg_bo_page *entry;

	if (!sg_tracked(ref) || !test_bit(ref->index, ref->bo->missing))
		return;
	spin_lock(&ref->bo->lock);
	entry = xa_load(&ref->bo->pages, ref->index);
	if (!test_bit(ref->index, ref->bo->missing) || !entry)
		goto out;
	if (first == 0 && end == SG_PAGE_DWORDS) {
		sg_page_restored(ref->bo, ref->index, entry);
		goto out;
	}
	if (!entry->dwords) {
		entry->dwords = bitmap_alloc(SG_PAGE_DWORDS, GFP_ATOMIC);
		/* Without it the page stays missing as a whole: too strict, never too lax. */
		if (!entry->dwords)
			goto out;
		bitmap_fill(entry->dwords, SG_PAGE_DWORDS);
	}
	if (end > first)
		bitmap_clear(entry->dwords, first, end - first);
	if (bitmap_empty(entry->dwords, SG_PAGE_DWORDS))
		sg_page_restored(ref->bo, ref->index, entry);
out:
	spin_unlock(&ref->bo->lock);
}

void sg_bo_declare(struct sg_bo *bo, u64 offset, u64 len)
{
	unsigned long first = DIV_ROUND_UP(offset, PAGE_SIZE), index;
	unsigned long end = min_t(u64, (offset + len) >> PAGE_SHIFT, sg_bo_npages(bo));

	while (bo->store == SG_STORE_ALIAS)
		bo = bo->origin;
	if (!bo->missing)
		return;
	for (index = first; index < end; index++) {
		spin_lock(&bo->lock);
		sg_page_restored(bo, index, xa_load(&bo->pages, index));
		spin_unlock(&bo->lock);
	}
}
