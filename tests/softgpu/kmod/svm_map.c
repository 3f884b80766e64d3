// SPDX-License-Identifier: GPL-2.0 OR MIT
/* SVM ranges on GPUs: mapping, notifications, the worker that maps again, retry faults. */
#include <linux/jiffies.h>
#include <linux/mm.h>
#include <linux/sched/mm.h>

#include "svm.h"
#include "svm_range.h"
#include "vm.h"

#define SG_SVM_DELAY_MS	1
#define SG_DEVICE_VMA	(VM_IO | VM_PFNMAP | VM_MIXEDMAP)

unsigned long sg_svm_wanted(const struct sg_svm_range *range)
{
	if (!range->p->xnack)
		return range->attrs.access | range->attrs.in_place;
	/* The others map it by retry faults. */
	if (range->attrs.in_place)
		return range->attrs.in_place;
	return range->mapped || range->attrs.flags & KFD_IOCTL_SVM_FLAG_GPU_ALWAYS_MAPPED ?
	       range->attrs.access : 0;
}

/* The GPU may not write memory that the CPU may not write. */
static bool sg_range_readonly(struct sg_svm_range *range)
{
	unsigned long start = range->host.start, end = start + (range->host.npages << PAGE_SHIFT);
	VMA_ITERATOR(vmi, range->p->mm, start);
	struct vm_area_struct *vma;
	bool readonly = false;

	mmap_read_lock(range->p->mm);
	for_each_vma_range(vmi, vma, end)
		readonly |= !(vma->vm_flags & VM_WRITE);
	mmap_read_unlock(range->p->mm);
	return readonly;
}

int sg_svm_map(struct sg_svm_range *range, unsigned long gpus)
{
	struct sg_process *p = range->p;
	int err;

	if (!gpus)
		return 0;
	if (!mmget_not_zero(p->mm))
		return -ESRCH;
	range->host.readonly = sg_range_readonly(range);
	err = sg_host_fault(&range->host);
	mmput_async(p->mm);
	spin_lock(&p->svm.tree_lock);
	range->mapped = err ? 0 : gpus;
	spin_unlock(&p->svm.tree_lock);
	return err;
}

/* With notify_lock held. */
static void sg_svm_note_gone(struct sg_svm_range *range, const struct mmu_notifier_range *change)
{
	unsigned long first = max(change->start >> PAGE_SHIFT, range->node.start);
	unsigned long last = min((change->end - 1) >> PAGE_SHIFT, range->node.last);

	if (range->n_gone == SG_SVM_MAX_GONE) {
		range->n_gone = 1;
		first = range->node.start;
		last = range->node.last;
		range->gone[0].first = first;
		range->gone[0].last = last;
		return;
	}
	range->gone[range->n_gone].first = first;
	range->gone[range->n_gone].last = last;
	range->n_gone++;
}

bool sg_svm_changed(struct mmu_interval_notifier *notifier, const struct mmu_notifier_range *change,
		    unsigned long seq)
{
	struct sg_host *host = container_of(notifier, struct sg_host, notifier);
	struct sg_svm_range *range = host->owner;
	struct sg_process *p = range->p;

	if (!mmu_notifier_range_blockable(change))
		return false;
	mutex_lock(&p->notify_lock);
	if (change->event == MMU_NOTIFY_UNMAP)
		sg_svm_note_gone(range, change);
	if (READ_ONCE(range->mapped) &&
	    (!p->xnack || range->attrs.flags & KFD_IOCTL_SVM_FLAG_GPU_ALWAYS_MAPPED)) {
		atomic_inc(&range->invalid);
		if (atomic_inc_return(&p->svm.evicted) == 1) {
			if (!READ_ONCE(p->mm_gone))
				sg_process_evict_queues(p, SG_EVICT_SVM);
			queue_delayed_work(system_freezable_wq, &p->svm.restore,
					   msecs_to_jiffies(SG_SVM_DELAY_MS));
		}
	}
	sg_host_invalidate(host, seq, false);
	mutex_unlock(&p->notify_lock);
	return true;
}

/* False: something is missing or has changed meanwhile. */
static bool sg_svm_restore_once(struct sg_process *p)
{
	struct sg_svm_range *range;
	int evicted, invalid;

	sg_svm_flush(p);
	evicted = atomic_read(&p->svm.evicted);
	for (range = sg_svm_first(p, 0, ULONG_MAX); range; range = sg_svm_next(range, 0, ULONG_MAX)) {
		invalid = atomic_read(&range->invalid);
		if (!invalid)
			continue;
		if (sg_svm_map(range, sg_svm_wanted(range)))
			return false;
		if (atomic_cmpxchg(&range->invalid, invalid, 0) != invalid)
			return false;
	}
	return atomic_cmpxchg(&p->svm.evicted, evicted, 0) == evicted;
}

void sg_svm_restore_work(struct work_struct *work)
{
	struct sg_process *p = container_of(to_delayed_work(work), struct sg_process, svm.restore);
	bool done;

	if (!atomic_read(&p->svm.evicted) || READ_ONCE(p->mm_gone))
		return;
	mutex_lock(&p->mem_lock);
	mutex_lock(&p->svm.lock);
	done = sg_svm_restore_once(p);
	if (done)
		sg_process_restore_queues(p);
	mutex_unlock(&p->svm.lock);
	mutex_unlock(&p->mem_lock);
	if (done)
		return;
	queue_delayed_work(system_freezable_wq, &p->svm.restore, msecs_to_jiffies(SG_SVM_DELAY_MS));
	sg_smi_queue_restore_rescheduled(p->mm);
}

int sg_svm_page(struct sg_process *p, struct sg_device *dev, u64 va, bool write, struct sg_page_ref *ref)
{
	struct interval_tree_node *node;
	struct sg_svm_range *range;
	int err = -EFAULT;

	spin_lock(&p->svm.tree_lock);
	node = interval_tree_iter_first(&p->svm.tree, va >> PAGE_SHIFT, va >> PAGE_SHIFT);
	range = node ? container_of(node, struct sg_svm_range, node) : NULL;
	if (range && range->mapped & BIT(dev->index) &&
	    !(write && (range->host.readonly || range->attrs.flags & KFD_IOCTL_SVM_FLAG_GPU_RO))) {
		ref->index = (va >> PAGE_SHIFT) - range->node.start;
		err = sg_host_page(&range->host, ref->index, ref);
	}
	spin_unlock(&p->svm.tree_lock);
	return err;
}

static bool sg_pages_mapped_by_bo(struct sg_process *p, unsigned long page)
{
	unsigned int i;

	for (i = 0; i < p->n_pdds; i++)
		if (p->pdds[i]->vm && sg_vm_mapped(p->pdds[i]->vm, (u64)page << PAGE_SHIFT))
			return true;
	return false;
}

/* A range of its own around the page: ordinary memory, as much of 2 MiB as no other range has. */
static struct sg_svm_range *sg_svm_around(struct sg_process *p, unsigned long page)
{
	unsigned long first = ALIGN_DOWN(page, BIT(SG_SVM_GRANULARITY)), last = first + BIT(SG_SVM_GRANULARITY) - 1;
	struct sg_svm_attrs attrs;
	struct sg_svm_range *other;
	struct vm_area_struct *vma;

	mmap_read_lock(p->mm);
	vma = vma_lookup(p->mm, page << PAGE_SHIFT);
	if (vma && !(vma->vm_flags & SG_DEVICE_VMA)) {
		first = max(first, vma->vm_start >> PAGE_SHIFT);
		last = min(last, (vma->vm_end - 1) >> PAGE_SHIFT);
	} else {
		last = 0;
	}
	mmap_read_unlock(p->mm);
	if (!last || sg_pages_mapped_by_bo(p, page))
		return ERR_PTR(-EFAULT);
	for (other = sg_svm_first(p, first, last); other; other = sg_svm_next(other, first, last)) {
		if (other->node.last < page)
			first = max(first, other->node.last + 1);
		else
			last = min(last, other->node.start - 1);
	}
	sg_svm_defaults(p, &attrs);
	return sg_svm_insert(p, first, last, &attrs);
}

static int sg_svm_fault_locked(struct sg_process *p, unsigned long page, unsigned int gpu, bool write)
{
	struct sg_svm_range *range;

	sg_svm_flush(p);
	range = sg_svm_first(p, page, page);
	if (!range)
		range = sg_svm_around(p, page);
	if (IS_ERR(range))
		return PTR_ERR(range);
	if (!((range->attrs.access | range->attrs.in_place) & BIT(gpu)))
		return -EFAULT;
	if (write && range->attrs.flags & KFD_IOCTL_SVM_FLAG_GPU_RO)
		return -EFAULT;
	return sg_svm_map(range, range->mapped | BIT(gpu));
}

int sg_svm_fault(struct sg_vm *vm, u64 va, bool write)
{
	struct sg_process *p = sg_vm_process(vm);
	int err = -EFAULT;

	if (!p)
		return -EFAULT;
	if (p->xnack && mmget_not_zero(p->mm)) {
		mutex_lock(&p->mem_lock);
		mutex_lock(&p->svm.lock);
		err = sg_svm_fault_locked(p, va >> PAGE_SHIFT, vm->dev->index, write);
		mutex_unlock(&p->svm.lock);
		mutex_unlock(&p->mem_lock);
		mmput_async(p->mm);
	}
	sg_process_put(p);
	return err;
}
