// SPDX-License-Identifier: GPL-2.0 OR MIT
/* DRM_AMDGPU_CS: command submission to the SDMA engines. */
#include <drm/drm_syncobj.h>
#include <linux/dma-fence-chain.h>
#include <linux/dma-resv.h>
#include <linux/slab.h>

#include "cs.h"

static int sg_cs_make_job(struct sg_cs *cs)
{
	struct sg_job *job = kzalloc(struct_size(job, ibs, cs->ib_count), GFP_KERNEL_ACCOUNT);

	if (!job)
		return -ENOMEM;
	sg_born(SG_JOBS);
	cs->job = job;
	job->file = cs->file;
	job->entity = cs->line;
	kref_get(&cs->ctx->ref);
	job->pid = task_tgid_nr(current);
	get_task_comm(job->comm, current->group_leader);
	return 0;
}

/* BOs of the list: kept by the job; host memory is looked up as the hardware driver does. */
static int sg_cs_take_bos(struct sg_cs *cs)
{
	unsigned int i, count = cs->list ? cs->list->count : 0;
	struct sg_job *job = cs->job;
	int err;

	if (!count)
		return 0;
	job->bos = kvmalloc_array(count, sizeof(*job->bos), GFP_KERNEL_ACCOUNT);
	if (!job->bos)
		return -ENOMEM;
	for (i = 0; i < count; i++) {
		job->bos[i] = cs->list->bos[i];
		sg_bo_get(job->bos[i]);
		job->bo_count++;
		if (job->bos[i]->store != SG_STORE_HOST)
			continue;
		err = sg_bo_validate(job->bos[i]);
		if (err)
			return err;
	}
	return 0;
}

static int sg_cs_take_user_fence(struct sg_cs *cs)
{
	struct sg_job *job = cs->job;

	if (!cs->fence_bo)
		return 0;
	job->fence_map = sg_bo_kmap(cs->fence_bo, 1);
	if (!job->fence_map)
		return -ENOMEM;
	job->fence_bo = cs->fence_bo;
	cs->fence_bo = NULL;
	job->user_fence = job->fence_map + cs->fence_offset;
	return 0;
}

/* Other VMs' work on the BO: this job runs after it. The submitter orders the
 * work of its own VM. */
static int sg_cs_sync_bo(struct sg_cs *cs, struct sg_bo *bo)
{
	struct dma_resv_iter cursor;
	struct dma_fence *fence;
	int err = 0;

	dma_resv_for_each_fence(&cursor, bo->base.resv, DMA_RESV_USAGE_READ, fence) {
		if (sg_fence_owner(fence) == &cs->file->vm)
			continue;
		err = sg_cs_depend(cs, dma_fence_get(fence));
		if (err)
			break;
	}
	return err;
}

static int sg_cs_sync(struct sg_cs *cs)
{
	unsigned int i;
	int err = 0;

	for (i = 0; i < cs->job->bo_count && !err; i++) {
		struct sg_bo *bo = cs->job->bos[i];

		err = dma_resv_lock_interruptible(bo->base.resv, NULL);
		if (err)
			return err;
		err = sg_cs_sync_bo(cs, bo);
		if (!err)
			err = dma_resv_reserve_fences(bo->base.resv, 1);
		dma_resv_unlock(bo->base.resv);
	}
	return err;
}

/* Fences that other users of the BO wait for. A slot that has been reused costs a wait. */
static void sg_cs_publish_bo(struct sg_bo *bo, struct dma_fence *fence)
{
	dma_resv_lock(bo->base.resv, NULL);
	if (dma_resv_reserve_fences(bo->base.resv, 1))
		dma_fence_wait(fence, false);
	else
		dma_resv_add_fence(bo->base.resv, fence, DMA_RESV_USAGE_WRITE);
	dma_resv_unlock(bo->base.resv);
}

static int sg_cs_make_deps(struct sg_cs *cs)
{
	struct sg_job *job = cs->job;
	unsigned int i;

	if (!cs->dep_count)
		return 0;
	job->deps = kvcalloc(cs->dep_count, sizeof(*job->deps), GFP_KERNEL_ACCOUNT);
	if (!job->deps)
		return -ENOMEM;
	for (i = 0; i < cs->dep_count; i++) {
		INIT_LIST_HEAD(&job->deps[i].cb.node);
		job->deps[i].fence = cs->deps[i];
	}
	job->dep_count = cs->dep_count;
	cs->dep_count = 0;
	return 0;
}

static void sg_cs_signal_posts(struct sg_cs *cs, struct dma_fence *fence)
{
	unsigned int i;

	for (i = 0; i < cs->post_count; i++) {
		struct sg_post *post = &cs->posts[i];

		if (post->chain) {
			drm_syncobj_add_point(post->syncobj, post->chain, fence, post->point);
			post->chain = NULL;
		} else {
			drm_syncobj_replace_fence(post->syncobj, fence);
		}
	}
}

/* Under ctx->submit, so that the jobs of a line are queued in the order of their numbers. */
static int sg_cs_submit(struct sg_cs *cs, u64 *handle)
{
	struct sg_job *job = cs->job;
	struct dma_fence *fence;
	unsigned int i;
	int err;

	err = sg_ctx_wait_room(cs->line);
	if (err)
		return err;
	job->fence = sg_fence_create(cs->line->context, cs->line->sequence, &cs->file->vm);
	if (!job->fence)
		return -ENOMEM;
	fence = dma_fence_get(job->fence);
	*handle = job->sequence = sg_ctx_add_fence(cs->line, fence);
	sg_cs_signal_posts(cs, fence);
	cs->job = NULL;
	sg_ring_push(job);
	/* The list keeps the BOs. */
	for (i = 0; cs->list && i < cs->list->count; i++)
		sg_cs_publish_bo(cs->list->bos[i], fence);
	dma_fence_put(fence);
	return 0;
}

static int sg_cs_run(struct sg_cs *cs, const struct drm_amdgpu_cs_in *in, u64 *handle)
{
	int err;

	err = sg_cs_read_chunks(cs, in->chunks, in->num_chunks);
	if (err)
		return err;
	err = sg_cs_make_job(cs);
	if (!err)
		err = sg_cs_take_chunks(cs);
	if (err)
		return err;
	if (in->bo_list_handle) {
		struct sg_bo_list *list = cs->list ? ERR_PTR(-EINVAL) :
						     sg_bo_list_get(cs->file, in->bo_list_handle);

		if (IS_ERR(list))
			return PTR_ERR(list);
		cs->list = list;
	}
	err = sg_cs_take_bos(cs);
	if (!err)
		err = sg_cs_take_user_fence(cs);
	if (!err)
		err = sg_cs_sync(cs);
	if (!err)
		err = sg_cs_make_deps(cs);
	if (err)
		return err;
	err = mutex_lock_interruptible(&cs->ctx->submit);
	if (err)
		return err;
	err = sg_cs_submit(cs, handle);
	mutex_unlock(&cs->ctx->submit);
	return err;
}

static void sg_cs_end(struct sg_cs *cs)
{
	unsigned int i;

	for (i = 0; i < cs->chunk_count; i++)
		kvfree(cs->chunks[i].data);
	kvfree(cs->chunks);
	for (i = 0; i < cs->dep_count; i++)
		dma_fence_put(cs->deps[i]);
	kvfree(cs->deps);
	for (i = 0; i < cs->post_count; i++) {
		drm_syncobj_put(cs->posts[i].syncobj);
		dma_fence_chain_free(cs->posts[i].chain);
	}
	kvfree(cs->posts);
	if (cs->fence_bo)
		sg_bo_put(cs->fence_bo);
	if (cs->list)
		sg_bo_list_put(cs->list);
	if (cs->job)
		sg_job_free(cs->job);
	sg_ctx_put(cs->ctx);
}

int sg_cs_ioctl(struct drm_device *drm, void *data, struct drm_file *drm_file)
{
	struct sg_cs cs = { .file = sg_file_of(drm_file) };
	union drm_amdgpu_cs *args = data;
	u64 handle = 0;
	int err;

	if (!args->in.num_chunks)
		return -EINVAL;
	cs.ctx = sg_ctx_get(cs.file, args->in.ctx_id);
	if (!cs.ctx)
		return -EINVAL;
	err = sg_cs_run(&cs, &args->in, &handle);
	sg_cs_end(&cs);
	if (!err)
		args->out.handle = handle;
	return err;
}

static int sg_forget_ctx(int id, void *ctx, void *data)
{
	sg_ctx_put(ctx);
	return 0;
}

static int sg_forget_list(int id, void *list, void *data)
{
	sg_bo_list_put(list);
	return 0;
}

void sg_exec_file_close(struct sg_file *file)
{
	struct sg_exec_file *exec = file->exec;

	if (!exec)
		return;
	sg_rings_flush(file);
	idr_for_each(&exec->contexts, sg_forget_ctx, NULL);
	idr_for_each(&exec->bo_lists, sg_forget_list, NULL);
	idr_destroy(&exec->contexts);
	idr_destroy(&exec->bo_lists);
	kfree(exec);
	file->exec = NULL;
}
