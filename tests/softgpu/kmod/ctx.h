/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* Contexts of a DRM file, and their lines of jobs. */
#ifndef SOFTGPU_CTX_H
#define SOFTGPU_CTX_H

#include <linux/dma-fence.h>
#include <linux/idr.h>
#include <linux/kref.h>
#include <linux/mutex.h>

#include "softgpu.h"

struct sg_ring;

/* Lines that a context has on the SDMA engines. */
#define SG_CTX_LINES		2
/* The line of the video engine, after those. Its jobs do nothing here. */
#define SG_CTX_VIDEO		SG_CTX_LINES
#define SG_CTX_ALL_LINES	(SG_CTX_VIDEO + 1)
/* Jobs of a line whose fences are kept, and that may be in flight at once. */
#define SG_CTX_JOBS		32

/* A line: its jobs run one after the other. */
struct sg_entity {
	struct sg_ctx *ctx;
	struct sg_ring *ring;		/* that has its jobs, while there are any; under the ring's lock */
	unsigned int queued;		/* likewise */
	u64 context;			/* of fences */
	bool is_video;			/* its jobs end without an effect */
	int error;			/* of the job that hung: nothing runs after it */
	u64 sequence;			/* of the next job; under ctx->lock */
	struct dma_fence *fences[SG_CTX_JOBS];
};

struct sg_ctx {
	struct kref ref;
	struct sg_device *dev;
	spinlock_t lock;
	struct mutex submit;		/* orders submissions; outside of reservations */
	unsigned int resets, resets_seen;	/* of the GPU, when made and when last asked */
	struct sg_entity lines[SG_CTX_ALL_LINES];
};

struct sg_exec_file {
	struct mutex lock;		/* of both */
	struct idr contexts;
	struct idr bo_lists;
};

struct sg_ctx *sg_ctx_get(struct sg_file *file, u32 id);
void sg_ctx_put(struct sg_ctx *ctx);
/* The line that a chunk names; -EINVAL: no such line, or its error. */
int sg_ctx_line(struct sg_ctx *ctx, u32 ip_type, u32 instance, u32 ring, struct sg_entity **line);
/* NULL: that job ended long ago; an error: no such job yet. */
struct dma_fence *sg_ctx_fence(struct sg_entity *line, u64 sequence);
/* Under ctx->submit: waits until the line has space for one more job, then adds it. */
int sg_ctx_wait_room(struct sg_entity *line);
u64 sg_ctx_add_fence(struct sg_entity *line, struct dma_fence *fence);

#endif
