// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Memory that outlives its processes. When the last process with a KFD
 * allocation of a BO ends, a dma-buf descriptor may be in transit to another
 * process. A descriptor that after a while alone keeps the BO alive was
 * forgotten: in the image's restorer, or in a daemon.
 */
#include <drm/drm_gem.h>
#include <linux/jiffies.h>
#include <linux/slab.h>

#include "leak.h"
#include "ring.h"
#include "softgpu.h"

/* How long a descriptor may be in transit, and the polling interval. */
#define SG_LEAK_MS	1000
#define SG_LEAK_LOOK_MS	20

struct sg_watch {
	struct list_head link;
	struct sg_bo *bo;
	unsigned long since;
	pid_t pid;
	u64 va;
};

static void sg_leak_look(struct work_struct *work);

static DEFINE_MUTEX(sg_watches_lock);
static LIST_HEAD(sg_watches);
static DECLARE_DELAYED_WORK(sg_leak_work, sg_leak_look);

/* The process that allocated the memory. */
static struct sg_bo *sg_leak_bo(struct sg_bo *bo)
{
	while (bo->store == SG_STORE_ALIAS)
		bo = bo->origin;
	return bo;
}

void sg_leak_adopt(struct sg_mem *mem)
{
	atomic_inc(&sg_leak_bo(mem->bo)->allocations);
}

void sg_leak_exported(struct sg_bo *bo)
{
	atomic_inc(&sg_leak_bo(bo)->exports);
}

void sg_leak_released(struct sg_bo *bo)
{
	atomic_dec(&sg_leak_bo(bo)->exports);
}

/* Jobs of a file that closes may use it, too: they end. */
static bool sg_only_exported(struct sg_bo *bo)
{
	return atomic_read(&bo->exports) && !READ_ONCE(bo->base.handle_count) &&
	       !atomic_read(&bo->allocations);
}

void sg_leak_disown(struct sg_mem *mem)
{
	struct sg_bo *bo = sg_leak_bo(mem->bo);
	struct sg_watch *watch;

	if (!atomic_dec_and_test(&bo->allocations) || !mem->pdd->process->mm_gone ||
	    !sg_only_exported(bo))
		return;
	watch = kzalloc(sizeof(*watch), GFP_KERNEL);
	if (!watch)
		return;
	sg_bo_get(bo);
	watch->bo = bo;
	watch->since = jiffies;
	watch->pid = sg_process_pid(mem->pdd->process);
	watch->va = mem->va;
	mutex_lock(&sg_watches_lock);
	list_add_tail(&watch->link, &sg_watches);
	mutex_unlock(&sg_watches_lock);
	schedule_delayed_work(&sg_leak_work, msecs_to_jiffies(SG_LEAK_LOOK_MS));
}

/* When a process ends it may close after files, one of each device, whose jobs are awaited. */
static bool sg_watch_is_over(const struct sg_watch *watch)
{
	unsigned int limit = SG_LEAK_MS + sg_device_count * SG_FLUSH_MS;

	return time_after_eq(jiffies, watch->since + msecs_to_jiffies(limit));
}

static void sg_watch_end(struct sg_watch *watch, bool leaked)
{
	struct sg_bo *bo = watch->bo;

	if (leaked)
		sg_violate(SG_LEAK, watch->pid, bo->dev, watch->va, "exit",
			   "a BO of %zu bytes is kept by a dma-buf descriptor alone, its process has ended",
			   bo->base.size);
	list_del(&watch->link);
	sg_bo_put(bo);
	kfree(watch);
}

static void sg_leak_look(struct work_struct *work)
{
	struct sg_watch *watch, *next;

	mutex_lock(&sg_watches_lock);
	list_for_each_entry_safe(watch, next, &sg_watches, link) {
		if (!sg_only_exported(watch->bo))
			sg_watch_end(watch, false);
		else if (sg_watch_is_over(watch))
			sg_watch_end(watch, true);
	}
	if (!list_empty(&sg_watches))
		schedule_delayed_work(&sg_leak_work, msecs_to_jiffies(SG_LEAK_LOOK_MS));
	mutex_unlock(&sg_watches_lock);
}

void sg_leak_exit(void)
{
	struct sg_watch *watch, *next;

	cancel_delayed_work_sync(&sg_leak_work);
	mutex_lock(&sg_watches_lock);
	list_for_each_entry_safe(watch, next, &sg_watches, link)
		sg_watch_end(watch, false);
	mutex_unlock(&sg_watches_lock);
}
