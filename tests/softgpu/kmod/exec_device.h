/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* State of execution for every GPU. */
#ifndef SOFTGPU_EXEC_DEVICE_H
#define SOFTGPU_EXEC_DEVICE_H

#include <linux/idr.h>
#include <linux/mutex.h>

#include "ring.h"
#include "smi.h"

#define SG_MAX_RINGS	8U

struct sg_ctx;

struct sg_exec_device {
	struct sg_smi smi;
	struct ida sdma_ids;		/* of user queues on engines for PCIe */
	struct ida xgmi_ids;		/* and on those for links between GPUs */
	unsigned int ring_count;
	struct sg_ring rings[SG_MAX_RINGS];
	atomic_t resets;		/* rings that hung, ever */
	struct mutex pstate_lock;
	struct sg_ctx *pstate_ctx;	/* that has set the stable power state; NULL: none */
	u32 pstate;
};

#endif
