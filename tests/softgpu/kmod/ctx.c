// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Contexts: DRM_AMDGPU_CTX, and the fences of their submissions. */
#include <drm/drm_auth.h>
#include <linux/capability.h>
#include <linux/slab.h>

#include "ctx.h"
#include "exec_device.h"

/* Contexts of one file. */
#define SG_MAX_CONTEXTS	4096

static int sg_ctx_set_pstate(struct sg_ctx *ctx, u32 state);

static void sg_ctx_release(struct kref *ref)
{
	struct sg_ctx *ctx = container_of(ref, struct sg_ctx, ref);
	int line, i;

	for (line = 0; line < SG_CTX_ALL_LINES; line++)
		for (i = 0; i < SG_CTX_JOBS; i++)
			dma_fence_put(ctx->lines[line].fences[i]);
	if (READ_ONCE(ctx->dev->exec->pstate_ctx) == ctx)
		sg_ctx_set_pstate(ctx, AMDGPU_CTX_STABLE_PSTATE_NONE);
	mutex_destroy(&ctx->submit);
	kfree(ctx);
	sg_died(SG_CONTEXTS);
}

void sg_ctx_put(struct sg_ctx *ctx)
{
	kref_put(&ctx->ref, sg_ctx_release);
}

struct sg_ctx *sg_ctx_get(struct sg_file *file, u32 id)
{
	struct sg_ctx *ctx;

	mutex_lock(&file->exec->lock);
	ctx = id < SG_MAX_CONTEXTS ? idr_find(&file->exec->contexts, id) : NULL;
	if (ctx)
		kref_get(&ctx->ref);
	mutex_unlock(&file->exec->lock);
	return ctx;
}

static struct sg_ctx *sg_ctx_new(struct sg_device *dev)
{
	struct sg_ctx *ctx = kzalloc(sizeof(*ctx), GFP_KERNEL_ACCOUNT);
	int line;

	if (!ctx)
		return NULL;
	kref_init(&ctx->ref);
	ctx->dev = dev;
	spin_lock_init(&ctx->lock);
	mutex_init(&ctx->submit);
	ctx->resets = ctx->resets_seen = atomic_read(&dev->exec->resets);
	for (line = 0; line < SG_CTX_ALL_LINES; line++) {
		ctx->lines[line].ctx = ctx;
		ctx->lines[line].sequence = 1;
		ctx->lines[line].context = dma_fence_context_alloc(1);
	}
	ctx->lines[SG_CTX_VIDEO].is_video = true;
	sg_born(SG_CONTEXTS);
	return ctx;
}

/* Priorities that this kernel does not know count as normal, as old programs pass garbage. */
static bool sg_priority_permitted(struct drm_file *drm, s32 priority)
{
	if (priority != AMDGPU_CTX_PRIORITY_HIGH && priority != AMDGPU_CTX_PRIORITY_VERY_HIGH)
		return true;
	return capable(CAP_SYS_NICE) || drm_is_current_master(drm);
}

static int sg_ctx_alloc(struct sg_file *file, s32 priority, u32 *id)
{
	struct sg_ctx *ctx;
	int number;

	if (!sg_priority_permitted(file->drm, priority))
		return -EACCES;
	ctx = sg_ctx_new(file->dev);
	if (!ctx)
		return -ENOMEM;
	mutex_lock(&file->exec->lock);
	number = idr_alloc(&file->exec->contexts, ctx, 1, SG_MAX_CONTEXTS, GFP_KERNEL);
	mutex_unlock(&file->exec->lock);
	if (number < 0) {
		sg_ctx_put(ctx);
		return number;
	}
	*id = number;
	return 0;
}

static int sg_ctx_free(struct sg_file *file, u32 id)
{
	struct sg_ctx *ctx;

	mutex_lock(&file->exec->lock);
	ctx = id < SG_MAX_CONTEXTS ? idr_remove(&file->exec->contexts, id) : NULL;
	mutex_unlock(&file->exec->lock);
	if (!ctx)
		return -EINVAL;
	sg_ctx_put(ctx);
	return 0;
}

static bool sg_ctx_guilty(const struct sg_ctx *ctx)
{
	int line;

	for (line = 0; line < SG_CTX_ALL_LINES; line++)
		if (READ_ONCE(ctx->lines[line].error))
			return true;
	return false;
}

static int sg_ctx_query(struct sg_file *file, u32 id, bool second, union drm_amdgpu_ctx_out *out)
{
	unsigned int resets = atomic_read(&file->dev->exec->resets);
	struct sg_ctx *ctx = sg_ctx_get(file, id);

	if (!ctx)
		return -EINVAL;
	out->state.flags = 0;
	out->state.hangs = 0;
	if (!second) {
		out->state.reset_status = xchg(&ctx->resets_seen, resets) == resets ?
					  AMDGPU_CTX_NO_RESET : AMDGPU_CTX_UNKNOWN_RESET;
	} else {
		if (ctx->resets != resets)
			out->state.flags |= AMDGPU_CTX_QUERY2_FLAGS_RESET;
		if (sg_ctx_guilty(ctx))
			out->state.flags |= AMDGPU_CTX_QUERY2_FLAGS_GUILTY;
	}
	sg_ctx_put(ctx);
	return 0;
}

/* The state is the GPU's: the context that has set it may change it, others read it. No clocks exist to pin. */
static int sg_ctx_set_pstate(struct sg_ctx *ctx, u32 state)
{
	struct sg_exec_device *exec = ctx->dev->exec;
	int err = 0;

	mutex_lock(&exec->pstate_lock);
	if (exec->pstate_ctx && exec->pstate_ctx != ctx) {
		err = -EBUSY;
	} else if (exec->pstate != state) {
		exec->pstate = state;
		exec->pstate_ctx = state == AMDGPU_CTX_STABLE_PSTATE_NONE ? NULL : ctx;
	}
	mutex_unlock(&exec->pstate_lock);
	return err;
}

static int sg_ctx_pstate(struct sg_file *file, u32 id, bool set, u32 flags, union drm_amdgpu_ctx_out *out)
{
	struct sg_ctx *ctx;
	int err = 0;

	if (set && (flags & ~AMDGPU_CTX_STABLE_PSTATE_FLAGS_MASK ||
		    flags > AMDGPU_CTX_STABLE_PSTATE_PEAK))
		return -EINVAL;
	ctx = sg_ctx_get(file, id);
	if (!ctx)
		return -EINVAL;
	if (set)
		err = sg_ctx_set_pstate(ctx, flags);
	else
		out->pstate.flags = READ_ONCE(ctx->dev->exec->pstate);
	sg_ctx_put(ctx);
	return err;
}

int sg_ctx_ioctl(struct drm_device *drm, void *data, struct drm_file *drm_file)
{
	struct sg_file *file = sg_file_of(drm_file);
	union drm_amdgpu_ctx *args = data;
	struct drm_amdgpu_ctx_in in = args->in;
	u32 id = in.ctx_id;
	int err;

	if (in.flags && in.op != AMDGPU_CTX_OP_SET_STABLE_PSTATE)
		return -EINVAL;
	switch (in.op) {
	case AMDGPU_CTX_OP_ALLOC_CTX:
		err = sg_ctx_alloc(file, in.priority, &id);
		args->out.alloc.ctx_id = id;
		return err;
	case AMDGPU_CTX_OP_FREE_CTX:
		return sg_ctx_free(file, id);
	case AMDGPU_CTX_OP_QUERY_STATE:
		return sg_ctx_query(file, id, false, &args->out);
	case AMDGPU_CTX_OP_QUERY_STATE2:
		return sg_ctx_query(file, id, true, &args->out);
	case AMDGPU_CTX_OP_GET_STABLE_PSTATE:
		return sg_ctx_pstate(file, id, false, 0, &args->out);
	case AMDGPU_CTX_OP_SET_STABLE_PSTATE:
		return sg_ctx_pstate(file, id, true, in.flags, &args->out);
	default:
		return -EINVAL;
	}
}

int sg_ctx_line(struct sg_ctx *ctx, u32 ip_type, u32 instance, u32 ring, struct sg_entity **line)
{
	/* Of amdgpu's engines only SDMA, which may have no ring, and one for video exist here. */
	if (instance || !ctx->dev->exec->ring_count)
		return -EINVAL;
	if (ip_type == AMDGPU_HW_IP_DMA && ring < SG_CTX_LINES)
		*line = &ctx->lines[ring];
	else if (ip_type == AMDGPU_HW_IP_VCN_DEC && !ring)
		*line = &ctx->lines[SG_CTX_VIDEO];
	else
		return -EINVAL;
	return READ_ONCE((*line)->error);
}

struct dma_fence *sg_ctx_fence(struct sg_entity *line, u64 sequence)
{
	struct dma_fence *fence = ERR_PTR(-EINVAL);
	struct sg_ctx *ctx = line->ctx;

	spin_lock(&ctx->lock);
	if (sequence == U64_MAX)
		sequence = line->sequence - 1;
	if (sequence < line->sequence)
		fence = line->sequence - sequence > SG_CTX_JOBS ? NULL :
			line->fences[sequence % SG_CTX_JOBS];
	if (!IS_ERR_OR_NULL(fence))
		dma_fence_get(fence);
	spin_unlock(&ctx->lock);
	return fence;
}

int sg_ctx_wait_room(struct sg_entity *line)
{
	struct dma_fence *oldest;
	long left;

	spin_lock(&line->ctx->lock);
	oldest = dma_fence_get(line->fences[line->sequence % SG_CTX_JOBS]);
	spin_unlock(&line->ctx->lock);
	if (!oldest)
		return 0;
	left = dma_fence_wait(oldest, true);
	dma_fence_put(oldest);
	return left;
}

u64 sg_ctx_add_fence(struct sg_entity *line, struct dma_fence *fence)
{
	struct dma_fence *old;
	u64 sequence;

	spin_lock(&line->ctx->lock);
	sequence = line->sequence++;
	old = line->fences[sequence % SG_CTX_JOBS];
	line->fences[sequence % SG_CTX_JOBS] = dma_fence_get(fence);
	spin_unlock(&line->ctx->lock);
	dma_fence_put(old);
	return sequence;
}
