/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* The judge: violations by GPUs and their users, counted and listed in debugfs. */
#ifndef SOFTGPU_JUDGE_H
#define SOFTGPU_JUDGE_H

#include <linux/atomic.h>
#include <linux/types.h>

struct sg_device;

/* Longest packet name, "sdma:18446744073709551615:copy" and its like. */
#define SG_PACKET_NAME	48

enum sg_violation {
	SG_GPU_READ_NOT_RESTORED,	/* memory between RESTORE and its load was read */
	SG_CPU_READ_NOT_RESTORED,	/* the same, through a CPU mapping */
	SG_QUEUE_RAN_GATED,		/* evicted, percent 0 or paused, and ran */
	SG_STALE_USERPTR,		/* host pages that the process has unmapped */
	SG_RESUME_REPEATED,		/* CRIU_OP RESUME twice for one RESTORE */
	SG_UNPAUSE_OUT_OF_TURN,		/* PROCESS_INFO and UNPAUSE did not alternate */
	SG_LEAK,			/* a BO, an fd or a queue outlived its process */
	SG_SDMA_OVERRUN,		/* a packet's last byte is one too many */
	SG_SAVE_AREA_STALE,		/* a queue was restored with another wave's save area */
	SG_VIOLATIONS
};

/* Objects that are counted while they live: those left at the end have leaked. */
enum sg_thing {
	SG_PROCESSES,
	SG_BOS,
	SG_PAGES,
	SG_QUEUES,
	SG_PARTIAL_QUEUES,		/* of an image without all XCCs */
	SG_EVENTS,
	SG_SMI_CLIENTS,
	SG_DRM_FILES,
	SG_CONTEXTS,
	SG_BO_LISTS,
	SG_JOBS,
	SG_THINGS
};

extern atomic_long_t sg_alive[SG_THINGS];

static inline void sg_born(enum sg_thing thing)
{
	atomic_long_inc(&sg_alive[thing]);
}

static inline void sg_died(enum sg_thing thing)
{
	atomic_long_dec(&sg_alive[thing]);
}

/* `dev` may be NULL. Never sleeps: callable under spinlocks and in notifiers. */
__printf(6, 7)
void sg_violate(enum sg_violation kind, pid_t pid, struct sg_device *dev, u64 va,
		const char *packet, const char *format, ...);

/* Makes and removes the folder "softgpu" in debugfs. */
void sg_judge_init(void);
void sg_judge_exit(void);

#endif
