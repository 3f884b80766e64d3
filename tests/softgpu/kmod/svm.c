// SPDX-License-Identifier: GPL-2.0 OR MIT
/* The SVM ioctl: attributes of ranges. Memory does not migrate: preferred
 * locations are stored and reported only. */
#include <linux/mm.h>
#include <linux/sched/mm.h>

#include "svm.h"
#include "svm_range.h"
#include "vm.h"

#define SG_DEVICE_VMA	(VM_IO | VM_PFNMAP | VM_MIXEDMAP)

static int sg_gpu_index(struct sg_process *p, u32 gpu_id)
{
	struct sg_pdd *pdd = sg_pdd_by_user_id(p, gpu_id);

	return pdd ? pdd->dev->index : -EINVAL;
}

static int sg_svm_check_attr(struct sg_process *p, const struct kfd_ioctl_svm_attribute *attr)
{
	switch (attr->type) {
	case KFD_IOCTL_SVM_ATTR_PREFERRED_LOC:
		if (attr->value == KFD_IOCTL_SVM_LOCATION_UNDEFINED)
			return 0;
		fallthrough;
	case KFD_IOCTL_SVM_ATTR_PREFETCH_LOC:
		if (attr->value == KFD_IOCTL_SVM_LOCATION_SYSMEM)
			return 0;
		fallthrough;
	case KFD_IOCTL_SVM_ATTR_ACCESS:
	case KFD_IOCTL_SVM_ATTR_ACCESS_IN_PLACE:
	case KFD_IOCTL_SVM_ATTR_NO_ACCESS:
		return sg_gpu_index(p, attr->value) < 0 ? -EINVAL : 0;
	case KFD_IOCTL_SVM_ATTR_SET_FLAGS:
	case KFD_IOCTL_SVM_ATTR_CLR_FLAGS:
	case KFD_IOCTL_SVM_ATTR_GRANULARITY:
		return 0;
	default:
		return -EINVAL;
	}
}

/* Ordinary memory of the process, which no BO is mapped over on a GPU. */
static int sg_svm_check_range(struct sg_process *p, unsigned long first, unsigned long last)
{
	unsigned long at = first << PAGE_SHIFT, end = (last + 1) << PAGE_SHIFT;
	struct vm_area_struct *vma;
	unsigned int i;
	int err = 0;

	mmap_read_lock(p->mm);
	while (at < end && !err) {
		vma = vma_lookup(p->mm, at);
		if (!vma || vma->vm_flags & SG_DEVICE_VMA)
			err = -EFAULT;
		else
			at = vma->vm_end;
	}
	mmap_read_unlock(p->mm);
	for (i = 0; i < p->n_pdds && !err; i++)
		if (p->pdds[i]->vm && sg_vm_overlaps(p->pdds[i]->vm, first, last))
			err = -EADDRINUSE;
	return err;
}

/* True: GPU mappings must change. */
static bool sg_svm_apply(struct sg_process *p, struct sg_svm_attrs *to, const struct kfd_ioctl_svm_attribute *attr)
{
	unsigned long gpu;

	switch (attr->type) {
	case KFD_IOCTL_SVM_ATTR_PREFERRED_LOC:
		to->preferred = attr->value;
		return false;
	case KFD_IOCTL_SVM_ATTR_PREFETCH_LOC:
		to->prefetch = attr->value;
		return false;
	case KFD_IOCTL_SVM_ATTR_SET_FLAGS:
		to->flags |= attr->value;
		return true;
	case KFD_IOCTL_SVM_ATTR_CLR_FLAGS:
		to->flags &= ~attr->value;
		return true;
	case KFD_IOCTL_SVM_ATTR_GRANULARITY:
		to->granularity = min_t(u32, attr->value, 0x3f);
		return false;
	}
	gpu = BIT(sg_gpu_index(p, attr->value));
	to->access &= ~gpu;
	to->in_place &= ~gpu;
	if (attr->type == KFD_IOCTL_SVM_ATTR_ACCESS)
		to->access |= gpu;
	else if (attr->type == KFD_IOCTL_SVM_ATTR_ACCESS_IN_PLACE)
		to->in_place |= gpu;
	return !p->xnack;
}

/* Makes ranges for every page of [first, last]. */
static int sg_svm_fill(struct sg_process *p, unsigned long first, unsigned long last)
{
	struct sg_svm_range *range;
	struct sg_svm_attrs attrs;
	unsigned long at = first;

	sg_svm_defaults(p, &attrs);
	while (at <= last) {
		unsigned long end = last;

		range = sg_svm_first(p, at, last);
		if (range && range->node.start <= at) {
			at = range->node.last + 1;
			continue;
		}
		if (range)
			end = range->node.start - 1;
		range = sg_svm_insert(p, at, end, &attrs);
		if (IS_ERR(range))
			return PTR_ERR(range);
		at = end + 1;
	}
	return 0;
}

/* The part of a range that is in [first, last]; the result is where to continue. */
static int sg_svm_set_one(struct sg_svm_range *range, unsigned long first, unsigned long last, u32 count,
			  const struct kfd_ioctl_svm_attribute *attrs, unsigned long *at)
{
	struct sg_process *p = range->p;
	struct sg_svm_attrs new = range->attrs;
	bool update = false;
	u32 i;

	*at = min(range->node.last, last) + 1;
	for (i = 0; i < count; i++)
		update |= sg_svm_apply(p, &new, &attrs[i]);
	if (!memcmp(&new, &range->attrs, sizeof(new)) && range->mapped)
		return 0;
	range = sg_svm_carve(range, first, last);
	if (IS_ERR_OR_NULL(range))
		return -ENOMEM;
	range->attrs = new;
	spin_lock(&p->svm.tree_lock);
	range->mapped &= new.access | new.in_place;
	spin_unlock(&p->svm.tree_lock);
	return update ? sg_svm_map(range, sg_svm_wanted(range)) : 0;
}

static int sg_svm_set_locked(struct sg_process *p, unsigned long first, unsigned long last, u32 count,
			     const struct kfd_ioctl_svm_attribute *attrs)
{
	struct sg_svm_range *range;
	unsigned long at = first;
	int err, result;

	sg_svm_flush(p);
	err = sg_svm_check_range(p, first, last);
	result = err ?: sg_svm_fill(p, first, last);
	if (result)
		return result;
	/* A range that fails does not keep the others from being set: the last
	 * error is returned. */
	while (at <= last && (range = sg_svm_first(p, at, last))) {
		err = sg_svm_set_one(range, first, last, count, attrs, &at);
		result = err ?: result;
	}
	return result;
}

static bool sg_svm_bound(struct sg_process *p)
{
	unsigned int i;

	for (i = 0; i < p->n_pdds; i++)
		if (p->pdds[i]->vm)
			return true;
	return false;
}

int sg_svm_set(struct sg_process *p, u64 first, u64 npages, u32 count,
	       const struct kfd_ioctl_svm_attribute *attrs)
{
	int err = 0;
	u32 i;

	for (i = 0; i < count && !err; i++)
		err = sg_svm_check_attr(p, &attrs[i]);
	if (err)
		return err;
	if (!sg_svm_bound(p) || !npages || first + npages < first || first + npages > ULONG_MAX >> PAGE_SHIFT)
		return -EINVAL;
	if (!mmget_not_zero(p->mm))
		return -ESRCH;
	mutex_lock(&p->mem_lock);
	mutex_lock(&p->svm.lock);
	err = sg_svm_set_locked(p, first, first + npages - 1, count, attrs);
	mutex_unlock(&p->svm.lock);
	mutex_unlock(&p->mem_lock);
	mmput_async(p->mm);
	return err;
}

/* The common attributes of all ranges of [first, last]. */
static void sg_svm_common(struct sg_process *p, unsigned long first, unsigned long last, struct sg_svm_attrs *all,
			  u32 *flags_or)
{
	struct sg_svm_range *range = sg_svm_first(p, first, last);

	if (!range) {
		sg_svm_defaults(p, all);
		*flags_or = all->flags;
		return;
	}
	*all = range->attrs;
	*flags_or = 0;
	for (; range; range = sg_svm_next(range, first, last)) {
		if (all->preferred != range->attrs.preferred)
			all->preferred = KFD_IOCTL_SVM_LOCATION_UNDEFINED;
		if (all->prefetch != range->attrs.prefetch)
			all->prefetch = KFD_IOCTL_SVM_LOCATION_UNDEFINED;
		all->flags &= range->attrs.flags;
		*flags_or |= range->attrs.flags;
		all->granularity = min(all->granularity, range->attrs.granularity);
		all->access &= range->attrs.access;
		all->in_place &= range->attrs.in_place;
	}
}

static int sg_svm_answer(struct sg_process *p, const struct sg_svm_attrs *all, u32 flags_or,
			 struct kfd_ioctl_svm_attribute *attr)
{
	int gpu;

	switch (attr->type) {
	case KFD_IOCTL_SVM_ATTR_PREFERRED_LOC:
		attr->value = all->preferred;
		return 0;
	case KFD_IOCTL_SVM_ATTR_PREFETCH_LOC:
		attr->value = all->prefetch;
		return 0;
	case KFD_IOCTL_SVM_ATTR_SET_FLAGS:
		attr->value = all->flags;
		return 0;
	case KFD_IOCTL_SVM_ATTR_CLR_FLAGS:
		attr->value = ~flags_or;
		return 0;
	case KFD_IOCTL_SVM_ATTR_GRANULARITY:
		attr->value = all->granularity;
		return 0;
	case KFD_IOCTL_SVM_ATTR_ACCESS:
		gpu = sg_gpu_index(p, attr->value);
		if (gpu < 0)
			return -EINVAL;
		attr->type = all->access & BIT(gpu) ? KFD_IOCTL_SVM_ATTR_ACCESS :
			     all->in_place & BIT(gpu) ? KFD_IOCTL_SVM_ATTR_ACCESS_IN_PLACE :
							KFD_IOCTL_SVM_ATTR_NO_ACCESS;
		return 0;
	default:
		return -EINVAL;
	}
}

int sg_svm_get(struct sg_process *p, u64 first, u64 npages, u32 count, struct kfd_ioctl_svm_attribute *attrs)
{
	struct sg_svm_attrs all;
	u32 flags_or, i;
	int err;

	if (!npages || first + npages < first || first + npages > ULONG_MAX >> PAGE_SHIFT)
		return -EINVAL;
	if (!mmget_not_zero(p->mm))
		return -ESRCH;
	mutex_lock(&p->mem_lock);
	mutex_lock(&p->svm.lock);
	sg_svm_flush(p);
	err = sg_svm_check_range(p, first, first + npages - 1);
	if (!err)
		sg_svm_common(p, first, first + npages - 1, &all, &flags_or);
	mutex_unlock(&p->svm.lock);
	mutex_unlock(&p->mem_lock);
	mmput_async(p->mm);
	for (i = 0; i < count && !err; i++)
		err = sg_svm_answer(p, &all, flags_or, &attrs[i]);
	return err;
}

int sg_svm_ioctl(struct sg_process *p, struct kfd_ioctl_svm_args *args)
{
	u64 first = args->start_addr >> PAGE_SHIFT, npages = args->size >> PAGE_SHIFT;

	if (!PAGE_ALIGNED(args->start_addr | args->size) || !args->start_addr || !args->size)
		return -EINVAL;
	switch (args->op) {
	case KFD_IOCTL_SVM_OP_SET_ATTR:
		return sg_svm_set(p, first, npages, args->nattr, args->attrs);
	case KFD_IOCTL_SVM_OP_GET_ATTR:
		return sg_svm_get(p, first, npages, args->nattr, args->attrs);
	default:
		return -EINVAL;
	}
}

bool sg_svm_overlaps(struct sg_process *p, u64 start, u64 size)
{
	bool overlaps;

	mutex_lock(&p->mem_lock);
	mutex_lock(&p->svm.lock);
	sg_svm_flush(p);
	overlaps = sg_svm_first(p, start >> PAGE_SHIFT, (start + size - 1) >> PAGE_SHIFT);
	mutex_unlock(&p->svm.lock);
	mutex_unlock(&p->mem_lock);
	return overlaps;
}

bool sg_svm_always_mapped(struct sg_pdd *pdd, u64 start, u64 size)
{
	unsigned long at = start >> PAGE_SHIFT, last = (start + size - 1) >> PAGE_SHIFT;
	struct sg_process *p = pdd->process;
	struct sg_svm_range *range;

	mutex_lock(&p->svm.lock);
	while (at <= last) {
		range = sg_svm_first(p, at, at);
		if (!range || !(range->mapped & BIT(pdd->dev->index)) ||
		    !(range->attrs.flags & KFD_IOCTL_SVM_FLAG_GPU_ALWAYS_MAPPED))
			break;
		at = range->node.last + 1;
	}
	mutex_unlock(&p->svm.lock);
	return at > last;
}
