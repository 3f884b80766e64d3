/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* Kernel rings: SDMA engines that execute submitted jobs. */
#ifndef SOFTGPU_RING_H
#define SOFTGPU_RING_H

#include <linux/atomic.h>
#include <linux/dma-fence.h>
#include <linux/ktime.h>
#include <linux/list.h>
#include <linux/sched.h>
#include <linux/spinlock.h>
#include <linux/wait.h>

struct sg_bo;
struct sg_entity;
struct sg_file;
struct task_struct;

/* An engine: a thread, and its jobs. */
struct sg_ring {
	struct task_struct *worker;
	wait_queue_head_t wake;
	spinlock_t lock;
	struct list_head jobs;		/* in order of submission; the running one is in it */
	unsigned int length;		/* of that list: where the next entity goes */
	ktime_t busy_until;		/* copies have a bandwidth */
};

/* What a job is waiting for. */
struct sg_dep {
	struct dma_fence_cb cb;
	struct dma_fence *fence;
	struct sg_job *job;
};

struct sg_ib {
	u64 va;
	u32 bytes;
};

struct sg_job {
	struct list_head link;		/* ring->jobs */
	struct sg_file *file;
	struct sg_entity *entity;
	struct sg_ring *ring;
	struct dma_fence *fence;
	pid_t pid;
	char comm[TASK_COMM_LEN];	/* of the first thread of the process that submitted it */
	u64 sequence;			/* written to the user fence */
	u64 *user_fence;		/* in the kernel's mapping of `fence_bo`; NULL: none */
	struct sg_bo *fence_bo;
	void *fence_map;
	struct sg_bo **bos;		/* of the BO list: kept alive */
	unsigned int bo_count;
	struct sg_dep *deps;
	unsigned int dep_count;
	atomic_t missing;		/* deps that are not signalled, and 1 until it is queued */
	bool running;
	bool killed;			/* its file is being closed: stop */
	unsigned int ib_count;
	struct sg_ib ibs[];
};

struct dma_fence *sg_fence_create(u64 context, u64 sequence, void *owner);
/* The VM that submitted this fence's job, if it is one of ours. */
void *sg_fence_owner(struct dma_fence *fence);

/* Takes the job; its fence is signalled whatever happens. */
void sg_ring_push(struct sg_job *job);
/* How long a file that is closed waits for its jobs. */
#define SG_FLUSH_MS	1000

/* Ends all jobs of a file; they get that time. */
void sg_rings_flush(struct sg_file *file);
void sg_job_free(struct sg_job *job);

/* Until when an engine is busy, by the parameters, if it was so until `from`: with bytes, with a submission. */
ktime_t sg_copied_until(ktime_t from, u64 bytes);
ktime_t sg_submitted_until(ktime_t from);

#endif
