/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* SVM ranges: pages of the process with one set of attributes. */
#ifndef SOFTGPU_SVM_RANGE_H
#define SOFTGPU_SVM_RANGE_H

#include "host.h"
#include "softgpu.h"

#define SG_SVM_MAX_GONE		8	/* parts of a range that were unmapped, until the whole is removed */
#define SG_SVM_GRANULARITY	9	/* log2 of the pages that a retry fault maps */

struct sg_pages {
	unsigned long first, last;
};

struct sg_svm_attrs {
	u32 preferred, prefetch, flags;
	u8 granularity;
	unsigned long access, in_place;	/* bit per GPU */
};

struct sg_svm_range {
	struct interval_tree_node node;	/* pages */
	struct sg_process *p;
	struct sg_host host;
	struct sg_svm_attrs attrs;
	unsigned long mapped;		/* N svm.tree_lock; bit per GPU */
	atomic_t invalid;		/* notifications since it was valid */
	/* N notify_lock: parts that the process has unmapped. */
	struct sg_pages gone[SG_SVM_MAX_GONE];
	unsigned int n_gone;
};

/* All with svm.lock held, unless said otherwise. */
struct sg_svm_range *sg_svm_first(struct sg_process *p, unsigned long first, unsigned long last);
struct sg_svm_range *sg_svm_next(struct sg_svm_range *range, unsigned long first, unsigned long last);
struct sg_svm_range *sg_svm_insert(struct sg_process *p, unsigned long first, unsigned long last,
				   const struct sg_svm_attrs *attrs);
void sg_svm_delete(struct sg_svm_range *range);
void sg_svm_defaults(struct sg_process *p, struct sg_svm_attrs *attrs);
/* Makes parts before `first` and after `last` ranges of their own. NULL: unmapped, or no memory. */
struct sg_svm_range *sg_svm_carve(struct sg_svm_range *range, unsigned long first, unsigned long last);
/* Removes what the process has unmapped from its ranges. Also with mem_lock held. */
void sg_svm_flush(struct sg_process *p);

/* svm_map.c: with mem_lock held as well. */
int sg_svm_map(struct sg_svm_range *range, unsigned long gpus);
/* GPUs that must have it mapped all the time. */
unsigned long sg_svm_wanted(const struct sg_svm_range *range);
void sg_svm_restore_work(struct work_struct *work);
bool sg_svm_changed(struct mmu_interval_notifier *notifier, const struct mmu_notifier_range *range,
		    unsigned long seq);

/* svm.c: pages, not bytes. */
int sg_svm_set(struct sg_process *p, u64 first, u64 npages, u32 count,
	       const struct kfd_ioctl_svm_attribute *attrs);
int sg_svm_get(struct sg_process *p, u64 first, u64 npages, u32 count, struct kfd_ioctl_svm_attribute *attrs);

#endif
