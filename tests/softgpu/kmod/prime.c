// SPDX-License-Identifier: GPL-2.0 OR MIT
/* dma-buf: BOs that leave a GPU's file, and memory that is imported. */
#include <drm/drm_drv.h>
#include <drm/drm_prime.h>
#include <linux/dma-buf.h>
#include <linux/iosys-map.h>
#include <linux/slab.h>

#include "compat.h"
#include "gem.h"
#include "leak.h"
#include "prime.h"

MODULE_IMPORT_NS(SG_NAMESPACE(DMA_BUF));

/* Other drivers cannot have this memory: no bus reaches it. */
static int sg_dmabuf_attach(struct dma_buf *dmabuf, struct dma_buf_attachment *attachment)
{
	return -EOPNOTSUPP;
}

static void sg_dmabuf_release(struct dma_buf *dmabuf)
{
	sg_leak_released(sg_bo_of(dmabuf->priv));
	drm_gem_dmabuf_release(dmabuf);
}

static const struct dma_buf_ops sg_dmabuf_ops = {
	.attach = sg_dmabuf_attach,
	.map_dma_buf = drm_gem_map_dma_buf,
	.unmap_dma_buf = drm_gem_unmap_dma_buf,
	.release = sg_dmabuf_release,
	.mmap = drm_gem_dmabuf_mmap,
};

struct sg_bo *sg_prime_bo(struct dma_buf *dmabuf)
{
	return dmabuf->ops == &sg_dmabuf_ops ? sg_bo_of(dmabuf->priv) : NULL;
}

struct dma_buf *sg_prime_export(struct drm_gem_object *obj, int flags)
{
	struct sg_bo *bo = sg_bo_of(obj);
	struct dma_buf *dmabuf;
	struct dma_buf_export_info info = {
		.exp_name = obj->dev->driver->name,
		.owner = obj->dev->driver->fops->owner,
		.ops = &sg_dmabuf_ops,
		.size = obj->size,
		.flags = flags,
		.priv = obj,
		.resv = obj->resv,
	};

	if (bo->store == SG_STORE_HOST || bo->flags & AMDGPU_GEM_CREATE_VM_ALWAYS_VALID)
		return ERR_PTR(-EPERM);
	dmabuf = drm_gem_dmabuf_export(obj->dev, &info);
	if (!IS_ERR(dmabuf))
		sg_leak_exported(bo);
	return dmabuf;
}

struct dma_buf *sg_prime_export_bo(struct sg_bo *bo)
{
	struct drm_gem_object *obj = &bo->base;
	struct dma_buf *dmabuf;

	mutex_lock(&obj->dev->object_name_lock);
	dmabuf = obj->dma_buf;
	if (dmabuf)
		get_dma_buf(dmabuf);
	else
		dmabuf = sg_prime_export(obj, DRM_CLOEXEC | DRM_RDWR);
	mutex_unlock(&obj->dev->object_name_lock);
	return dmabuf;
}

/* Memory of another software GPU: reached over the link, it stays where it is. */
static struct sg_bo *sg_import_peer(struct sg_device *dev, struct sg_bo *origin)
{
	struct sg_bo *bo = sg_bo_create_store(dev, SG_STORE_ALIAS, origin->base.size, AMDGPU_GEM_DOMAIN_GTT, 0);

	if (IS_ERR(bo))
		return bo;
	sg_bo_get(origin);
	bo->origin = origin;
	return bo;
}

/* Memory of another driver, udmabuf's for one. */
static struct sg_bo *sg_import_foreign(struct sg_device *dev, struct dma_buf *dmabuf)
{
	struct iosys_map map;
	struct sg_bo *bo;
	int err = dma_buf_vmap_unlocked(dmabuf, &map);

	if (err)
		return ERR_PTR(err);
	if (map.is_iomem) {
		dma_buf_vunmap_unlocked(dmabuf, &map);
		return ERR_PTR(-EOPNOTSUPP);
	}
	bo = sg_bo_create_store(dev, SG_STORE_FOREIGN, dmabuf->size, AMDGPU_GEM_DOMAIN_GTT, 0);
	if (IS_ERR(bo)) {
		dma_buf_vunmap_unlocked(dmabuf, &map);
		return bo;
	}
	get_dma_buf(dmabuf);
	bo->foreign = dmabuf;
	bo->vmap = map.vaddr;
	return bo;
}

void sg_prime_release(struct sg_bo *bo)
{
	struct iosys_map map = IOSYS_MAP_INIT_VADDR(bo->vmap);

	dma_buf_vunmap_unlocked(bo->foreign, &map);
	dma_buf_put(bo->foreign);
}

struct sg_bo *sg_prime_import_bo(struct sg_device *dev, struct dma_buf *dmabuf)
{
	struct sg_bo *bo = sg_prime_bo(dmabuf);

	if (!bo)
		return sg_import_foreign(dev, dmabuf);
	if (bo->dev != dev)
		return sg_import_peer(dev, bo);
	sg_bo_get(bo);
	return bo;
}

struct drm_gem_object *sg_prime_import(struct drm_device *drm, struct dma_buf *dmabuf)
{
	struct sg_bo *bo = sg_prime_import_bo(sg_device_of(drm), dmabuf);

	return IS_ERR(bo) ? ERR_CAST(bo) : &bo->base;
}
