// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The saved state of an evicted queue: the MQD, the control stack (both in the
 * kernel, dumped and restored by CRIU_OP) and, if a dispatch is unfinished, the
 * wave in the context save area (user memory).
 *
 * All three carry the number of the save. A restored queue checks that they
 * agree: it finds a save area that was not restored, or restored from another
 * moment.
 */
#include <linux/slab.h>
#include <linux/string.h>

#include "exec.h"
#include "queue.h"

#define SG_MQD_COMPUTE_BYTES	2048	/* struct v9_mqd, struct v11_compute_mqd */
#define SG_MQD_SDMA_BYTES	512	/* struct v9_sdma_mqd, struct v11_sdma_mqd */

/* Dwords that a compute MQD has where the hardware has them. */
#define SG_MQD_ACTIVE		130
#define SG_MQD_BASE		136
#define SG_MQD_RPTR		138
#define SG_MQD_DOORBELL		143
#define SG_MQD_SAVE_BASE	171
#define SG_MQD_CTL_STACK_SIZE	175
#define SG_MQD_SAVE_SIZE	177
#define SG_MQD_WPTR		182
/* The same of an SDMA MQD. */
#define SG_SDMA_MQD_BASE	1
#define SG_SDMA_MQD_RPTR	3
#define SG_SDMA_MQD_WPTR	5
/* Where our own words begin, in parts that the hardware does not use. */
#define SG_MQD_OWN		384
#define SG_SDMA_MQD_OWN		64

#define SG_MQD_MAGIC		0x3130444d51474753ULL

/* State that has no place in the dwords above. */
struct sg_mqd_own {
	u64 magic;
	u64 sequence;
	u64 in_flight;
	u64 rptr;
	u64 sdma_done;
	u64 reported;
};

u32 sg_mqd_bytes(u32 type)
{
	return type == SG_QUEUE_COMPUTE ? SG_MQD_COMPUTE_BYTES : SG_MQD_SDMA_BYTES;
}

/* Kernels before 7.x dump the first XCC only, whatever the chip has. */
u32 sg_queue_xccs(const struct sg_pdd *pdd)
{
	return SG_MODERN ? pdd->dev->chip->xccs : 1;
}

static struct sg_mqd_own *sg_mqd_own(struct sg_queue *q)
{
	return (void *)(q->run.mqd + (sg_queue_is_sdma(q) ? SG_SDMA_MQD_OWN : SG_MQD_OWN));
}

int sg_mqd_alloc(struct sg_queue *q, const struct sg_queue_image *image)
{
	struct sg_run *run = &q->run;

	if (!sg_queue_is_sdma(q))
		run->ctl_stack_bytes = image ? image->ctl_stack_bytes / sg_queue_xccs(q->pdd) :
					       q->props.ctl_stack_size;
	run->mqd = kzalloc(sg_mqd_bytes(q->props.type), GFP_KERNEL_ACCOUNT);
	run->ctl_stack = kvzalloc(run->ctl_stack_bytes ?: 1, GFP_KERNEL_ACCOUNT);
	if (!run->mqd || !run->ctl_stack) {
		sg_mqd_free(q);
		return -ENOMEM;
	}
	if (!image) {
		/* No two saves of any queues have the same number. */
		run->sequence = ktime_get_real_ns() << 8;
		sg_mqd_store(q);
		return 0;
	}
	if (!sg_queue_is_sdma(q) && sg_queue_xccs(q->pdd) < q->pdd->dev->chip->xccs) {
		run->partial = true;
		sg_born(SG_PARTIAL_QUEUES);
	}
	memcpy(run->mqd, image->mqd, sg_mqd_bytes(q->props.type));
	memcpy(run->ctl_stack, image->ctl_stack, run->ctl_stack_bytes);
	if (!sg_queue_is_sdma(q))
		run->mqd[SG_MQD_ACTIVE] = 0;
	return 0;
}

void sg_mqd_free(struct sg_queue *q)
{
	if (q->run.partial)
		sg_died(SG_PARTIAL_QUEUES);
	q->run.partial = false;
	kfree(q->run.mqd);
	kvfree(q->run.ctl_stack);
	q->run.mqd = NULL;
	q->run.ctl_stack = NULL;
}

static void sg_put64(u32 *dwords, u64 value)
{
	dwords[0] = lower_32_bits(value);
	dwords[1] = upper_32_bits(value);
}

void sg_mqd_store(struct sg_queue *q)
{
	struct sg_run *run = &q->run;
	u32 *mqd = run->mqd;

	*sg_mqd_own(q) = (struct sg_mqd_own) {
		.magic = SG_MQD_MAGIC,
		.sequence = run->sequence,
		.in_flight = run->in_flight,
		.rptr = run->rptr,
		.sdma_done = run->sdma_done,
		.reported = run->reported,
	};
	if (sg_queue_is_sdma(q)) {
		sg_put64(mqd + SG_SDMA_MQD_BASE, q->props.address >> 8);
		sg_put64(mqd + SG_SDMA_MQD_RPTR, run->rptr);
		sg_put64(mqd + SG_SDMA_MQD_WPTR, run->wptr);
		return;
	}
	sg_put64(mqd + SG_MQD_BASE, q->props.address >> 8);
	mqd[SG_MQD_RPTR] = run->rptr;
	mqd[SG_MQD_DOORBELL] = q->doorbell << 2;
	sg_put64(mqd + SG_MQD_SAVE_BASE, q->props.save_address);
	mqd[SG_MQD_CTL_STACK_SIZE] = run->ctl_stack_bytes;
	mqd[SG_MQD_SAVE_SIZE] = q->props.save_size;
	sg_put64(mqd + SG_MQD_WPTR, run->wptr);
	if (run->ctl_stack_bytes >= sizeof(u64))
		memcpy(run->ctl_stack, &run->sequence, sizeof(u64));
}

/* What is wrong with a dumped MQD; NULL: nothing. */
static const char *sg_mqd_fault(struct sg_queue *q, const struct sg_mqd_own *own)
{
	u64 stacked = own->sequence;

	if (own->magic != SG_MQD_MAGIC)
		return "the MQD is not one that a software GPU has written";
	if (q->run.ctl_stack_bytes >= sizeof(u64))
		memcpy(&stacked, q->run.ctl_stack, sizeof(u64));
	if (stacked != own->sequence)
		return "the control stack is of another save than the MQD";
	return NULL;
}

void sg_mqd_load(struct sg_queue *q)
{
	const struct sg_mqd_own *own = sg_mqd_own(q);
	const char *fault = sg_mqd_fault(q, own);

	if (fault) {
		sg_violate(SG_SAVE_AREA_STALE, sg_process_pid(q->process), q->pdd->dev,
			   q->props.save_address, "mqd", "queue %u: %s", q->id, fault);
		q->run.dead = true;
		return;
	}
	q->run.sequence = own->sequence;
	q->run.in_flight = own->in_flight;
	q->run.rptr = own->rptr;
	q->run.sdma_done = own->sdma_done;
	q->run.reported = own->reported;
}

/* After the control stack, as the hardware has wave state. */
static u64 sg_save_area_at(const struct sg_queue *q)
{
	return q->props.save_address + q->run.ctl_stack_bytes;
}

static void sg_save_agent(struct sg_queue *q, struct sg_agent *agent)
{
	memset(agent, 0, sizeof(*agent));
	agent->vm = q->pdd->vm;
	agent->pid = sg_process_pid(q->process);
	strscpy(agent->packet, "save-area");
}

static int sg_save_area_put(struct sg_queue *q, struct sg_agent *agent)
{
	struct sg_wave wave = q->run.wave;

	wave.sequence = q->run.sequence;
	sg_wave_seal(&wave);
	return sg_vm_access(agent, sg_save_area_at(q), &wave, sizeof(wave), true);
}

/*
 * Before a dispatch begins: makes the save area's pages, so that a save never
 * lacks memory. -EAGAIN: not yet. A queue without a save area is not refused
 * here: its save fails, as on hardware.
 */
int sg_save_area_reserve(struct sg_queue *q, struct sg_agent *agent)
{
	int err = sg_save_area_put(q, agent);

	return err == -EAGAIN ? err : 0;
}

int sg_save_area_write(struct sg_queue *q)
{
	struct sg_agent agent;
	int err;

	sg_save_agent(q, &agent);
	err = sg_save_area_put(q, &agent);
	if (err)
		pr_info_ratelimited("softgpu: process %d, GPU %u, queue %u: the save area at 0x%llx cannot be written (%d), the queue is lost\n",
				    agent.pid, q->pdd->dev->gpu_id, q->id, agent.fault_va, err);
	return err;
}

/* Restores the wave, if it is the one that the MQD names. */
int sg_save_area_read(struct sg_queue *q, struct sg_agent *agent)
{
	struct sg_wave wave;
	int err;

	strscpy(agent->packet, "save-area");
	err = sg_vm_access(agent, sg_save_area_at(q), &wave, sizeof(wave), false);
	if (err)
		return err;
	if (sg_wave_intact(&wave) && wave.sequence == q->run.sequence &&
	    wave.packet == q->run.rptr) {
		q->run.wave = wave;
		return 0;
	}
	sg_violate(SG_SAVE_AREA_STALE, agent->pid, q->pdd->dev, sg_save_area_at(q), agent->packet,
		   "queue %u: the save area has save %llu of packet %llu, the MQD has %llu of %llu",
		   q->id, wave.sequence, wave.packet, q->run.sequence, q->run.rptr);
	q->run.dead = true;
	return -EIO;
}
