/* SPDX-License-Identifier: GPL-2.0 OR MIT */
#ifndef SOFTGPU_CHARDEV_H
#define SOFTGPU_CHARDEV_H

#include "softgpu.h"

struct device;
struct file;
struct vm_area_struct;

/* /dev/kfd */
int sg_chardev_init(void);
void sg_chardev_exit(void);
struct device *sg_chardev_device(void);
struct kobject *sg_chardev_proc(void);	/* the folder of processes, or NULL */

/* kfd_mmap.c: the meaning of an offset of /dev/kfd. */
#define SG_MMAP_TYPE_SHIFT	62
#define SG_MMAP_DOORBELL	(3ULL << SG_MMAP_TYPE_SHIFT)
#define SG_MMAP_EVENTS		(2ULL << SG_MMAP_TYPE_SHIFT)
#define SG_MMAP_RESERVED	(1ULL << SG_MMAP_TYPE_SHIFT)
#define SG_MMAP_MMIO		0ULL
#define SG_MMAP_GPU_SHIFT	46

static inline u64 sg_mmap_offset(u64 type, u32 gpu_id)
{
	return type | (u64)gpu_id << SG_MMAP_GPU_SHIFT;
}

int sg_kfd_mmap(struct file *filp, struct vm_area_struct *vma);

/* ioctls.c: the small ones. */
typedef int (*sg_ioctl_fn)(struct file *filp, struct sg_process *p, void *data);

int sg_ioctl_version(struct file *filp, struct sg_process *p, void *data);
int sg_ioctl_memory_policy(struct file *filp, struct sg_process *p, void *data);
int sg_ioctl_clocks(struct file *filp, struct sg_process *p, void *data);
int sg_ioctl_apertures(struct file *filp, struct sg_process *p, void *data);
int sg_ioctl_apertures_new(struct file *filp, struct sg_process *p, void *data);
int sg_ioctl_trap_handler(struct file *filp, struct sg_process *p, void *data);
int sg_ioctl_scratch(struct file *filp, struct sg_process *p, void *data);
int sg_ioctl_tile_config(struct file *filp, struct sg_process *p, void *data);
int sg_ioctl_acquire_vm(struct file *filp, struct sg_process *p, void *data);
int sg_ioctl_runtime_enable(struct file *filp, struct sg_process *p, void *data);

#endif
