// SPDX-License-Identifier: GPL-2.0 OR MIT
/* The tree of SVM ranges of a process: making, splitting, giving up. */
#include <linux/mm.h>
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
	attrs->preferred = KFD_IOCTL_SVM_LOCATION_UNDEFINED;
	attrs->prefetch = KFD_IOCTL_SVM_LOCATION_UNDEFINED;
	attrs->flags = KFD_IOCTL_SVM_FLAG_HOST_ACCESS | KFD_IOCTL_SVM_FLAG_COHERENT;
	attrs->granularity = SG_SVM_GRANULARITY;
	attrs->access = p->xnack ? GENMASK(p->n_pdds - 1, 0) : 0;
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

/* A part of a range that was, mapped where the whole was. */
static struct sg_svm_range *sg_svm_part(struct sg_process *p, unsigned long first, unsigned long last,
					const struct sg_svm_attrs *attrs, unsigned long mapped)
{
	struct sg_svm_range *range;

	if (first > last)
		return NULL;
	range = sg_svm_insert(p, first, last, attrs);
	/* A page that is missing by now is found by its use, or by who set the attributes. */
	if (!IS_ERR(range) && mapped)
		sg_svm_map(range, mapped);
	return range;
}

/*
 * The driver splits its page lists; here the parts look their pages up again,
 * while the queues stand still.
 */
static struct sg_svm_range *sg_svm_replace(struct sg_svm_range *range, unsigned long first, unsigned long last,
					   bool keep_middle)
{
	unsigned long start = range->node.start, end = range->node.last, mapped = range->mapped;
	struct sg_svm_attrs attrs = range->attrs;
	struct sg_svm_range *middle = NULL;
	struct sg_process *p = range->p;

	if (mapped)
		sg_process_evict_queues(p, SG_EVICT_SVM);
	sg_svm_delete(range);
	if (first > start)
		sg_svm_part(p, start, first - 1, &attrs, mapped);
	if (last < end)
		sg_svm_part(p, last + 1, end, &attrs, mapped);
	if (keep_middle)
		middle = sg_svm_part(p, first, last, &attrs, mapped);
	if (mapped)
		sg_process_restore_queues(p);
	return middle;
}

struct sg_svm_range *sg_svm_carve(struct sg_svm_range *range, unsigned long first, unsigned long last)
{
	first = max(first, range->node.start);
	last = min(last, range->node.last);
	if (first == range->node.start && last == range->node.last)
		return range;
	return sg_svm_replace(range, first, last, true);
}

/* One part that was unmapped, and no more. False: there is none. */
static bool sg_svm_flush_one(struct sg_process *p)
{
	unsigned long first = 0, last = 0;
	struct sg_svm_range *range;

	for (range = sg_svm_first(p, 0, ULONG_MAX); range; range = sg_svm_next(range, 0, ULONG_MAX)) {
		mutex_lock(&p->notify_lock);
		if (range->n_gone) {
			first = range->gone[0].first;
			last = range->gone[0].last;
		}
		mutex_unlock(&p->notify_lock);
		if (last) {
			struct { unsigned long first, last; } rest[SG_SVM_MAX_GONE];
			unsigned int i, n = range->n_gone;

			for (i = 1; i < n; i++) {
				rest[i].first = range->gone[i].first;
				rest[i].last = range->gone[i].last;
			}
			sg_svm_replace(range, first, last, false);
			/* Its other parts are gone in what is left of it. */
			for (i = 1; i < n; i++)
				while ((range = sg_svm_first(p, rest[i].first, rest[i].last)))
					sg_svm_replace(range, max(rest[i].first, range->node.start),
						       min(rest[i].last, range->node.last), false);
			return true;
		}
	}
	return false;
}

void sg_svm_flush(struct sg_process *p)
{
	while (sg_svm_flush_one(p))
		cond_resched();
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
