// SPDX-License-Identifier: GPL-2.0 OR MIT
/* BOs in the CPU's address space: device mappings, as the BAR and GTT are. */
#include <drm/drm_vma_manager.h>
#include <linux/mm.h>

#include "cpu_map.h"
#include "softgpu.h"

static unsigned long sg_cpu_index(struct vm_area_struct *vma, unsigned long address)
{
	struct drm_gem_object *obj = vma->vm_private_data;

	return ((address - vma->vm_start) >> PAGE_SHIFT) + vma->vm_pgoff -
	       drm_vma_node_start(&obj->vma_node);
}

static void sg_cpu_judge_read(struct sg_page_ref *ref, size_t at, size_t len, unsigned long va)
{
	if (!sg_page_missing(ref, at, len))
		return;
	sg_violate(SG_CPU_READ_NOT_RESTORED, task_tgid_nr(current), ref->bo->dev, va, "cpu",
		   "page %lu of a BO that was made by pid %d", ref->index, ref->bo->pid);
}

/*
 * The driver does not see which bytes a CPU writes: a page that it writes to
 * counts as loaded. A missing page is mapped for reading only until then, so
 * that the driver can distinguish reads from writes.
 */
static vm_fault_t sg_cpu_fault(struct vm_fault *vmf)
{
	struct vm_area_struct *vma = vmf->vma;
	struct sg_bo *bo = sg_bo_of(vma->vm_private_data);
	bool write = vmf->flags & FAULT_FLAG_WRITE;
	unsigned long index = sg_cpu_index(vma, vmf->address), flags = vma->vm_flags;
	struct sg_page_ref ref = {};
	vm_fault_t result;

	if (index >= sg_bo_npages(bo) || sg_bo_page(bo, index, true, GFP_KERNEL, &ref))
		return VM_FAULT_SIGBUS;
	if (write)
		sg_page_written(&ref, 0, PAGE_SIZE);
	else
		sg_cpu_judge_read(&ref, 0, PAGE_SIZE, vmf->address);
	if (sg_page_missing(&ref, 0, PAGE_SIZE))
		flags &= ~VM_WRITE;
	result = vmf_insert_pfn_prot(vma, vmf->address, page_to_pfn(ref.page), vm_get_page_prot(flags));
	sg_page_put(&ref);
	return result;
}

static vm_fault_t sg_cpu_mkwrite(struct vm_fault *vmf)
{
	struct sg_bo *bo = sg_bo_of(vmf->vma->vm_private_data);
	struct sg_page_ref ref = {};

	if (sg_bo_page(bo, sg_cpu_index(vmf->vma, vmf->address), true, GFP_KERNEL, &ref))
		return VM_FAULT_SIGBUS;
	sg_page_written(&ref, 0, PAGE_SIZE);
	sg_page_put(&ref);
	return 0;
}

/* For /proc/pid/mem and ptrace, which real mappings answer too. */
static int sg_cpu_access(struct vm_area_struct *vma, unsigned long address, void *buf, int len, int write)
{
	struct sg_bo *bo = sg_bo_of(vma->vm_private_data);
	size_t at = offset_in_page(address), part = min_t(size_t, len, PAGE_SIZE - at);
	struct sg_page_ref ref = {};

	if (sg_cpu_index(vma, address) >= sg_bo_npages(bo))
		return -EIO;
	if (sg_bo_page(bo, sg_cpu_index(vma, address), true, GFP_KERNEL, &ref))
		return -EIO;
	if (write) {
		memcpy(page_address(ref.page) + at, buf, part);
		sg_page_written(&ref, at, part);
	} else {
		sg_cpu_judge_read(&ref, at, part, address);
		memcpy(buf, page_address(ref.page) + at, part);
	}
	sg_page_put(&ref);
	return part;
}

const struct vm_operations_struct sg_cpu_vm_ops = {
	.open = drm_gem_vm_open,
	.close = drm_gem_vm_close,
	.fault = sg_cpu_fault,
	.pfn_mkwrite = sg_cpu_mkwrite,
	.access = sg_cpu_access,
};

int sg_cpu_mmap(struct drm_gem_object *obj, struct vm_area_struct *vma)
{
	struct sg_bo *bo = sg_bo_of(obj);

	if (bo->store == SG_STORE_HOST || bo->flags & AMDGPU_GEM_CREATE_NO_CPU_ACCESS)
		return -EPERM;
	if (bo->store == SG_STORE_FIXED || vma_pages(vma) > sg_bo_npages(bo))
		return -EINVAL;
	/* libhsakmt maps memory for debuggers only as private and PROT_NONE. */
	if ((vma->vm_flags & (VM_SHARED | VM_MAYWRITE)) == VM_MAYWRITE && !(vma->vm_flags & VM_ACCESS_FLAGS))
		vm_flags_clear(vma, VM_MAYWRITE);
	if ((vma->vm_flags & (VM_SHARED | VM_MAYWRITE)) == VM_MAYWRITE)
		return -EINVAL;
	vma->vm_private_data = obj;
	vma->vm_ops = &sg_cpu_vm_ops;
	vm_flags_set(vma, VM_PFNMAP | VM_IO | VM_DONTEXPAND | VM_DONTDUMP);
	vma->vm_page_prot = vm_get_page_prot(vma->vm_flags);
	return 0;
}
