// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * USERPTR allocations of KFD. When the process' memory changes, all its queues
 * are evicted; a worker looks the pages up again and resumes them.
 */
#include <linux/jiffies.h>
#include <linux/sched/mm.h>

#include "host.h"
#include "userptr.h"

#define SG_RESTORE_DELAY_MS	1

/*
 * From RESTORE to RESUME the driver ignores notifications, and after a second
 * RESUME it counts them without evicting queues. Then the pages are stale, and
 * the judge reports their use.
 */
static bool sg_userptr_changed(struct mmu_interval_notifier *notifier,
			       const struct mmu_notifier_range *range, unsigned long seq)
{
	struct sg_host *host = container_of(notifier, struct sg_host, notifier);
	struct sg_mem *mem = host->owner;
	struct sg_process *p = mem->pdd->process;
	bool stale = false;

	if (!mmu_notifier_range_blockable(range))
		return false;
	mutex_lock(&p->notify_lock);
	if (p->block_notifications) {
		stale = true;
	} else {
		mem->invalid++;
		if (++p->evicted_bos == 1) {
			if (!READ_ONCE(p->mm_gone))
				sg_process_evict_queues(p, SG_EVICT_USERPTR);
			p->host_evicted = true;
			queue_delayed_work(system_freezable_wq, &p->host_restore,
					   msecs_to_jiffies(SG_RESTORE_DELAY_MS));
		}
		stale = !p->host_evicted;
	}
	sg_host_invalidate(host, seq, stale);
	mutex_unlock(&p->notify_lock);
	return true;
}

static const struct mmu_interval_notifier_ops sg_userptr_ops = {
	.invalidate = sg_userptr_changed,
};

/* Looks up all invalid pages. A missing page stays invalid: its use will be a VM fault. */
static int sg_userptr_update(struct sg_process *p)
{
	struct sg_mem *mem;
	u32 invalid;
	int err;

	list_for_each_entry(mem, &p->hosts, host_link) {
		mutex_lock(&p->notify_lock);
		invalid = mem->invalid;
		mutex_unlock(&p->notify_lock);
		if (!invalid)
			continue;
		err = sg_host_fault(mem->bo->host);
		if (err && err != -EFAULT)
			return err;
		mutex_lock(&p->notify_lock);
		if (mem->invalid != invalid)
			err = -EAGAIN;
		else if (!err)
			mem->invalid = 0;
		mutex_unlock(&p->notify_lock);
		if (err == -EAGAIN)
			return err;
	}
	return 0;
}

/* True: everything is valid, nothing changed meanwhile, the queues run. */
static bool sg_userptr_restore_once(struct sg_process *p, unsigned int evicted)
{
	bool done;

	mutex_lock(&p->mem_lock);
	done = !sg_userptr_update(p);
	mutex_lock(&p->notify_lock);
	done &= p->evicted_bos == evicted;
	if (done) {
		p->evicted_bos = 0;
		p->host_evicted = false;
		sg_process_restore_queues(p);
	}
	mutex_unlock(&p->notify_lock);
	mutex_unlock(&p->mem_lock);
	return done;
}

static void sg_userptr_restore_work(struct work_struct *work)
{
	struct sg_process *p = container_of(to_delayed_work(work), struct sg_process, host_restore);
	unsigned int evicted;

	mutex_lock(&p->notify_lock);
	evicted = p->evicted_bos;
	mutex_unlock(&p->notify_lock);
	if (!evicted || READ_ONCE(p->mm_gone))
		return;
	if (sg_userptr_restore_once(p, evicted))
		return;
	queue_delayed_work(system_freezable_wq, &p->host_restore, msecs_to_jiffies(SG_RESTORE_DELAY_MS));
	sg_smi_queue_restore_rescheduled(p->mm);
}

void sg_userptr_init(struct sg_process *p)
{
	INIT_LIST_HEAD(&p->hosts);
	INIT_DELAYED_WORK(&p->host_restore, sg_userptr_restore_work);
}

void sg_userptr_stop(struct sg_process *p)
{
	cancel_delayed_work_sync(&p->host_restore);
}

int sg_userptr_add(struct sg_mem *mem, bool restore)
{
	struct sg_process *p = mem->pdd->process;
	struct sg_host *host;
	int err = 0;

	mutex_lock(&p->mem_lock);
	/* Of the caller: also when a tracer restores. */
	host = sg_host_create(current->mm, mem->user_addr, sg_bo_npages(mem->bo), false, &sg_userptr_ops, mem);
	if (IS_ERR(host)) {
		err = PTR_ERR(host);
		goto out;
	}
	mem->bo->host = host;
	list_add_tail(&mem->host_link, &p->hosts);
	if (restore) {
		mutex_lock(&p->notify_lock);
		mem->invalid++;
		mutex_unlock(&p->notify_lock);
		goto out;
	}
	err = sg_host_fault(host);
	if (err)
		list_del_init(&mem->host_link);
out:
	mutex_unlock(&p->mem_lock);
	return err;
}

void sg_userptr_remove(struct sg_mem *mem)
{
	struct sg_process *p = mem->pdd->process;

	if (mem->bo->store != SG_STORE_HOST)
		return;
	mutex_lock(&p->mem_lock);
	list_del_init(&mem->host_link);
	mutex_unlock(&p->mem_lock);
	/* The allocation receives notifications: none may run when it is freed. */
	sg_host_unregister(mem->bo->host);
}

void sg_userptr_block(struct sg_process *p)
{
	mutex_lock(&p->notify_lock);
	p->block_notifications = true;
	mutex_unlock(&p->notify_lock);
}

int sg_userptr_resume(struct sg_process *p)
{
	int err = 0;

	mutex_lock(&p->mem_lock);
	mutex_lock(&p->notify_lock);
	/* Before the check, as the driver does: a second RESUME breaks this. */
	p->evicted_bos++;
	if (!p->block_notifications) {
		err = -EINVAL;
		goto out;
	}
	p->block_notifications = false;
	p->host_evicted = true;
	queue_delayed_work(system_freezable_wq, &p->host_restore, 0);
out:
	mutex_unlock(&p->notify_lock);
	mutex_unlock(&p->mem_lock);
	return err;
}
