// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Runs a user queue: a thread that executes slices while the gate is open, and
 * sleeps without a timer while the queue has no work.
 *
 * The thread that evicts the queue takes the run lock, so no slice runs. It
 * saves the queue's state as the hardware's context save does: into the MQD and
 * the save area.
 */
#include <linux/delay.h>
#include <linux/kthread.h>
#include <linux/sched.h>

#include "aql.h"
#include "doorbell.h"
#include "exec.h"
#include "queue.h"
#include "ring.h"
#include "sdma.h"
#include "smi.h"

/* A slice ends soon after this; an eviction waits that long. */
#define SG_SLICE_NS		NSEC_PER_MSEC
/* The polling interval of a doorbell just after work, and for how long. */
#define SG_HOT_US		200
#define SG_HOT_TURNS		25
/* A wait for memory to change: shortest and longest interval. */
#define SG_WAIT_FIRST_US	100
#define SG_WAIT_LAST_US		3200

void sg_run_kick(struct sg_queue *q)
{
	atomic_set(&q->run.kicked, 1);
	wake_up_all(&q->run.wake);
}

static void sg_agent_of_queue(struct sg_queue *q, struct sg_agent *agent)
{
	memset(agent, 0, sizeof(*agent));
	agent->vm = q->pdd->vm;
	agent->queue = q;
	agent->pid = sg_process_pid(q->process);
}

static int sg_run_read_wptr(struct sg_queue *q, struct sg_agent *agent)
{
	if (sg_queue_is_sdma(q))
		q->run.not_before = sg_submitted_until(q->run.not_before);
	strscpy(agent->packet, "write-pointer");
	return sg_vm_access(agent, q->props.write_ptr, &q->run.wptr, sizeof(q->run.wptr), false);
}

/* Onto the GPU: restores an unfinished dispatch, reads the write pointer. */
static int sg_run_map(struct sg_queue *q, struct sg_agent *agent)
{
	int err = 0;

	sg_mqd_load(q);
	if (q->run.in_flight)
		err = sg_save_area_read(q, agent);
	if (!err)
		err = sg_run_read_wptr(q, agent);
	if (!err)
		q->run.mapped = true;
	return err;
}

/* Off the GPU; the run lock is held. */
static void sg_run_unmap(struct sg_queue *q)
{
	if (!q->run.mapped)
		return;
	q->run.mapped = false;
	q->run.sequence++;
	if (q->run.in_flight && sg_save_area_write(q))
		q->run.dead = true;
	sg_mqd_store(q);
}

static int sg_run_sdma_step(struct sg_queue *q, struct sg_agent *agent)
{
	struct sg_run *run = &q->run;
	struct sg_sdma sdma = {
		.agent = agent,
		.base = q->props.address,
		.ring = q->props.size,
		.at = run->rptr,
		.end = run->wptr,
		.done = run->sdma_done,
		.process = q->process,
	};
	int result;

	/* The ring cannot hold more. */
	if (run->wptr - run->rptr > q->props.size)
		return run->wptr < run->rptr ? SG_RUN_IDLE : -ENOEXEC;
	result = sg_sdma_step(&sdma);
	run->rptr = sdma.at;
	run->sdma_done = sdma.done;
	run->not_before = sg_copied_until(run->not_before, sdma.moved);
	switch (result) {
	case SG_SDMA_MORE:
	case SG_SDMA_IDLE:
		return SG_RUN_MORE;
	case SG_SDMA_WAIT:
		return SG_RUN_WAIT;
	case SG_SDMA_HANG:
		agent->fault_va = q->props.address + (run->rptr & (q->props.size - 1));
		return -ENOEXEC;
	default:
		return result;
	}
}

static int sg_run_step(struct sg_queue *q, struct sg_agent *agent)
{
	if (q->run.rptr == q->run.wptr)
		return SG_RUN_IDLE;
	if (sg_queue_is_sdma(q))
		return sg_run_sdma_step(q, agent);
	if (q->props.format != SG_QUEUE_AQL)
		return -ENOEXEC;	/* PM4: this GPU has no such packets */
	return sg_aql_step(q, agent);
}

/* SDMA engines report their progress here; the AQL processor does so with each packet. */
static int sg_run_report(struct sg_queue *q, struct sg_agent *agent)
{
	int err;

	if (!sg_queue_is_sdma(q) || q->run.reported == q->run.rptr)
		return 0;
	strscpy(agent->packet, "read-pointer");
	err = sg_vm_access(agent, q->props.read_ptr, &q->run.rptr, sizeof(u64), true);
	if (!err)
		q->run.reported = q->run.rptr;
	return err;
}

static int sg_run_locked(struct sg_queue *q, struct sg_agent *agent)
{
	ktime_t end = ktime_add_ns(ktime_get(), SG_SLICE_NS);
	int result = 0, err;

	if (q->run.dead || q->run.partial || !(sg_queue_may_run(q) || READ_ONCE(q->run.ungated)))
		return SG_RUN_GATED;
	if (!q->run.mapped)
		result = sg_run_map(q, agent);
	else if (sg_doorbell_rung(q))
		result = sg_run_read_wptr(q, agent);
	while (!result && !ktime_after(q->run.not_before, end)) {
		result = sg_run_step(q, agent);
		if (atomic_read(&q->run.stoppers) || ktime_after(ktime_get(), end))
			break;
	}
	err = q->run.mapped ? sg_run_report(q, agent) : 0;
	return result < 0 ? result : err ?: result;
}

static const char *sg_run_why(int err)
{
	switch (err) {
	case -EFAULT:
		return "a memory fault";
	case -EIO:
		return "the save area of another save";
	default:
		return "something that it cannot execute";
	}
}

/* Stops the queue for good; user space gets the hardware's events. */
static void sg_run_fail(struct sg_queue *q, struct sg_agent *agent, int err)
{
	struct kfd_hsa_memory_exception_data data = {
		.va = agent->fault_va & PAGE_MASK,
		.gpu_id = q->pdd->user_gpu_id,
		.failure = { .NotPresent = 1, .ReadOnly = agent->fault_write },
	};

	mutex_lock(&q->run.lock);
	q->run.dead = true;
	mutex_unlock(&q->run.lock);
	pr_info_ratelimited("softgpu: process %d, GPU %u, queue %u: stopped at %s by %s at 0x%llx\n",
			    agent->pid, q->pdd->dev->gpu_id, q->id, agent->packet,
			    sg_run_why(err), agent->fault_va);
	if (err != -EFAULT)
		return;
	sg_smi_vm_fault(q->pdd->dev, q->process);
	sg_pdd_evict_queues(q->pdd, SG_EVICT_SVM);
	sg_event_memory_exception(q->process, &data);
}

static bool sg_run_called(struct sg_queue *q)
{
	return atomic_read(&q->run.kicked) || kthread_should_stop();
}

static void sg_run_sleep_us(struct sg_queue *q, u64 us)
{
	wait_event_interruptible_hrtimeout(q->run.wake, sg_run_called(q), ns_to_ktime(us * NSEC_PER_USEC));
}

/* No work: polls the doorbell for a while, then waits for its fault. */
static void sg_run_idle(struct sg_queue *q)
{
	int turn;

	for (turn = 0; turn < SG_HOT_TURNS && !sg_run_called(q); turn++) {
		if (sg_doorbell_waiting(q))
			return;
		sg_run_sleep_us(q, SG_HOT_US);
	}
	if (sg_doorbells_cool(q->pdd) && !sg_doorbell_waiting(q))
		wait_event_interruptible(q->run.wake, sg_run_called(q));
}

/* The work after a slice, outside the run lock. */
static void sg_run_after(struct sg_queue *q, struct sg_agent *agent, int result, u64 *wait_us)
{
	s64 ahead;

	if (result != SG_RUN_WAIT)
		*wait_us = SG_WAIT_FIRST_US;
	switch (result) {
	case SG_RUN_MORE:
		ahead = ktime_us_delta(q->run.not_before, ktime_get());
		if (ahead > 0)
			sg_run_sleep_us(q, ahead);
		cond_resched();
		break;
	case SG_RUN_IDLE:
		sg_run_idle(q);
		break;
	case SG_RUN_WAIT:
		sg_run_sleep_us(q, *wait_us);
		*wait_us = min_t(u64, *wait_us * 2, SG_WAIT_LAST_US);
		break;
	case SG_RUN_GATED:
		wait_event_interruptible(q->run.wake, sg_run_called(q));
		break;
	default:
		if (sg_agent_help(agent, result))
			sg_run_fail(q, agent, result);
	}
}

static int sg_run_worker(void *data)
{
	struct sg_queue *q = data;
	u64 wait_us = SG_WAIT_FIRST_US;
	struct sg_agent agent;
	int result;

	sg_agent_of_queue(q, &agent);
	while (!kthread_should_stop()) {
		wait_event_interruptible(q->run.wake,
					 !atomic_read(&q->run.stoppers) || kthread_should_stop());
		atomic_set(&q->run.kicked, 0);
		mutex_lock(&q->run.lock);
		result = sg_run_locked(q, &agent);
		mutex_unlock(&q->run.lock);
		sg_run_after(q, &agent, result, &wait_us);
	}
	return 0;
}

void sg_run_lock(struct sg_queue *q)
{
	atomic_inc(&q->run.stoppers);
	mutex_lock(&q->run.lock);
	sg_run_unmap(q);
}

void sg_run_unlock(struct sg_queue *q)
{
	mutex_unlock(&q->run.lock);
	atomic_dec(&q->run.stoppers);
	sg_run_kick(q);
}

/* Starts the thread, which waits for the first kick. */
int sg_run_start(struct sg_queue *q)
{
	struct task_struct *worker;

	worker = kthread_create(sg_run_worker, q, "softgpu/%d:%u", sg_process_pid(q->process), q->id);
	if (IS_ERR(worker))
		return PTR_ERR(worker);
	q->run.worker = worker;
	wake_up_process(worker);
	return 0;
}

void sg_run_end(struct sg_queue *q)
{
	kthread_stop(q->run.worker);
	q->run.worker = NULL;
}
