/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* The compute kernels that are built in, and the state of one. */
#ifndef SOFTGPU_KERNELS_H
#define SOFTGPU_KERNELS_H

#include <linux/types.h>

struct sg_agent;

/* The first 16 bytes of a code object: this, then the kernel's id and a zero. */
#define SG_CODE_MAGIC	0x31304e52454b4753ULL	/* "SGKERN01" */

enum sg_kernel {
	SG_KERNEL_FILL32 = 1,
	SG_KERNEL_COPY,
	SG_KERNEL_AXPY32,
	SG_KERNEL_MATVEC,
	SG_KERNEL_HASH,
	SG_KERNEL_CHASE,
	SG_KERNEL_SPIN,
};

#define SG_KERNEL_ARGS	5

/*
 * An unfinished dispatch. It is also, byte for byte, what is written to the
 * context save area when the queue is evicted.
 */
struct sg_wave {
	u64 magic;
	u64 sequence;			/* of the save; the MQD has the same */
	u64 packet;			/* index of the dispatch packet */
	u64 kernel;
	u64 args[SG_KERNEL_ARGS];
	u64 at;				/* how far, in the kernel's own unit */
	u64 value;			/* its sum so far */
	u64 check;			/* of all words before */
};

#define SG_WAVE_MAGIC	0x3130455641574753ULL	/* "SGWAVE01" */

int sg_kernel_args(u64 kernel);
int sg_kernel_step(struct sg_agent *agent, struct sg_wave *wave);
const char *sg_kernel_name(u64 kernel);
void sg_wave_seal(struct sg_wave *wave);
bool sg_wave_intact(const struct sg_wave *wave);

#endif
