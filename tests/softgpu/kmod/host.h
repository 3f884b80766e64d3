/* SPDX-License-Identifier: GPL-2.0 OR MIT */
#ifndef SOFTGPU_HOST_H
#define SOFTGPU_HOST_H

#include "softgpu.h"

/* `ops` belong to the owner of the range; invalidate must call sg_host_invalidate(). */
int sg_host_init(struct sg_host *host, struct mm_struct *mm, u64 start, u64 npages, bool readonly,
		 const struct mmu_interval_notifier_ops *ops, void *owner);
/* No notification follows; may be called twice. */
void sg_host_unregister(struct sg_host *host);
void sg_host_exit(struct sg_host *host);
struct sg_host *sg_host_create(struct mm_struct *mm, u64 start, u64 npages, bool readonly,
			       const struct mmu_interval_notifier_ops *ops, void *owner);
void sg_host_free(struct sg_host *host);

/*
 * Looks all pages up as a device would, without waiting for userfaultfd.
 * -EFAULT: a page is missing or not permitted; -ESRCH: the address space is
 * ending; -EAGAIN: it changes all the time. Sleeps, takes the mmap lock.
 */
int sg_host_fault(struct sg_host *host);

/*
 * From a notifier. Releases its pages, unless `stale`: then a GPU that still
 * runs continues to use them, as hardware would, and the judge reports it.
 */
void sg_host_invalidate(struct sg_host *host, unsigned long seq, bool stale);

/* Inside a slice. -EFAULT: not valid. */
int sg_host_page(struct sg_host *host, unsigned long index, struct sg_page_ref *ref);
void sg_host_put(struct sg_page_ref *ref);

#endif
