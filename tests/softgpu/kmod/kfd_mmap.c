// SPDX-License-Identifier: GPL-2.0 OR MIT
/* mmap of /dev/kfd: doorbells, the event page, a page of registers. */
#include <linux/mm.h>

#include "chardev.h"
#include "doorbell.h"

static int sg_mmio_mmap(struct sg_device *dev, struct vm_area_struct *vma)
{
	if (vma->vm_end - vma->vm_start != PAGE_SIZE)
		return -EINVAL;
	vm_flags_set(vma, VM_IO | VM_DONTCOPY | VM_DONTEXPAND | VM_NORESERVE | VM_DONTDUMP | VM_PFNMAP);
	return remap_pfn_range(vma, vma->vm_start, page_to_pfn(dev->mmio), PAGE_SIZE, vma->vm_page_prot);
}

int sg_kfd_mmap(struct file *filp, struct vm_area_struct *vma)
{
	struct sg_process *p = filp->private_data;
	u64 offset = (u64)vma->vm_pgoff << PAGE_SHIFT;
	struct sg_device *dev = sg_device_by_id(offset >> SG_MMAP_GPU_SHIFT & 0xffff);
	struct sg_pdd *pdd;

	/* A tracer may not map. */
	if (p->lead != current->group_leader)
		return -EBADF;
	switch (offset & 3ULL << SG_MMAP_TYPE_SHIFT) {
	case SG_MMAP_DOORBELL:
		pdd = dev ? sg_pdd_of(p, dev) : NULL;
		return pdd ? sg_doorbells_mmap(pdd, vma) : -ENODEV;
	case SG_MMAP_EVENTS:
		return sg_event_mmap(p, vma);
	case SG_MMAP_RESERVED:
		return -EINVAL;
	default:
		return dev ? sg_mmio_mmap(dev, vma) : -ENODEV;
	}
}
