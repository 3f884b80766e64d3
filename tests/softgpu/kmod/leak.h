/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* Memory that outlives its processes. */
#ifndef SOFTGPU_LEAK_H
#define SOFTGPU_LEAK_H

struct sg_bo;
struct sg_mem;

/* A KFD allocation has its BO from now on, until just before it releases it. */
void sg_leak_adopt(struct sg_mem *mem);
void sg_leak_disown(struct sg_mem *mem);
/* A dma-buf of the BO has been made; it is released. */
void sg_leak_exported(struct sg_bo *bo);
void sg_leak_released(struct sg_bo *bo);
/* Nothing is watched afterwards. */
void sg_leak_exit(void);

#endif
