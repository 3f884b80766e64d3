// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Pages of a process' address space that a GPU uses, without pinning them. */
#include <linux/hmm.h>
#include <linux/mm.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>

#include "host.h"

/* Attempts at a range that changes while it is looked up. */
#define SG_HOST_ATTEMPTS	100

int sg_host_init(struct sg_host *host, struct mm_struct *mm, u64 start, u64 npages, bool readonly,
		 const struct mmu_interval_notifier_ops *ops, void *owner)
{
	int err;

	if (!npages || npages > SZ_1T >> PAGE_SHIFT)
		return -EINVAL;
	memset(host, 0, sizeof(*host));
	host->pages = kvcalloc(npages, sizeof(*host->pages), GFP_KERNEL_ACCOUNT | __GFP_NOWARN);
	if (!host->pages)
		return -ENOMEM;
	host->mm = mm;
	host->start = start;
	host->npages = npages;
	host->readonly = readonly;
	host->owner = owner;
	spin_lock_init(&host->lock);
	init_waitqueue_head(&host->idle);
	err = mmu_interval_notifier_insert(&host->notifier, mm, start, npages << PAGE_SHIFT, ops);
	if (err)
		kvfree(host->pages);
	host->registered = !err;
	return err;
}

/* With host->lock held. */
static void sg_host_drop(struct sg_host *host)
{
	unsigned long i;

	if (!host->valid && !host->stale)
		return;
	host->valid = false;
	host->stale = false;
	for (i = 0; i < host->npages; i++) {
		put_page(host->pages[i]);
		host->pages[i] = NULL;
	}
}

static void sg_host_wait(struct sg_host *host)
{
	wait_event(host->idle, !READ_ONCE(host->spans));
}

void sg_host_unregister(struct sg_host *host)
{
	if (host->registered)
		mmu_interval_notifier_remove(&host->notifier);
	host->registered = false;
}

void sg_host_exit(struct sg_host *host)
{
	sg_host_unregister(host);
	spin_lock(&host->lock);
	sg_host_drop(host);
	spin_unlock(&host->lock);
	sg_host_wait(host);
	kvfree(host->pages);
	host->pages = NULL;
}

struct sg_host *sg_host_create(struct mm_struct *mm, u64 start, u64 npages, bool readonly,
			       const struct mmu_interval_notifier_ops *ops, void *owner)
{
	struct sg_host *host = kzalloc(sizeof(*host), GFP_KERNEL);
	int err;

	if (!host)
		return ERR_PTR(-ENOMEM);
	err = sg_host_init(host, mm, start, npages, readonly, ops, owner);
	if (err) {
		kfree(host);
		return ERR_PTR(err);
	}
	return host;
}

void sg_host_free(struct sg_host *host)
{
	sg_host_exit(host);
	kfree(host);
}

/* Takes references if nothing changed since the look-up began. */
static int sg_host_take(struct sg_host *host, struct hmm_range *range)
{
	unsigned long i;
	int err = 0;

	spin_lock(&host->lock);
	if (mmu_interval_read_retry(&host->notifier, range->notifier_seq)) {
		err = -EBUSY;
	} else {
		sg_host_drop(host);
		for (i = 0; i < host->npages; i++) {
			host->pages[i] = hmm_pfn_to_page(range->hmm_pfns[i]);
			get_page(host->pages[i]);
		}
		host->valid = true;
	}
	spin_unlock(&host->lock);
	return err;
}

static int sg_host_fault_once(struct sg_host *host, struct hmm_range *range)
{
	struct vm_area_struct *vma;
	int err = -EFAULT;

	range->notifier_seq = mmu_interval_read_begin(&host->notifier);
	mmap_read_lock(host->mm);
	vma = vma_lookup(host->mm, host->start);
	if (vma)
		err = hmm_range_fault(range);
	mmap_read_unlock(host->mm);
	return err ?: sg_host_take(host, range);
}

int sg_host_fault(struct sg_host *host)
{
	struct hmm_range range = {
		.notifier = &host->notifier,
		.start = host->start,
		.end = host->start + (host->npages << PAGE_SHIFT),
		.default_flags = HMM_PFN_REQ_FAULT | (host->readonly ? 0 : HMM_PFN_REQ_WRITE),
	};
	int attempt, err = -EBUSY;

	if (!mmget_not_zero(host->mm))
		return -ESRCH;
	range.hmm_pfns = kvcalloc(host->npages, sizeof(*range.hmm_pfns), GFP_KERNEL | __GFP_NOWARN);
	if (!range.hmm_pfns) {
		mmput_async(host->mm);
		return -ENOMEM;
	}
	for (attempt = 0; err == -EBUSY && attempt < SG_HOST_ATTEMPTS; attempt++) {
		cond_resched();
		err = sg_host_fault_once(host, &range);
	}
	kvfree(range.hmm_pfns);
	/* Not mmput: it may end the address space, which waits for this function's callers. */
	mmput_async(host->mm);
	return err == -EBUSY ? -EAGAIN : err;
}

void sg_host_invalidate(struct sg_host *host, unsigned long seq, bool stale)
{
	spin_lock(&host->lock);
	mmu_interval_set_seq(&host->notifier, seq);
	if (!stale)
		sg_host_drop(host);
	else if (host->valid) {
		host->valid = false;
		host->stale = true;
	}
	spin_unlock(&host->lock);
	/* A slice that has a reference to a page puts it, without locks of this process. */
	if (!stale)
		sg_host_wait(host);
}

int sg_host_page(struct sg_host *host, unsigned long index, struct sg_page_ref *ref)
{
	int err = -EFAULT;

	spin_lock(&host->lock);
	if (index < host->npages && (host->valid || host->stale)) {
		ref->page = host->pages[index];
		ref->stale = host->stale;
		ref->host = host;
		/* Stale pages may be released at any time. */
		get_page(ref->page);
		host->spans++;
		err = 0;
	}
	spin_unlock(&host->lock);
	return err;
}

void sg_host_put(struct sg_page_ref *ref)
{
	struct sg_host *host = ref->host;

	put_page(ref->page);
	spin_lock(&host->lock);
	if (!--host->spans)
		wake_up_all(&host->idle);
	spin_unlock(&host->lock);
}
