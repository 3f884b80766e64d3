/* SPDX-License-Identifier: GPL-2.0 OR MIT */
#ifndef SOFTGPU_DEVICE_H
#define SOFTGPU_DEVICE_H

#include "softgpu.h"

/* All GPUs that the parameters ask for. */
int sg_devices_create(const struct sg_chip *chip);
void sg_devices_destroy(void);

/* An error if this process's device cgroup keeps the GPU's render node from it. */
int sg_device_hidden(const struct sg_device *dev);

/* The GPU's clock: 100 MHz, as its timestamps count. */
u64 sg_device_clock(void);

/* drm.c */
struct sg_device *sg_drm_alloc(struct device *parent);
int sg_drm_register(struct sg_device *dev);

#endif
