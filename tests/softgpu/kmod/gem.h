/* SPDX-License-Identifier: GPL-2.0 OR MIT */
#ifndef SOFTGPU_GEM_H
#define SOFTGPU_GEM_H

#include <linux/types.h>

#include "softgpu.h"

struct drm_device;
struct drm_file;
struct drm_gem_object;

/* bo.c */
struct sg_bo *sg_bo_create_store(struct sg_device *dev, enum sg_store store, u64 size, u32 domain, u64 flags);

/* gem.c */
void sg_gem_close_object(struct drm_gem_object *obj, struct drm_file *file);
int sg_gem_create_ioctl(struct drm_device *drm, void *data, struct drm_file *file);
int sg_gem_mmap_ioctl(struct drm_device *drm, void *data, struct drm_file *file);
int sg_gem_wait_idle_ioctl(struct drm_device *drm, void *data, struct drm_file *file);
int sg_gem_metadata_ioctl(struct drm_device *drm, void *data, struct drm_file *file);
int sg_gem_op_ioctl(struct drm_device *drm, void *data, struct drm_file *file);
int sg_gem_list_handles_ioctl(struct drm_device *drm, void *data, struct drm_file *file);
/* gem_va.c */
int sg_gem_va_ioctl(struct drm_device *drm, void *data, struct drm_file *file);
/* gem_userptr.c */
int sg_gem_userptr_ioctl(struct drm_device *drm, void *data, struct drm_file *file);
int sg_gem_open_object(struct drm_gem_object *obj, struct drm_file *file);
/* info.c */
int sg_info_ioctl(struct drm_device *drm, void *data, struct drm_file *file);

#endif
