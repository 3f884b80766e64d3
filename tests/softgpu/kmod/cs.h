/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* A submission while its parts are read. */
#ifndef SOFTGPU_CS_H
#define SOFTGPU_CS_H

#include "bo_list.h"
#include "ctx.h"
#include "ring.h"

struct drm_syncobj;
struct dma_fence_chain;

/* A syncobj that will carry the job's fence. */
struct sg_post {
	struct drm_syncobj *syncobj;
	struct dma_fence_chain *chain;	/* for a timeline's point; NULL: the syncobj as a whole */
	u64 point;
};

struct sg_chunk {
	u32 id;
	u32 bytes;
	void *data;
};

struct sg_cs {
	struct sg_file *file;
	struct sg_ctx *ctx;
	struct sg_entity *line;		/* that all IBs are for */
	struct sg_chunk *chunks;
	unsigned int chunk_count;
	unsigned int ib_count;
	struct sg_bo_list *list;
	struct sg_bo *fence_bo;		/* user fence; NULL: none */
	u32 fence_offset;
	struct sg_post *posts;
	unsigned int post_count;
	struct dma_fence **deps;	/* with a reference each */
	unsigned int dep_count, dep_room;
	struct sg_job *job;
};

/* cs_chunk.c: reads all chunks, checks and looks up what they name. */
int sg_cs_read_chunks(struct sg_cs *cs, u64 user, u32 count);
int sg_cs_take_chunks(struct sg_cs *cs);
/* The caller's reference goes to the submission, also on error. */
int sg_cs_depend(struct sg_cs *cs, struct dma_fence *fence);

#endif
