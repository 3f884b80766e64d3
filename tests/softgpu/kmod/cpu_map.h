/* SPDX-License-Identifier: GPL-2.0 OR MIT */
#ifndef SOFTGPU_CPU_MAP_H
#define SOFTGPU_CPU_MAP_H

#include <linux/mm.h>

struct drm_gem_object;

extern const struct vm_operations_struct sg_cpu_vm_ops;
int sg_cpu_mmap(struct drm_gem_object *obj, struct vm_area_struct *vma);

#endif
