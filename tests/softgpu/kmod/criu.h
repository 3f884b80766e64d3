/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* CRIU_OP: its five operations, and the layout of its private data. */
#ifndef SOFTGPU_CRIU_H
#define SOFTGPU_CRIU_H

#include "softgpu.h"

#define SG_CRIU_VERSION		1
#define SG_CRIU_MAX_GPUS	64

enum sg_criu_object {
	SG_CRIU_QUEUE,
	SG_CRIU_EVENT,
	SG_CRIU_SVM,
};

struct sg_criu_process_priv {
	u32 version;
	u32 xnack_mode;
};

struct sg_criu_device_priv {
	u64 reserved;
};

struct sg_criu_bo_priv {
	u64 user_addr;
	u32 idr_handle;
	u32 mapped_gpuids[SG_CRIU_MAX_GPUS];	/* ends with a zero */
};

static_assert(sizeof(struct sg_criu_process_priv) == 8);
static_assert(sizeof(struct sg_criu_device_priv) == 8);
static_assert(sizeof(struct sg_criu_bo_priv) == 272);
static_assert(offsetof(struct sg_criu_bo_priv, mapped_gpuids) == 12);

int sg_criu_ioctl(struct sg_process *p, struct kfd_ioctl_criu_args *args);

/* criu_dump.c, both under p->lock with queues evicted */
struct sg_criu_counts {
	u32 devices, bos, objects;
	u64 bytes;		/* of private data */
};
void sg_criu_count(struct sg_process *p, struct sg_criu_counts *counts);
int sg_criu_checkpoint(struct sg_process *p, struct kfd_ioctl_criu_args *args);
/* criu_restore.c, under p->lock */
int sg_criu_restore(struct sg_process *p, struct kfd_ioctl_criu_args *args);

/* dma-buf descriptors, installed in the caller's table when everything has succeeded. */
struct sg_criu_fd {
	int fd;
	struct file *file;
};
int sg_criu_fd_reserve(struct sg_criu_fd *slot, struct sg_mem *mem);
void sg_criu_fds_install(struct sg_criu_fd *slots, u32 count);
void sg_criu_fds_drop(struct sg_criu_fd *slots, u32 count);

#endif
