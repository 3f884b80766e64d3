// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * SDMA engines for command submission. An engine executes one job at a time:
 * the first in its list whose dependencies are met and that follows no earlier
 * job of its line. Engines work side by side, so that with a bandwidth given by
 * parameter copies on different engines overlap.
 */
#include <linux/kthread.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "ctx.h"
#include "exec.h"
#include "exec_device.h"
#include "hold.h"
#include "leak.h"
#include "sdma.h"

/* The error of the job that a ring was reset for. */
#define SG_GUILTY		(SG_MODERN ? -ETIME : -ECANCELED)
/* How often the pages of userptr BOs are looked up again for one job. */
#define SG_REVALIDATIONS	64

/* A late engine catches up: on average its bandwidth is the parameter's. */
ktime_t sg_copied_until(ktime_t from, u64 bytes)
{
	if (!sg_params.copy_mbps)
		return from;
	return ktime_add_ns(from, div_u64(bytes * 1000, sg_params.copy_mbps));
}

ktime_t sg_submitted_until(ktime_t from)
{
	ktime_t now = ktime_get();

	return ktime_add_us(ktime_after(from, now) ? from : now, sg_params.copy_latency_us);
}

void sg_job_free(struct sg_job *job)
{
	unsigned int i;

	for (i = 0; i < job->dep_count; i++) {
		dma_fence_remove_callback(job->deps[i].fence, &job->deps[i].cb);
		dma_fence_put(job->deps[i].fence);
	}
	for (i = 0; i < job->bo_count; i++)
		sg_bo_put(job->bos[i]);
	if (job->fence_map)
		sg_bo_kunmap(job->fence_bo, job->fence_map);
	if (job->fence_bo)
		sg_bo_put(job->fence_bo);
	dma_fence_put(job->fence);
	if (job->entity)
		sg_ctx_put(job->entity->ctx);
	kvfree(job->deps);
	kvfree(job->bos);
	kfree(job);
	sg_died(SG_JOBS);
}

/* The job may be freed as soon as nothing is missing. */
static void sg_job_ready(struct sg_job *job)
{
	struct sg_ring *ring = job->ring;

	if (atomic_dec_and_test(&job->missing))
		wake_up_all(&ring->wake);
}

/* Any context. */
static void sg_dep_signalled(struct dma_fence *fence, struct dma_fence_cb *cb)
{
	sg_job_ready(container_of(cb, struct sg_dep, cb)->job);
}

static struct sg_ring *sg_ring_choose(struct sg_exec_device *exec)
{
	struct sg_ring *best = &exec->rings[0];
	unsigned int i;

	for (i = 1; i < exec->ring_count; i++)
		if (READ_ONCE(exec->rings[i].length) < READ_ONCE(best->length))
			best = &exec->rings[i];
	return best;
}

/* A line stays on its engine while it has jobs there. ctx->submit orders the callers. */
static void sg_ring_enlist(struct sg_job *job)
{
	struct sg_entity *line = job->entity;
	struct sg_ring *ring = READ_ONCE(line->ring);

	if (ring) {
		spin_lock(&ring->lock);
		if (line->queued)
			goto found;
		spin_unlock(&ring->lock);
	}
	ring = sg_ring_choose(job->file->dev->exec);
	spin_lock(&ring->lock);
	line->ring = ring;
found:
	line->queued++;
	job->ring = ring;
	list_add_tail(&job->link, &ring->jobs);
	ring->length++;
	spin_unlock(&ring->lock);
}

void sg_ring_push(struct sg_job *job)
{
	unsigned int i, deps = job->dep_count;

	atomic_set(&job->missing, deps + 1);
	sg_ring_enlist(job);
	for (i = 0; i < deps; i++) {
		job->deps[i].job = job;
		if (dma_fence_add_callback(job->deps[i].fence, &job->deps[i].cb, sg_dep_signalled))
			sg_job_ready(job);
	}
	sg_job_ready(job);
}

static bool sg_job_first_of_line(struct sg_ring *ring, struct sg_job *job)
{
	struct sg_job *earlier = job;

	list_for_each_entry_continue_reverse(earlier, &ring->jobs, link)
		if (earlier->entity == job->entity)
			return false;
	return true;
}

/* A job that can run now, or that must end; it stays in the list while it runs. */
static struct sg_job *sg_ring_next(struct sg_ring *ring)
{
	struct sg_job *job, *found = NULL;

	spin_lock(&ring->lock);
	list_for_each_entry(job, &ring->jobs, link) {
		bool ready = !atomic_read(&job->missing);

		if ((ready || job->killed) && sg_job_first_of_line(ring, job) &&
		    (job->killed || sg_hold_lets_go(job->comm))) {
			job->running = true;
			found = job;
			break;
		}
	}
	spin_unlock(&ring->lock);
	return found;
}

static void sg_ring_wait_until(struct sg_ring *ring, struct sg_job *job)
{
	s64 ahead = ktime_us_delta(ring->busy_until, ktime_get());

	if (ahead > 0)
		wait_event_interruptible_hrtimeout(ring->wake, READ_ONCE(job->killed) ||
						   kthread_should_stop(),
						   ns_to_ktime(ahead * NSEC_PER_USEC));
}

/* Pages of host memory that were unmapped under the job: looks them up again. */
static bool sg_job_revalidate(struct sg_job *job)
{
	bool any = false;
	unsigned int i;

	for (i = 0; i < job->bo_count; i++) {
		if (job->bos[i]->store != SG_STORE_HOST)
			continue;
		if (sg_bo_validate(job->bos[i]))
			return false;
		any = true;
	}
	return any;
}

static int sg_job_run_ib(struct sg_job *job, const struct sg_ib *ib, struct sg_agent *agent)
{
	struct sg_sdma sdma = { .agent = agent, .base = ib->va, .end = ib->bytes };
	unsigned int tries = SG_REVALIDATIONS;
	int result;

	for (;;) {
		if (READ_ONCE(job->killed) || kthread_should_stop())
			return -ECANCELED;
		sdma.moved = 0;
		result = sg_sdma_step(&sdma);
		job->ring->busy_until = sg_copied_until(job->ring->busy_until, sdma.moved);
		sg_ring_wait_until(job->ring, job);
		switch (result) {
		case SG_SDMA_IDLE:
			return 0;
		case SG_SDMA_MORE:
			cond_resched();
			continue;
		case SG_SDMA_WAIT:
			schedule_timeout_interruptible(1);
			continue;
		case SG_SDMA_HANG:
			agent->fault_va = ib->va + sdma.at;
			return -ENOEXEC;
		}
		if (result == -EFAULT && tries-- && sg_job_revalidate(job))
			continue;
		if (sg_agent_help(agent, result))
			return result;
	}
}

/* Resets the engine: the line is lost, the others continue. */
static int sg_job_hung(struct sg_job *job, const struct sg_agent *agent, int err)
{
	struct sg_device *dev = job->file->dev;

	pr_info_ratelimited("softgpu: process %d, GPU %u: a job stopped at %s by %s at 0x%llx, its ring is reset\n",
			    job->pid, dev->gpu_id, agent->packet,
			    err == -EFAULT ? "a memory fault" : "something that it cannot execute",
			    agent->fault_va);
	atomic_inc(&dev->exec->resets);
	WRITE_ONCE(job->entity->error, SG_GUILTY);
	return SG_GUILTY;
}

static int sg_job_run(struct sg_job *job)
{
	struct sg_agent agent = { .vm = &job->file->vm, .pid = job->pid };
	unsigned int i;
	int err = READ_ONCE(job->entity->error) ? -ECANCELED : 0;

	job->ring->busy_until = sg_submitted_until(job->ring->busy_until);
	sg_ring_wait_until(job->ring, job);
	for (i = 0; i < job->ib_count && !job->entity->is_video && !err; i++)
		err = sg_job_run_ib(job, &job->ibs[i], &agent);
	if (err && err != -ECANCELED)
		err = sg_job_hung(job, &agent, err);
	if (!err && job->user_fence)
		WRITE_ONCE(*job->user_fence, job->sequence);
	return err;
}

static void sg_job_finish(struct sg_ring *ring, struct sg_job *job, int err)
{
	if (err)
		dma_fence_set_error(job->fence, err);
	dma_fence_signal(job->fence);
	spin_lock(&ring->lock);
	list_del(&job->link);
	ring->length--;
	job->entity->queued--;
	spin_unlock(&ring->lock);
	sg_job_free(job);
	wake_up_all(&ring->wake);
}

static int sg_ring_worker(void *data)
{
	struct sg_ring *ring = data;
	struct sg_job *job;

	while (!kthread_should_stop()) {
		wait_event_interruptible(ring->wake,
					 (job = sg_ring_next(ring)) || kthread_should_stop());
		if (job)
			sg_job_finish(ring, job, sg_job_run(job));
	}
	return 0;
}

static bool sg_ring_has(struct sg_ring *ring, struct sg_file *file, bool kill)
{
	struct sg_job *job;
	bool has = false;

	spin_lock(&ring->lock);
	list_for_each_entry(job, &ring->jobs, link) {
		if (job->file != file)
			continue;
		has = true;
		if (kill)
			WRITE_ONCE(job->killed, true);
	}
	spin_unlock(&ring->lock);
	return has;
}

/* No thread submits for this file any more. */
void sg_rings_flush(struct sg_file *file)
{
	long left = fatal_signal_pending(current) ? 0 : msecs_to_jiffies(SG_FLUSH_MS);
	struct sg_exec_device *exec = file->dev->exec;
	unsigned int i;

	for (i = 0; i < exec->ring_count; i++) {
		struct sg_ring *ring = &exec->rings[i];

		if (left)
			left = wait_event_killable_timeout(ring->wake,
							   !sg_ring_has(ring, file, false), left);
		left = max(left, 0L);
		if (!sg_ring_has(ring, file, true))
			continue;
		wake_up_all(&ring->wake);
		wait_event(ring->wake, !sg_ring_has(ring, file, true));
	}
}

static int sg_ring_init(struct sg_ring *ring, struct sg_device *dev, unsigned int number)
{
	struct task_struct *worker;

	spin_lock_init(&ring->lock);
	INIT_LIST_HEAD(&ring->jobs);
	init_waitqueue_head(&ring->wake);
	worker = kthread_run(sg_ring_worker, ring, "softgpu-sdma%u.%u", dev->index, number);
	if (IS_ERR(worker))
		return PTR_ERR(worker);
	ring->worker = worker;
	return 0;
}

int sg_exec_device_init(struct sg_device *dev)
{
	unsigned int i, rings = min(sg_params.sdma_rings, SG_MAX_RINGS);
	struct sg_exec_device *exec = kzalloc(sizeof(*exec), GFP_KERNEL);
	int err;

	if (!exec)
		return -ENOMEM;
	err = sg_access_init();
	if (err) {
		kfree(exec);
		return err;
	}
	sg_smi_init(&exec->smi);
	mutex_init(&exec->pstate_lock);
	ida_init(&exec->sdma_ids);
	ida_init(&exec->xgmi_ids);
	dev->exec = exec;
	for (i = 0; i < rings && !err; i++) {
		err = sg_ring_init(&exec->rings[i], dev, i);
		if (!err)
			exec->ring_count++;
	}
	if (err)
		sg_exec_device_exit(dev);
	return err;
}

void sg_exec_device_exit(struct sg_device *dev)
{
	struct sg_exec_device *exec = dev->exec;
	unsigned int i;

	if (!exec)
		return;
	sg_leak_exit();
	for (i = 0; i < exec->ring_count; i++)
		kthread_stop(exec->rings[i].worker);
	ida_destroy(&exec->sdma_ids);
	ida_destroy(&exec->xgmi_ids);
	kfree(exec);
	dev->exec = NULL;
	sg_access_exit();
}

int sg_exec_file_open(struct sg_file *file)
{
	struct sg_exec_file *exec = kzalloc(sizeof(*exec), GFP_KERNEL_ACCOUNT);

	if (!exec)
		return -ENOMEM;
	mutex_init(&exec->lock);
	idr_init_base(&exec->contexts, 1);
	idr_init_base(&exec->bo_lists, 1);
	file->exec = exec;
	return 0;
}
