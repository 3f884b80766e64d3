/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* SMI events beyond those in softgpu.h. */
#ifndef SOFTGPU_SMI_H
#define SOFTGPU_SMI_H

#include <linux/list.h>
#include <linux/spinlock.h>

struct sg_device;
struct sg_process;

/* The clients of one GPU. */
struct sg_smi {
	spinlock_t lock;		/* N */
	struct list_head clients;
};

void sg_smi_init(struct sg_smi *smi);
void sg_smi_vm_fault(struct sg_device *dev, struct sg_process *p);

#endif
