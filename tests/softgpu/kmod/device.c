// SPDX-License-Identifier: GPL-2.0 OR MIT
/* The GPUs: platform devices with a DRM device each. */
#include <drm/drm_drv.h>
#include <drm/drm_vma_manager.h>
#include <linux/device_cgroup.h>
#include <linux/gfp.h>
#include <linux/hash.h>
#include <linux/ktime.h>
#include <linux/platform_device.h>
#include <linux/random.h>

#include "device.h"

struct sg_device *sg_devices[SG_MAX_GPUS];
unsigned int sg_device_count;

static struct platform_device *sg_platform[SG_MAX_GPUS];

/* System memory that GPUs may use: amdgpu's default is half of it, and at least 3 GiB. */
#define SG_GTT_BYTES	(16ULL * SZ_1G)
#define SG_SMALL_BAR	SZ_256M

struct sg_device *sg_device_by_id(u32 gpu_id)
{
	unsigned int i;

	for (i = 0; i < sg_device_count; i++)
		if (sg_devices[i]->gpu_id == gpu_id)
			return sg_devices[i];
	return NULL;
}

u64 sg_device_clock(void)
{
	return div_u64(ktime_get_ns(), 10);
}

/* Real ids are 16 bit of a hash; another seed makes another machine. */
static u32 sg_gpu_id(unsigned int index)
{
	return (hash_32(sg_params.seed * SG_MAX_GPUS + index + 1, 11) << 4 | index) + 1;
}

/* KFD shows a GPU to processes that may open its render node only. */
int sg_device_hidden(const struct sg_device *dev)
{
	dev_t node = dev->drm.render->kdev->devt;

	return devcgroup_check_permission(DEVCG_DEV_CHAR, MAJOR(node), MINOR(node), DEVCG_ACC_READ | DEVCG_ACC_WRITE);
}

static int sg_device_pages(struct sg_device *dev)
{
	dev->mmio = alloc_page(GFP_KERNEL | __GFP_ZERO);
	dev->sink = alloc_page(GFP_KERNEL | __GFP_ZERO);
	return dev->mmio && dev->sink ? 0 : -ENOMEM;
}

static void sg_device_shape(struct sg_device *dev, unsigned int index, const struct sg_chip *chip)
{
	dev->index = index;
	dev->chip = chip;
	dev->gpu_id = sg_gpu_id(sg_params.reverse ? sg_params.gpus - 1 - index : index);
	dev->vram_bytes = (u64)sg_params.vram_mib * SZ_1M;
	dev->visible_bytes = sg_params.small_bar ? min_t(u64, dev->vram_bytes, SG_SMALL_BAR) : dev->vram_bytes;
	dev->gtt_bytes = SG_GTT_BYTES;
	dev->unique_id = 0x5067000000000000ULL + dev->gpu_id;
}

static int sg_device_add(unsigned int index, const struct sg_chip *chip)
{
	struct platform_device *platform;
	struct sg_device *dev;
	int err;

	platform = platform_device_register_simple("softgpu", index, NULL, 0);
	if (IS_ERR(platform))
		return PTR_ERR(platform);
	dev = sg_drm_alloc(&platform->dev);
	if (IS_ERR(dev)) {
		platform_device_unregister(platform);
		return PTR_ERR(dev);
	}
	sg_platform[index] = platform;
	sg_devices[index] = dev;
	sg_device_count = index + 1;
	dev->parent = &platform->dev;
	sg_device_shape(dev, index, chip);
	err = sg_device_pages(dev);
	if (!err)
		err = sg_exec_device_init(dev);
	if (!err)
		err = sg_drm_register(dev);
	return err;
}

static void sg_device_remove(unsigned int index)
{
	struct sg_device *dev = sg_devices[index];

	if (dev->drm.registered)
		drm_dev_unregister(&dev->drm);
	if (dev->exec)
		sg_exec_device_exit(dev);
	if (dev->mmio)
		__free_page(dev->mmio);
	if (dev->sink)
		__free_page(dev->sink);
	drm_dev_put(&dev->drm);
	platform_device_unregister(sg_platform[index]);
}

void sg_devices_destroy(void)
{
	while (sg_device_count)
		sg_device_remove(--sg_device_count);
}

int sg_devices_create(const struct sg_chip *chip)
{
	unsigned int i;
	int err = 0;

	for (i = 0; i < sg_params.gpus && !err; i++)
		err = sg_device_add(i, chip);
	if (err)
		sg_devices_destroy();
	return err;
}
