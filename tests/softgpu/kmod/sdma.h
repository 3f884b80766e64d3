/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* SDMA packets, from a user queue's ring or from an indirect buffer. */
#ifndef SOFTGPU_SDMA_H
#define SOFTGPU_SDMA_H

#include <linux/types.h>

struct sg_agent;
struct sg_process;

/* A stream of packets, and how far it has been executed. */
struct sg_sdma {
	struct sg_agent *agent;
	u64 base;		/* GPU address of the ring or the indirect buffer */
	u64 ring;		/* bytes of the ring, a power of two; 0: no ring */
	u64 at;			/* bytes executed, whole packets */
	u64 end;		/* bytes to execute */
	u64 done;		/* of the packet at hand: bytes copied or filled */
	u64 moved;		/* all bytes moved by this call: what bandwidth is made of */
	struct sg_process *process;	/* of a user queue: traps raise its events; NULL: a ring */
};

enum sg_sdma_result {
	SG_SDMA_MORE,		/* a packet or a part of one was executed */
	SG_SDMA_IDLE,		/* everything was executed */
	SG_SDMA_WAIT,		/* a poll's condition is not met yet */
	SG_SDMA_HANG,		/* a packet that this engine does not have */
};

int sg_sdma_step(struct sg_sdma *sdma);

#endif
