// SPDX-License-Identifier: GPL-2.0 OR MIT
/* The chunks of a submission: what it executes, waits for and signals. */
#include <drm/drm_gem.h>
#include <drm/drm_syncobj.h>
#include <linux/dma-fence-chain.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "cs.h"

/* IBs of one job on an SDMA ring, and dwords of one of them: the packets' fields allow no more. */
#define SG_MAX_IBS	16
#define SG_MAX_IB_DW	0xfffff
/* Chunks, and dwords of one: far more than any program has. */
#define SG_MAX_CHUNKS	4096
#define SG_MAX_CHUNK_DW	(SZ_4M / sizeof(u32))

int sg_cs_depend(struct sg_cs *cs, struct dma_fence *fence)
{
	struct dma_fence **deps;

	if (!fence || dma_fence_is_signaled(fence)) {
		dma_fence_put(fence);
		return 0;
	}
	if (cs->dep_count == cs->dep_room) {
		unsigned int room = cs->dep_room * 2 ?: 8;

		deps = kvmalloc_array(room, sizeof(*deps), GFP_KERNEL);
		if (!deps) {
			dma_fence_put(fence);
			return -ENOMEM;
		}
		if (cs->dep_count)
			memcpy(deps, cs->deps, cs->dep_count * sizeof(*deps));
		kvfree(cs->deps);
		cs->deps = deps;
		cs->dep_room = room;
	}
	cs->deps[cs->dep_count++] = fence;
	return 0;
}

/* All IBs of one submission go to one line: SDMA rings have no gangs. */
static int sg_cs_count_ib(struct sg_cs *cs, const struct sg_chunk *chunk)
{
	const struct drm_amdgpu_cs_chunk_ib *ib = chunk->data;
	struct sg_entity *line;
	int err;

	if (chunk->bytes < sizeof(*ib))
		return -EINVAL;
	err = sg_ctx_line(cs->ctx, ib->ip_type, ib->ip_instance, ib->ring, &line);
	if (err)
		return err;
	if ((cs->line && cs->line != line) || cs->ib_count == SG_MAX_IBS)
		return -EINVAL;
	cs->line = line;
	cs->ib_count++;
	return 0;
}

static int sg_cs_user_fence(struct sg_cs *cs, const struct sg_chunk *chunk)
{
	const struct drm_amdgpu_cs_chunk_fence *fence = chunk->data;
	struct drm_gem_object *obj;

	if (chunk->bytes < sizeof(*fence) || cs->fence_bo)
		return -EINVAL;
	obj = drm_gem_object_lookup(cs->file->drm, fence->handle);
	if (!obj)
		return -EINVAL;
	cs->fence_bo = sg_bo_of(obj);
	cs->fence_offset = fence->offset;
	if (obj->size != PAGE_SIZE || fence->offset > PAGE_SIZE - sizeof(u64) ||
	    fence->offset % sizeof(u64) || cs->fence_bo->store == SG_STORE_HOST)
		return -EINVAL;
	return 0;
}

static int sg_cs_bo_handles(struct sg_cs *cs, const struct sg_chunk *chunk)
{
	struct sg_bo_list *list;

	if (chunk->bytes < sizeof(struct drm_amdgpu_bo_list_in) || cs->list)
		return -EINVAL;
	list = sg_bo_list_create(cs->file, chunk->data);
	if (IS_ERR(list))
		return PTR_ERR(list);
	cs->list = list;
	return 0;
}

static int sg_cs_first_look(struct sg_cs *cs, const struct sg_chunk *chunk)
{
	switch (chunk->id) {
	case AMDGPU_CHUNK_ID_IB:
		return sg_cs_count_ib(cs, chunk);
	case AMDGPU_CHUNK_ID_FENCE:
		return sg_cs_user_fence(cs, chunk);
	case AMDGPU_CHUNK_ID_BO_HANDLES:
		return sg_cs_bo_handles(cs, chunk);
	case AMDGPU_CHUNK_ID_DEPENDENCIES:
	case AMDGPU_CHUNK_ID_SCHEDULED_DEPENDENCIES:
	case AMDGPU_CHUNK_ID_SYNCOBJ_IN:
	case AMDGPU_CHUNK_ID_SYNCOBJ_OUT:
	case AMDGPU_CHUNK_ID_SYNCOBJ_TIMELINE_WAIT:
	case AMDGPU_CHUNK_ID_SYNCOBJ_TIMELINE_SIGNAL:
		return 0;
	default:
		return -EINVAL;
	}
}

static int sg_cs_read_chunk(struct sg_chunk *chunk, u64 at)
{
	struct drm_amdgpu_cs_chunk user;

	if (copy_from_user(&user, u64_to_user_ptr(at), sizeof(user)))
		return -EFAULT;
	chunk->id = user.chunk_id;
	if (user.length_dw > SG_MAX_CHUNK_DW)
		return -ENOMEM;
	chunk->bytes = user.length_dw * sizeof(u32);
	chunk->data = vmemdup_user(u64_to_user_ptr(user.chunk_data), chunk->bytes);
	if (IS_ERR(chunk->data)) {
		int err = PTR_ERR(chunk->data);

		chunk->data = NULL;
		return err;
	}
	return 0;
}

int sg_cs_read_chunks(struct sg_cs *cs, u64 user, u32 count)
{
	unsigned int i;
	int err = 0;
	u64 at;

	if (!count || count > SG_MAX_CHUNKS)
		return count ? -ENOMEM : -EINVAL;
	cs->chunks = kvcalloc(count, sizeof(*cs->chunks), GFP_KERNEL);
	if (!cs->chunks)
		return -ENOMEM;
	cs->chunk_count = count;
	for (i = 0; i < count && !err; i++) {
		if (get_user(at, (u64 __user *)u64_to_user_ptr(user) + i))
			return -EFAULT;
		err = sg_cs_read_chunk(&cs->chunks[i], at);
		if (!err)
			err = sg_cs_first_look(cs, &cs->chunks[i]);
	}
	if (!err && !cs->line)
		err = -EINVAL;	/* nothing to execute */
	return err;
}

static int sg_cs_take_ib(struct sg_cs *cs, const struct drm_amdgpu_cs_chunk_ib *ib)
{
	struct sg_ib *to = &cs->job->ibs[cs->job->ib_count];

	if (ib->ib_bytes / sizeof(u32) > SG_MAX_IB_DW)
		return -EINVAL;
	to->va = ib->va_start;
	to->bytes = ib->ib_bytes & ~3U;
	cs->job->ib_count++;
	return 0;
}

static int sg_cs_take_dependencies(struct sg_cs *cs, const struct sg_chunk *chunk)
{
	const struct drm_amdgpu_cs_chunk_dep *deps = chunk->data;
	unsigned int i, count = chunk->bytes / sizeof(*deps);
	int err = 0;

	for (i = 0; i < count && !err; i++) {
		struct sg_ctx *ctx = sg_ctx_get(cs->file, deps[i].ctx_id);
		struct dma_fence *fence;
		struct sg_entity *line;

		if (!ctx)
			return -EINVAL;
		err = sg_ctx_line(ctx, deps[i].ip_type, deps[i].ip_instance, deps[i].ring, &line);
		fence = err ? ERR_PTR(err) : sg_ctx_fence(line, deps[i].handle);
		sg_ctx_put(ctx);
		if (IS_ERR(fence))
			return PTR_ERR(fence);
		/* A job begins only after all earlier ones have ended, so its
		 * end implies theirs. */
		if (chunk->id == AMDGPU_CHUNK_ID_SCHEDULED_DEPENDENCIES) {
			dma_fence_put(fence);
			continue;
		}
		err = sg_cs_depend(cs, fence);
	}
	return err;
}

static int sg_cs_take_wait(struct sg_cs *cs, u32 handle, u64 point, u64 flags)
{
	struct dma_fence *fence;
	int err = drm_syncobj_find_fence(cs->file->drm, handle, point, flags, &fence);

	return err ?: sg_cs_depend(cs, fence);
}

static int sg_cs_take_waits(struct sg_cs *cs, const struct sg_chunk *chunk, bool timeline)
{
	const struct drm_amdgpu_cs_chunk_syncobj *points = chunk->data;
	const struct drm_amdgpu_cs_chunk_sem *sems = chunk->data;
	unsigned int i, count = chunk->bytes / (timeline ? sizeof(*points) : sizeof(*sems));
	int err = 0;

	for (i = 0; i < count && !err; i++)
		err = timeline ? sg_cs_take_wait(cs, points[i].handle, points[i].point,
						 points[i].flags) :
				 sg_cs_take_wait(cs, sems[i].handle, 0, 0);
	return err;
}

static int sg_cs_add_post(struct sg_cs *cs, u32 handle, u64 point)
{
	struct sg_post *post = &cs->posts[cs->post_count];

	if (point) {
		post->chain = dma_fence_chain_alloc();
		if (!post->chain)
			return -ENOMEM;
	}
	post->syncobj = drm_syncobj_find(cs->file->drm, handle);
	if (!post->syncobj) {
		dma_fence_chain_free(post->chain);
		post->chain = NULL;
		return -EINVAL;
	}
	post->point = point;
	cs->post_count++;
	return 0;
}

static int sg_cs_take_posts(struct sg_cs *cs, const struct sg_chunk *chunk, bool timeline)
{
	const struct drm_amdgpu_cs_chunk_syncobj *points = chunk->data;
	const struct drm_amdgpu_cs_chunk_sem *sems = chunk->data;
	unsigned int i, count = chunk->bytes / (timeline ? sizeof(*points) : sizeof(*sems));
	int err = 0;

	if (cs->posts)
		return -EINVAL;	/* one such chunk */
	cs->posts = kvcalloc(count ?: 1, sizeof(*cs->posts), GFP_KERNEL);
	if (!cs->posts)
		return -ENOMEM;
	for (i = 0; i < count && !err; i++)
		err = timeline ? sg_cs_add_post(cs, points[i].handle, points[i].point) :
				 sg_cs_add_post(cs, sems[i].handle, 0);
	return err;
}

static int sg_cs_take_chunk(struct sg_cs *cs, const struct sg_chunk *chunk)
{
	switch (chunk->id) {
	case AMDGPU_CHUNK_ID_IB:
		return sg_cs_take_ib(cs, chunk->data);
	case AMDGPU_CHUNK_ID_DEPENDENCIES:
	case AMDGPU_CHUNK_ID_SCHEDULED_DEPENDENCIES:
		return sg_cs_take_dependencies(cs, chunk);
	case AMDGPU_CHUNK_ID_SYNCOBJ_IN:
		return sg_cs_take_waits(cs, chunk, false);
	case AMDGPU_CHUNK_ID_SYNCOBJ_TIMELINE_WAIT:
		return sg_cs_take_waits(cs, chunk, true);
	case AMDGPU_CHUNK_ID_SYNCOBJ_OUT:
		return sg_cs_take_posts(cs, chunk, false);
	case AMDGPU_CHUNK_ID_SYNCOBJ_TIMELINE_SIGNAL:
		return sg_cs_take_posts(cs, chunk, true);
	default:
		return 0;	/* read in the first pass */
	}
}

/* The job exists. */
int sg_cs_take_chunks(struct sg_cs *cs)
{
	unsigned int i;
	int err = 0;

	for (i = 0; i < cs->chunk_count && !err; i++)
		err = sg_cs_take_chunk(cs, &cs->chunks[i]);
	return err;
}
