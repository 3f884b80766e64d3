/* SPDX-License-Identifier: GPL-2.0 OR MIT */
#ifndef SOFTGPU_PRIME_H
#define SOFTGPU_PRIME_H

#include "softgpu.h"

struct dma_buf;

/* drm_gem_object_funcs and drm_driver. */
struct dma_buf *sg_prime_export(struct drm_gem_object *obj, int flags);
struct drm_gem_object *sg_prime_import(struct drm_device *drm, struct dma_buf *dmabuf);

/* For KFD: the one dma-buf of a BO, made if it has none. With a reference. */
struct dma_buf *sg_prime_export_bo(struct sg_bo *bo);
/* For KFD: a BO of `dev` that is this dma-buf's memory. With a reference. */
struct sg_bo *sg_prime_import_bo(struct sg_device *dev, struct dma_buf *dmabuf);
/* The software GPU's BO of a dma-buf, or NULL. No reference. */
struct sg_bo *sg_prime_bo(struct dma_buf *dmabuf);
void sg_prime_release(struct sg_bo *bo);

#endif
