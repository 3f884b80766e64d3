/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* User queues: their properties, and what runs them. */
#ifndef SOFTGPU_QUEUE_H
#define SOFTGPU_QUEUE_H

#include <linux/atomic.h>
#include <linux/bitmap.h>
#include <linux/idr.h>
#include <linux/ktime.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/types.h>
#include <linux/wait.h>

#include "kernels.h"
#include "softgpu.h"

struct sg_agent;
struct task_struct;

#define SG_MAX_QUEUES		1024	/* ids, and doorbells, of a process on a GPU */

/* As the driver numbers them, also in CRIU's private data. */
enum sg_queue_type {
	SG_QUEUE_COMPUTE = 0,
	SG_QUEUE_SDMA = 1,
	SG_QUEUE_SDMA_XGMI = 3,
	SG_QUEUE_SDMA_BY_ENGINE = 4,	/* asked for; becomes one of the two before */
};

enum sg_queue_format {
	SG_QUEUE_PM4 = 0,
	SG_QUEUE_AQL = 1,
};

/* BOs that a queue made by CREATE_QUEUE keeps alive. */
enum sg_queue_buffer {
	SG_BUFFER_WPTR,
	SG_BUFFER_RPTR,
	SG_BUFFER_RING,
	SG_BUFFER_EOP,
	SG_BUFFER_SAVE,
	SG_BUFFERS
};

struct sg_queue_props {
	u32 type;
	u32 format;
	u32 percent;
	u32 priority;
	u64 address;
	u64 size;
	u64 metadata_size;
	u64 read_ptr;
	u64 write_ptr;
	u64 eop_address;
	u32 eop_size;
	u64 save_address;
	u32 save_size;
	u32 ctl_stack_size;
	u32 engine;			/* asked for, with SG_QUEUE_SDMA_BY_ENGINE */
};

/* The outcome of a slice; errors are negative. */
enum sg_run_result {
	SG_RUN_MORE,
	SG_RUN_IDLE,			/* everything up to the write pointer is done */
	SG_RUN_WAIT,			/* for a signal, a poll or a packet's header */
	SG_RUN_GATED,			/* not on the GPU */
};

/* The running side; all but the last five under `lock`, a slice at a time. */
struct sg_run {
	struct mutex lock;		/* N */
	bool gated;			/* evicted and not resumed */
	bool dead;			/* stopped for good by a fault or a bad packet */
	bool partial;			/* its image has not all XCCs: it waits for them for ever */
	bool mapped;			/* on the GPU */
	u64 rptr, wptr;			/* AQL: packets; SDMA: bytes */
	u64 reported;			/* the read pointer in memory */
	bool in_flight;			/* a dispatch is unfinished: `wave` */
	struct sg_wave wave;
	u64 sdma_done;			/* bytes of the unfinished SDMA packet */
	u64 sequence;			/* of the last save */
	u32 *mqd;
	void *ctl_stack;
	u32 ctl_stack_bytes;		/* of one XCC */
	ktime_t not_before;		/* of the next slice: copies have a bandwidth */

	struct task_struct *worker;
	wait_queue_head_t wake;
	atomic_t stoppers;		/* threads that want the lock: the worker yields to them */
	atomic_t kicked;		/* the gate, the doorbell or the queue has changed */
	bool ungated;			/* a test has broken the gate */
};

struct sg_queue {
	struct list_head link;		/* sg_queues.all */
	struct sg_process *process;
	struct sg_pdd *pdd;
	struct kobject *sysfs;
	bool gws;
	u32 id;
	u32 doorbell;
	u32 sdma_id;
	struct sg_queue_props props;	/* changed with the run lock held */
	struct sg_bo *buffers[SG_BUFFERS];
	struct sg_run run;
};

/* Where user space has mapped a GPU's doorbells. */
struct sg_doorbell_map {
	struct mutex lock;		/* inside of the mmap lock */
	struct address_space *mapping;	/* NULL: nowhere */
	pgoff_t pgoff;
	unsigned int vmas;
	bool scattered;			/* in two mappings: stores cannot be noticed by faults */
};

struct sg_queues {
	struct sg_doorbell_map doorbell_maps[SG_MAX_GPUS];
	struct idr ids;			/* under p->lock */
	struct list_head all;		/* changed under p->lock and p->queue_lock */
	unsigned int count[SG_MAX_GPUS];
	DECLARE_BITMAP(doorbells[SG_MAX_GPUS], SG_MAX_QUEUES);
};

static inline bool sg_queue_is_sdma(const struct sg_queue *q)
{
	return q->props.type != SG_QUEUE_COMPUTE;
}

/* The gate, while the run lock is held. */
static inline bool sg_queue_may_run(const struct sg_queue *q)
{
	return !q->run.gated && q->props.percent && q->props.address && q->props.size;
}

/* run.c */
int sg_run_start(struct sg_queue *q);
void sg_run_end(struct sg_queue *q);
void sg_run_kick(struct sg_queue *q);
void sg_run_lock(struct sg_queue *q);	/* and off the GPU; N */
void sg_run_unlock(struct sg_queue *q);

/* queue_id.c: numbers of SDMA engines and doorbells; `exact` from CRIU or NULL */
struct sg_queue_exact {
	u32 sdma_id;
	u32 doorbell;
};
int sg_queue_number(struct sg_queue *q, const struct sg_queue_exact *exact);
void sg_queue_unnumber(struct sg_queue *q);

/* queue_buffer.c */
int sg_queue_take_buffers(struct sg_queue *q);
int sg_queue_take_ring(struct sg_queue *q, u64 address, u64 size);
void sg_queue_drop_buffers(struct sg_queue *q);

/* queue.c: `mqd` and `ctl_stack` from CRIU or NULL */
struct sg_queue_image {
	u32 id;
	struct sg_queue_exact exact;
	const void *mqd;
	const void *ctl_stack;
	u32 ctl_stack_bytes;		/* of all XCCs */
};
int sg_queue_add(struct sg_pdd *pdd, const struct sg_queue_props *props,
		 const struct sg_queue_image *image, struct sg_queue **made);

/* queue_sysfs.c */
void sg_queue_sysfs_add(struct sg_queue *q);
void sg_queue_sysfs_del(struct sg_queue *q);

/* mqd.c */
u32 sg_mqd_bytes(u32 type);		/* of one XCC */
u32 sg_queue_xccs(const struct sg_pdd *pdd);	/* in CRIU's images */
int sg_mqd_alloc(struct sg_queue *q, const struct sg_queue_image *image);
void sg_mqd_free(struct sg_queue *q);
void sg_mqd_store(struct sg_queue *q);
void sg_mqd_load(struct sg_queue *q);
int sg_save_area_reserve(struct sg_queue *q, struct sg_agent *agent);
int sg_save_area_write(struct sg_queue *q);
int sg_save_area_read(struct sg_queue *q, struct sg_agent *agent);

#endif
