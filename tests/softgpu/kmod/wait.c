// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Waiting for jobs: DRM_AMDGPU_WAIT_CS, WAIT_FENCES; FENCE_TO_HANDLE. */
#include <drm/drm_syncobj.h>
#include <linux/fdtable.h>
#include <linux/file.h>
#include <linux/slab.h>
#include <linux/sync_file.h>
#include <linux/uaccess.h>

#include "ctx.h"
#include "ring.h"

/* Fences that one WAIT_FENCES may name. */
#define SG_MAX_FENCES	4096

/* From an absolute time of the monotonic clock, ns, to jiffies from now on. */
static unsigned long sg_wait_jiffies(u64 until)
{
	s64 left = ktime_to_ns(ktime_sub(ns_to_ktime(until), ktime_get()));
	unsigned long jiffies_left;

	/* A negative time is in the far future: user space means "for ever". */
	if ((s64)until < 0)
		return MAX_SCHEDULE_TIMEOUT;
	if (left <= 0)
		return 0;
	jiffies_left = nsecs_to_jiffies(left);
	return min(jiffies_left, MAX_SCHEDULE_TIMEOUT - 1UL);
}

/* NULL: ended long ago. */
static struct dma_fence *sg_fence_of(struct sg_file *file, const struct drm_amdgpu_fence *user)
{
	struct sg_ctx *ctx = sg_ctx_get(file, user->ctx_id);
	struct dma_fence *fence;
	struct sg_entity *line;
	int err;

	if (!ctx)
		return ERR_PTR(-EINVAL);
	err = sg_ctx_line(ctx, user->ip_type, user->ip_instance, user->ring, &line);
	fence = err ? ERR_PTR(err) : sg_ctx_fence(line, user->seq_no);
	sg_ctx_put(ctx);
	return fence;
}

/* More than 0: signalled; 0: not in time. Consumes the fence. */
static long sg_fence_wait(struct dma_fence *fence, unsigned long timeout)
{
	long left;

	if (!fence)
		return 1;
	left = dma_fence_wait_timeout(fence, true, timeout);
	if (left > 0 && fence->error)
		left = fence->error;
	dma_fence_put(fence);
	return left;
}

int sg_wait_cs_ioctl(struct drm_device *drm, void *data, struct drm_file *drm_file)
{
	union drm_amdgpu_wait_cs *args = data;
	struct drm_amdgpu_fence user = {
		.ctx_id = args->in.ctx_id,
		.ip_type = args->in.ip_type,
		.ip_instance = args->in.ip_instance,
		.ring = args->in.ring,
		.seq_no = args->in.handle,
	};
	struct dma_fence *fence = sg_fence_of(sg_file_of(drm_file), &user);
	long left;

	if (IS_ERR(fence))
		return PTR_ERR(fence);
	left = sg_fence_wait(fence, sg_wait_jiffies(args->in.timeout));
	if (left < 0)
		return left;
	memset(args, 0, sizeof(*args));
	args->out.status = !left;
	return 0;
}

static int sg_wait_all(struct sg_file *file, const struct drm_amdgpu_fence *users, u32 count,
		       u64 until, union drm_amdgpu_wait_fences *args)
{
	long left = 1;
	u32 i;

	for (i = 0; i < count && left; i++) {
		struct dma_fence *fence = sg_fence_of(file, &users[i]);

		if (IS_ERR(fence))
			return PTR_ERR(fence);
		left = sg_fence_wait(fence, sg_wait_jiffies(until));
		if (left < 0)
			return left;
	}
	memset(args, 0, sizeof(*args));
	args->out.status = left > 0;
	return 0;
}

static int sg_wait_any(struct sg_file *file, const struct drm_amdgpu_fence *users, u32 count,
		       u64 until, union drm_amdgpu_wait_fences *args)
{
	struct dma_fence **fences = kcalloc(count, sizeof(*fences), GFP_KERNEL);
	u32 i, had = 0, first = U32_MAX;
	long left = 1;

	if (!fences)
		return -ENOMEM;
	for (; had < count && left > 0; had++) {
		fences[had] = sg_fence_of(file, &users[had]);
		if (!fences[had]) {
			first = had;	/* ended long ago */
			break;
		}
		if (IS_ERR(fences[had])) {
			left = PTR_ERR(fences[had]);
			break;
		}
	}
	if (left > 0 && first == U32_MAX) {
		left = dma_fence_wait_any_timeout(fences, count, true, sg_wait_jiffies(until), &first);
		if (left > 0 && first < count && fences[first]->error)
			left = fences[first]->error;
	}
	for (i = 0; i < had; i++)
		dma_fence_put(fences[i]);
	kfree(fences);
	if (left < 0)
		return left;
	memset(args, 0, sizeof(*args));
	args->out.status = left > 0;
	args->out.first_signaled = first;
	return 0;
}

int sg_wait_fences_ioctl(struct drm_device *drm, void *data, struct drm_file *drm_file)
{
	union drm_amdgpu_wait_fences *args = data;
	struct drm_amdgpu_wait_fences_in in = args->in;
	struct sg_file *file = sg_file_of(drm_file);
	struct drm_amdgpu_fence *users;
	int err;

	if (!in.fence_count)
		return -EINVAL;
	if (in.fence_count > SG_MAX_FENCES)
		return -ENOMEM;
	users = vmemdup_array_user(u64_to_user_ptr(in.fences), in.fence_count, sizeof(*users));
	if (IS_ERR(users))
		return PTR_ERR(users);
	err = in.wait_all ? sg_wait_all(file, users, in.fence_count, in.timeout_ns, args) :
			    sg_wait_any(file, users, in.fence_count, in.timeout_ns, args);
	kvfree(users);
	return err;
}

static int sg_fence_to_syncobj(struct drm_file *file, struct dma_fence *fence, bool fd, u32 *out)
{
	struct drm_syncobj *syncobj;
	int err = drm_syncobj_create(&syncobj, 0, fence);

	if (err)
		return err;
	err = fd ? drm_syncobj_get_fd(syncobj, (int *)out) :
		   drm_syncobj_get_handle(file, syncobj, out);
	drm_syncobj_put(syncobj);
	return err;
}

static int sg_fence_to_sync_file(struct dma_fence *fence, u32 *out)
{
	struct sync_file *sync_file;
	int fd = get_unused_fd_flags(O_CLOEXEC);

	if (fd < 0)
		return fd;
	sync_file = sync_file_create(fence);
	if (!sync_file) {
		put_unused_fd(fd);
		return -ENOMEM;
	}
	fd_install(fd, sync_file->file);
	*out = fd;
	return 0;
}

int sg_fence_to_handle_ioctl(struct drm_device *drm, void *data, struct drm_file *drm_file)
{
	union drm_amdgpu_fence_to_handle *args = data;
	struct dma_fence *fence = sg_fence_of(sg_file_of(drm_file), &args->in.fence);
	u32 what = args->in.what;
	int err;

	if (IS_ERR(fence))
		return PTR_ERR(fence);
	if (!fence)
		fence = dma_fence_get_stub();
	switch (what) {
	case AMDGPU_FENCE_TO_HANDLE_GET_SYNCOBJ:
		err = sg_fence_to_syncobj(drm_file, fence, false, &args->out.handle);
		break;
	case AMDGPU_FENCE_TO_HANDLE_GET_SYNCOBJ_FD:
		err = sg_fence_to_syncobj(drm_file, fence, true, &args->out.handle);
		break;
	case AMDGPU_FENCE_TO_HANDLE_GET_SYNC_FILE_FD:
		err = sg_fence_to_sync_file(fence, &args->out.handle);
		break;
	default:
		err = -EINVAL;
	}
	dma_fence_put(fence);
	return err;
}
