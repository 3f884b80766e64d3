// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Doorbells. A store to the page is a plain store, as on hardware, without any
 * notification. To notice it without endless polling, the driver unmaps the
 * page from user space when all is quiet. The next store faults, which maps the
 * page again and kicks the queues. While work is left the page stays mapped,
 * and idle queues poll it.
 */
#include <linux/mm.h>

#include "doorbell.h"
#include "queue.h"

/* The value of a doorbell that was not rung. */
#define SG_SILENT	U64_MAX

int sg_doorbells_alloc(struct sg_pdd *pdd)
{
	struct page *page;

	if (READ_ONCE(pdd->doorbell_page))
		return 0;
	page = alloc_pages(GFP_KERNEL_ACCOUNT, get_order(SG_DOORBELL_BYTES));
	if (!page)
		return -ENOMEM;
	memset(page_address(page), 0xff, SG_DOORBELL_BYTES);
	/* A queue and a mapping may both be the first. */
	if (cmpxchg(&pdd->doorbell_page, NULL, page))
		__free_pages(page, get_order(SG_DOORBELL_BYTES));
	WRITE_ONCE(pdd->doorbells, page_address(pdd->doorbell_page));
	return 0;
}

void sg_doorbells_free(struct sg_pdd *pdd)
{
	if (pdd->doorbell_page)
		__free_pages(pdd->doorbell_page, get_order(SG_DOORBELL_BYTES));
	pdd->doorbell_page = NULL;
	pdd->doorbells = NULL;
}

static void sg_doorbells_kick(struct sg_pdd *pdd)
{
	struct sg_process *p = pdd->process;
	struct sg_queue *q;

	mutex_lock(&p->queue_lock);
	list_for_each_entry(q, &p->queues->all, link)
		if (q->pdd == pdd)
			sg_run_kick(q);
	mutex_unlock(&p->queue_lock);
}

static struct sg_doorbell_map *sg_doorbell_map(struct sg_pdd *pdd)
{
	return &pdd->process->queues->doorbell_maps[pdd->dev->index];
}

static vm_fault_t sg_doorbell_fault(struct vm_fault *vmf)
{
	struct sg_pdd *pdd = vmf->vma->vm_private_data;
	unsigned long page = (vmf->address - vmf->vma->vm_start) >> PAGE_SHIFT;
	vm_fault_t result;

	page += vmf->vma->vm_pgoff - sg_doorbell_map(pdd)->pgoff;
	if (page >= SG_DOORBELL_BYTES >> PAGE_SHIFT)
		return VM_FAULT_SIGBUS;
	result = vmf_insert_pfn(vmf->vma, vmf->address, page_to_pfn(pdd->doorbell_page) + page);
	/* The store follows this fault; the queues poll for it for a while. */
	sg_doorbells_kick(pdd);
	return result;
}

static void sg_doorbell_open(struct vm_area_struct *vma)
{
	struct sg_doorbell_map *map = sg_doorbell_map(vma->vm_private_data);

	mutex_lock(&map->lock);
	map->vmas++;
	if (map->mapping && map->mapping != vma->vm_file->f_mapping)
		map->scattered = true;
	map->mapping = vma->vm_file->f_mapping;
	mutex_unlock(&map->lock);
}

static void sg_doorbell_close(struct vm_area_struct *vma)
{
	struct sg_doorbell_map *map = sg_doorbell_map(vma->vm_private_data);

	mutex_lock(&map->lock);
	if (!--map->vmas) {
		map->mapping = NULL;
		map->scattered = false;
	}
	mutex_unlock(&map->lock);
}

static const struct vm_operations_struct sg_doorbell_vm_ops = {
	.open = sg_doorbell_open,
	.close = sg_doorbell_close,
	.fault = sg_doorbell_fault,
};

int sg_doorbells_mmap(struct sg_pdd *pdd, struct vm_area_struct *vma)
{
	int err;

	if (vma->vm_end - vma->vm_start != SG_DOORBELL_BYTES)
		return -EINVAL;
	mutex_lock(&sg_doorbell_map(pdd)->lock);
	err = sg_doorbells_alloc(pdd);
	sg_doorbell_map(pdd)->pgoff = vma->vm_pgoff;
	mutex_unlock(&sg_doorbell_map(pdd)->lock);
	if (err)
		return err;
	vm_flags_set(vma, VM_IO | VM_DONTCOPY | VM_DONTEXPAND | VM_NORESERVE | VM_DONTDUMP |
			  VM_PFNMAP);
	vma->vm_private_data = pdd;
	vma->vm_ops = &sg_doorbell_vm_ops;
	sg_doorbell_open(vma);
	return 0;
}

bool sg_doorbell_rung(struct sg_queue *q)
{
	u64 *doorbell = &q->pdd->doorbells[q->doorbell];

	return READ_ONCE(*doorbell) != SG_SILENT && xchg(doorbell, SG_SILENT) != SG_SILENT;
}

bool sg_doorbell_waiting(const struct sg_queue *q)
{
	return READ_ONCE(q->pdd->doorbells[q->doorbell]) != SG_SILENT;
}

bool sg_doorbells_cool(struct sg_pdd *pdd)
{
	struct sg_doorbell_map *map = sg_doorbell_map(pdd);
	bool cold;

	mutex_lock(&map->lock);
	cold = !map->scattered;
	if (map->mapping && cold)
		unmap_mapping_pages(map->mapping, map->pgoff, SG_DOORBELL_BYTES >> PAGE_SHIFT, true);
	mutex_unlock(&map->lock);
	return cold;
}
