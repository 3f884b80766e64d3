/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* Lists of BOs that a submission uses. */
#ifndef SOFTGPU_BO_LIST_H
#define SOFTGPU_BO_LIST_H

#include <linux/kref.h>
#include <uapi/drm/amdgpu_drm.h>

struct sg_bo;
struct sg_file;

struct sg_bo_list {
	struct kref ref;
	unsigned int count;
	struct sg_bo *bos[] __counted_by(count);
};

/* From user space's array of handles. ERR_PTR: -ENOENT names no BO, -EPERM another process's memory. */
struct sg_bo_list *sg_bo_list_create(struct sg_file *file, const struct drm_amdgpu_bo_list_in *in);
/* ERR_PTR(-ENOENT): no such list. */
struct sg_bo_list *sg_bo_list_get(struct sg_file *file, u32 handle);
void sg_bo_list_put(struct sg_bo_list *list);

#endif
