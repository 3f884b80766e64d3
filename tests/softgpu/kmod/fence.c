// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Fences of jobs: DRM core's syncobjs, sync files and reservations hold them. */
#include <linux/slab.h>

#include "ring.h"
#include "softgpu.h"

struct sg_fence {
	struct dma_fence base;
	spinlock_t lock;
	void *owner;
};

static const char *sg_fence_driver_name(struct dma_fence *fence)
{
	return "amdgpu";
}

static const char *sg_fence_timeline_name(struct dma_fence *fence)
{
	return "sdma";
}

static const struct dma_fence_ops sg_fence_ops = {
	.get_driver_name = sg_fence_driver_name,
	.get_timeline_name = sg_fence_timeline_name,
};

/* NULL: no memory. Freed by the fence core, as `base` comes first. */
struct dma_fence *sg_fence_create(u64 context, u64 sequence, void *owner)
{
	struct sg_fence *fence = kzalloc(sizeof(*fence), GFP_KERNEL_ACCOUNT);

	BUILD_BUG_ON(offsetof(struct sg_fence, base));
	if (!fence)
		return NULL;
	spin_lock_init(&fence->lock);
	fence->owner = owner;
	dma_fence_init(&fence->base, &sg_fence_ops, &fence->lock, context, sequence);
	return &fence->base;
}

void *sg_fence_owner(struct dma_fence *fence)
{
	return fence->ops == &sg_fence_ops ? container_of(fence, struct sg_fence, base)->owner : NULL;
}
