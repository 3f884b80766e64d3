// SPDX-License-Identifier: GPL-2.0 OR MIT
/* The tree of SVM ranges of a process: making, splitting, removing. */
#include <linux/mm.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>

#include "svm.h"
#include "svm_range.h"

static const struct mmu_interval_notifier_ops sg_svm_ops = {
	.invalidate = sg_svm_changed,
};

static struct sg_svm_range *sg_range_of(struct interval_tree_node *node)
{
	return node ? container_of(node, struct sg_svm_range, node) : NULL;
}

struct sg_svm_range *sg_svm_first(struct sg_process *p, unsigned long first, unsigned long last)
{
	return sg_range_of(interval_tree_iter_first(&p->svm.tree, first, last));
}

struct sg_svm_range *sg_svm_next(struct sg_svm_range *range, unsigned long first, unsigned long last)
{
	return sg_range_of(interval_tree_iter_next(&range->node, first, last));
}

void sg_svm_defaults(struct sg_process *p, struct sg_svm_attrs *attrs)
{
	unsigned int i;

	attrs->preferred = KFD_IOCTL_SVM_LOCATION_UNDEFINED;
	attrs->prefetch = KFD_IOCTL_SVM_LOCATION_UNDEFINED;
	attrs->flags = KFD_IOCTL_SVM_FLAG_HOST_ACCESS | KFD_IOCTL_SVM_FLAG_COHERENT;
	attrs->granularity = SG_SVM_GRANULARITY;
	attrs->access = 0;
	for (i = 0; i < p->n_pdds && p->xnack; i++)
		attrs->access |= BIT(p->pdds[i]->dev->index);
	attrs->in_place = 0;
}

struct sg_svm_range *sg_svm_insert(struct sg_process *p, unsigned long first, unsigned long last,
				   const struct sg_svm_attrs *attrs)
{
	struct sg_svm_range *range = kzalloc(sizeof(*range), GFP_KERNEL_ACCOUNT);
	int err;

	if (!range)
		return ERR_PTR(-ENOMEM);
	range->node.start = first;
	range->node.last = last;
	range->p = p;
	range->attrs = *attrs;
	err = sg_host_init(&range->host, p->mm, (u64)first << PAGE_SHIFT, last - first + 1, false, &sg_svm_ops,
			   range);
	if (err) {
		kfree(range);
		return ERR_PTR(err);
	}
	spin_lock(&p->svm.tree_lock);
	interval_tree_insert(&range->node, &p->svm.tree);
	spin_unlock(&p->svm.tree_lock);
	return range;
}

void sg_svm_delete(struct sg_svm_range *range)
{
	struct sg_process *p = range->p;

	spin_lock(&p->svm.tree_lock);
	interval_tree_remove(&range->node, &p->svm.tree);
	spin_unlock(&p->svm.tree_lock);
	sg_host_exit(&range->host);
	kfree(range);
}

/* Where a range is cut, at most: before and after a part, and around unmapped parts. */
#define SG_SVM_MAX_PARTS	(3 + SG_SVM_MAX_GONE)

struct sg_svm_parts {
	struct sg_pages at[SG_SVM_MAX_PARTS];
	unsigned int count;
};

static void sg_parts_add(struct sg_svm_parts *parts, unsigned long first, unsigned long last)
{
	if (first > last || parts->count == SG_SVM_MAX_PARTS)
		return;
	parts->at[parts->count].first = first;
	parts->at[parts->count].last = last;
	parts->count++;
}

static void sg_parts_remove(struct sg_svm_parts *parts, const struct sg_pages *gone)
{
	struct sg_svm_parts left = {};
	unsigned int i;

	for (i = 0; i < parts->count; i++) {
		const struct sg_pages *part = &parts->at[i];

		if (gone->last < part->first || gone->first > part->last) {
			sg_parts_add(&left, part->first, part->last);
			continue;
		}
		if (gone->first > part->first)
			sg_parts_add(&left, part->first, gone->first - 1);
		if (gone->last < part->last)
			sg_parts_add(&left, gone->last + 1, part->last);
	}
	*parts = left;
}

/*
 * Replaces a range by these parts of it, without unmapped ones. The driver
 * splits its page lists; here the parts look their pages up again, while the
 * queues are evicted. A missing page is noticed at its next access.
 */
static void sg_svm_replace(struct sg_svm_range *range, struct sg_svm_parts *parts)
{
	struct sg_svm_attrs attrs = range->attrs;
	unsigned long mapped = range->mapped;
	struct sg_process *p = range->p;
	unsigned int i;

	if (mapped)
		sg_process_evict_queues(p, SG_EVICT_SVM);
	/* From here on no notification adds unmapped parts. */
	sg_host_unregister(&range->host);
	for (i = 0; i < range->n_gone; i++)
		sg_parts_remove(parts, &range->gone[i]);
	sg_svm_delete(range);
	for (i = 0; i < parts->count; i++) {
		range = sg_svm_insert(p, parts->at[i].first, parts->at[i].last, &attrs);
		if (!IS_ERR(range))
			sg_svm_map(range, mapped);
	}
	if (mapped)
		sg_process_restore_queues(p);
}

struct sg_svm_range *sg_svm_carve(struct sg_svm_range *range, unsigned long first, unsigned long last)
{
	struct sg_svm_parts parts = {};
	struct sg_process *p = range->p;

	first = max(first, range->node.start);
	last = min(last, range->node.last);
	if (first == range->node.start && last == range->node.last)
		return range;
	if (first > range->node.start)
		sg_parts_add(&parts, range->node.start, first - 1);
	sg_parts_add(&parts, first, last);
	if (last < range->node.last)
		sg_parts_add(&parts, last + 1, range->node.last);
	sg_svm_replace(range, &parts);
	range = sg_svm_first(p, first, last);
	return range && range->node.start >= first && range->node.last <= last ? range : NULL;
}

static bool sg_svm_flush_one(struct sg_process *p)
{
	struct sg_svm_parts parts = {};
	struct sg_svm_range *range;
	bool gone;

	for (range = sg_svm_first(p, 0, ULONG_MAX); range; range = sg_svm_next(range, 0, ULONG_MAX)) {
		mutex_lock(&p->notify_lock);
		gone = range->n_gone;
		mutex_unlock(&p->notify_lock);
		if (!gone)
			continue;
		sg_parts_add(&parts, range->node.start, range->node.last);
		sg_svm_replace(range, &parts);
		return true;
	}
	return false;
}

void sg_svm_flush(struct sg_process *p)
{
	/* The rest of the ranges looks its pages up, and gets notifications:
	 * impossible when the address space is ending. */
	if (!mmget_not_zero(p->mm))
		return;
	while (sg_svm_flush_one(p))
		cond_resched();
	mmput_async(p->mm);
}

void sg_svm_init(struct sg_process *p)
{
	mutex_init(&p->svm.lock);
	spin_lock_init(&p->svm.tree_lock);
	p->svm.tree = RB_ROOT_CACHED;
	INIT_LIST_HEAD(&p->svm.restored);
	atomic_set(&p->svm.evicted, 0);
	INIT_DELAYED_WORK(&p->svm.restore, sg_svm_restore_work);
}

void sg_svm_stop(struct sg_process *p)
{
	cancel_delayed_work_sync(&p->svm.restore);
}

void sg_svm_exit(struct sg_process *p)
{
	struct sg_svm_range *range;

	sg_svm_stop(p);
	sg_svm_criu_drop(p);
	mutex_lock(&p->svm.lock);
	while ((range = sg_svm_first(p, 0, ULONG_MAX)))
		sg_svm_delete(range);
	mutex_unlock(&p->svm.lock);
}
