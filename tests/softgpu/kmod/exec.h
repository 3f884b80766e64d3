/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * How the GPU accesses memory: through the page tables of a VM, page by page,
 * checked by the judge.
 *
 * Work on the GPU's behalf runs in slices, each under the run lock of its queue
 * or ring. An MMU notifier may wait for that lock, so a slice never sleeps for
 * reclaim, for the mmap lock or for user space. A slice that needs missing
 * memory ends with -EAGAIN, and sg_agent_help() gets it outside.
 */
#ifndef SOFTGPU_EXEC_H
#define SOFTGPU_EXEC_H

#include "softgpu.h"

struct sg_queue;

/* The source of an access, for page tables and for the judge. */
struct sg_agent {
	struct sg_vm *vm;
	struct sg_queue *queue;		/* NULL: a ring, or a queue that is being saved */
	pid_t pid;			/* named in violations */
	char packet[SG_PACKET_NAME];	/* what is being executed */
	bool last_byte;			/* the access is the last byte of a packet */
	u64 fault_va;			/* where the last access failed */
	bool fault_write;
};

/* A part of one page, referenced by the agent. */
struct sg_span {
	u8 *at;
	size_t len;
	size_t offset;			/* in the page */
	bool write;
	struct sg_page_ref ref;
};

/*
 * All return 0, -EFAULT (not mapped, not permitted, missing) or -EAGAIN (not at
 * once). A span is as long as requested or ends with its page.
 */
int sg_span_get(struct sg_agent *agent, u64 va, size_t len, bool write, struct sg_span *span);
int sg_span_get_rw(struct sg_agent *agent, u64 va, size_t len, struct sg_span *span);
void sg_span_put(struct sg_agent *agent, struct sg_span *span);

/* At most *len bytes, both sides within one page; *len becomes how many. */
int sg_span_copy(struct sg_agent *agent, u64 dst, u64 src, size_t *len);
int sg_vm_access(struct sg_agent *agent, u64 va, void *buf, size_t len, bool write);
int sg_vm_add64(struct sg_agent *agent, u64 va, s64 value);

/* An access that the GPU's own alignment rules forbid: -EFAULT. */
int sg_agent_refuse(struct sg_agent *agent, u64 va, bool write);
/* Outside of a slice, after -EAGAIN or -EFAULT: 0 if the access may now succeed. */
int sg_agent_help(struct sg_agent *agent, int err);

/* For every GPU, as modules are loaded and unloaded: not at the same time. */
int sg_access_init(void);
void sg_access_exit(void);

#endif
