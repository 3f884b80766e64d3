// SPDX-License-Identifier: GPL-2.0 OR MIT
/* The GPU's page table of one DRM file: addresses of BOs. */
#include <linux/mm.h>
#include <linux/slab.h>

#include "svm.h"
#include "vm.h"

void sg_vm_init(struct sg_vm *vm, struct sg_device *dev)
{
	vm->dev = dev;
	vm->process = NULL;
	mutex_init(&vm->change);
	spin_lock_init(&vm->lock);
	vm->tree = RB_ROOT_CACHED;
	init_waitqueue_head(&vm->unused);
}

void sg_vm_release(struct sg_vm *vm)
{
	spin_lock(&vm->lock);
	vm->process = NULL;
	spin_unlock(&vm->lock);
}

struct sg_process *sg_vm_process(struct sg_vm *vm)
{
	struct sg_process *p;

	spin_lock(&vm->lock);
	p = vm->process;
	if (p && !kref_get_unless_zero(&p->ref))
		p = NULL;
	spin_unlock(&vm->lock);
	return p;
}

static struct sg_mapping *sg_mapping_of(struct interval_tree_node *node)
{
	return node ? container_of(node, struct sg_mapping, node) : NULL;
}

/* With vm->lock or vm->change held. */
static struct sg_mapping *sg_vm_first(struct sg_vm *vm, unsigned long first, unsigned long last)
{
	return sg_mapping_of(interval_tree_iter_first(&vm->tree, first, last));
}

int sg_vm_map_locked(struct sg_vm *vm, struct sg_bo *bo, u64 va, u64 offset, u64 size, u32 flags,
		     struct sg_mapping **out)
{
	unsigned long first = va >> PAGE_SHIFT, last = (va + size - 1) >> PAGE_SHIFT;
	struct sg_mapping *mapping;

	lockdep_assert_held(&vm->change);
	if (!size || !PAGE_ALIGNED(va | offset | size) || va + size <= va)
		return -EINVAL;
	if (bo && (offset + size < offset || offset + size > bo->base.size))
		return -EINVAL;
	if (sg_vm_first(vm, first, last))
		return -EINVAL;
	mapping = kzalloc(sizeof(*mapping), GFP_KERNEL);
	if (!mapping)
		return -ENOMEM;
	mapping->node.start = first;
	mapping->node.last = last;
	mapping->vm = vm;
	mapping->bo = bo;
	mapping->offset = offset;
	mapping->flags = flags;
	if (bo)
		sg_bo_get(bo);
	spin_lock(&vm->lock);
	interval_tree_insert(&mapping->node, &vm->tree);
	spin_unlock(&vm->lock);
	if (out)
		*out = mapping;
	return 0;
}

int sg_vm_map(struct sg_vm *vm, struct sg_bo *bo, u64 va, u64 offset, u64 size, u32 flags,
	      struct sg_mapping **out)
{
	int err;

	mutex_lock(&vm->change);
	err = sg_vm_map_locked(vm, bo, va, offset, size, flags, out);
	mutex_unlock(&vm->change);
	return err;
}

/* Like the flush of a TLB: when it returns, nothing uses the mapping any more. */
void sg_vm_unmap_locked(struct sg_mapping *mapping)
{
	struct sg_vm *vm = mapping->vm;

	lockdep_assert_held(&vm->change);
	spin_lock(&vm->lock);
	interval_tree_remove(&mapping->node, &vm->tree);
	mapping->gone = true;
	spin_unlock(&vm->lock);
	wait_event(vm->unused, !READ_ONCE(mapping->users));
	/* The last user may still hold the lock. */
	spin_lock(&vm->lock);
	spin_unlock(&vm->lock);
	if (mapping->bo)
		sg_bo_put(mapping->bo);
	kfree(mapping);
}

void sg_vm_unmap(struct sg_mapping *mapping)
{
	struct sg_vm *vm = mapping->vm;

	mutex_lock(&vm->change);
	sg_vm_unmap_locked(mapping);
	mutex_unlock(&vm->change);
}

void sg_mapping_put(struct sg_mapping *mapping)
{
	struct sg_vm *vm = mapping->vm;

	spin_lock(&vm->lock);
	if (!--mapping->users && mapping->gone)
		wake_up_all(&vm->unused);
	spin_unlock(&vm->lock);
}

void sg_vm_fini(struct sg_vm *vm)
{
	struct sg_mapping *mapping;

	mutex_lock(&vm->change);
	while ((mapping = sg_vm_first(vm, 0, ULONG_MAX)))
		sg_vm_unmap_locked(mapping);
	mutex_unlock(&vm->change);
	mutex_destroy(&vm->change);
}

/* The rest of a mapping before or after a hole in it. */
static int sg_vm_remainder(struct sg_mapping *from, u64 va, u64 size)
{
	u64 start = (u64)from->node.start << PAGE_SHIFT;
	struct sg_mapping *made;
	int err;

	if (!size)
		return 0;
	err = sg_vm_map_locked(from->vm, from->bo, va, from->bo ? from->offset + (va - start) : 0,
			       size, from->flags, &made);
	if (!err)
		made->gem = true;
	return err;
}

int sg_vm_clear(struct sg_vm *vm, u64 va, u64 size)
{
	unsigned long first = va >> PAGE_SHIFT, last = (va + size - 1) >> PAGE_SHIFT;
	struct sg_mapping *mapping, copy;
	struct interval_tree_node *node;
	int err;

	for (node = interval_tree_iter_first(&vm->tree, first, last); node;
	     node = interval_tree_iter_next(node, first, last))
		if (!sg_mapping_of(node)->gem)
			return -EINVAL;
	while ((mapping = sg_vm_first(vm, first, last))) {
		u64 start = (u64)mapping->node.start << PAGE_SHIFT;
		u64 end = ((u64)mapping->node.last + 1) << PAGE_SHIFT;

		copy = *mapping;
		if (copy.bo)
			sg_bo_get(copy.bo);
		sg_vm_unmap_locked(mapping);
		err = sg_vm_remainder(&copy, start, va > start ? va - start : 0);
		if (!err)
			err = sg_vm_remainder(&copy, va + size, end > va + size ? end - (va + size) : 0);
		if (copy.bo)
			sg_bo_put(copy.bo);
		if (err)
			return err;
	}
	return 0;
}

struct sg_mapping *sg_vm_find_gem(struct sg_vm *vm, struct sg_bo *bo, u64 va)
{
	struct sg_mapping *mapping = sg_vm_first(vm, va >> PAGE_SHIFT, va >> PAGE_SHIFT);

	if (!mapping || !mapping->gem || mapping->bo != bo || mapping->node.start != va >> PAGE_SHIFT)
		return NULL;
	return mapping;
}

int sg_vm_each(struct sg_vm *vm, struct sg_bo *bo,
	       int (*each)(struct sg_mapping *mapping, void *data), void *data)
{
	struct interval_tree_node *node;
	int err = 0;

	for (node = interval_tree_iter_first(&vm->tree, 0, ULONG_MAX); node && !err;
	     node = interval_tree_iter_next(node, 0, ULONG_MAX))
		if (sg_mapping_of(node)->bo == bo)
			err = each(sg_mapping_of(node), data);
	return err;
}

void sg_vm_forget(struct sg_vm *vm, struct sg_bo *bo)
{
	struct interval_tree_node *node, *next;

	mutex_lock(&vm->change);
	for (node = interval_tree_iter_first(&vm->tree, 0, ULONG_MAX); node; node = next) {
		next = interval_tree_iter_next(node, 0, ULONG_MAX);
		if (sg_mapping_of(node)->gem && sg_mapping_of(node)->bo == bo)
			sg_vm_unmap_locked(sg_mapping_of(node));
	}
	mutex_unlock(&vm->change);
}

/* PRT: reads are zero, writes go nowhere. */
static int sg_vm_prt_page(struct sg_vm *vm, bool write, struct sg_page_ref *ref)
{
	ref->page = write ? vm->dev->sink : ZERO_PAGE(0);
	return 0;
}

int sg_vm_page(struct sg_vm *vm, u64 va, bool write, gfp_t gfp, struct sg_page_ref *ref)
{
	unsigned long page = va >> PAGE_SHIFT;
	struct sg_mapping *mapping;
	int err;

	memset(ref, 0, sizeof(*ref));
	spin_lock(&vm->lock);
	mapping = sg_vm_first(vm, page, page);
	if (mapping && mapping->bo && !(mapping->flags & (write ? SG_MAP_WRITE : SG_MAP_READ))) {
		spin_unlock(&vm->lock);
		return -EFAULT;
	}
	if (!mapping) {
		err = vm->process ? sg_svm_page(vm->process, vm->dev, va, write, ref) : -EFAULT;
		spin_unlock(&vm->lock);
		return err;
	}
	mapping->users++;
	spin_unlock(&vm->lock);
	ref->mapping = mapping;
	if (!mapping->bo)
		return sg_vm_prt_page(vm, write, ref);
	err = sg_bo_page(mapping->bo, page - mapping->node.start + (mapping->offset >> PAGE_SHIFT),
			 write, gfp, ref);
	if (err)
		sg_page_put(ref);
	return err;
}

int sg_vm_populate(struct sg_vm *vm, u64 va)
{
	struct sg_page_ref ref;
	int err = sg_vm_page(vm, va, true, GFP_KERNEL, &ref);

	if (!err)
		sg_page_put(&ref);
	return err;
}

struct sg_bo *sg_vm_lookup_bo(struct sg_vm *vm, u64 va, u64 size)
{
	unsigned long first = va >> PAGE_SHIFT;
	struct sg_mapping *mapping;
	struct sg_bo *bo = NULL;

	spin_lock(&vm->lock);
	mapping = sg_vm_first(vm, first, first);
	if (mapping && mapping->bo && mapping->node.start == first &&
	    (!size || mapping->node.last - first + 1 == size >> PAGE_SHIFT)) {
		bo = mapping->bo;
		sg_bo_get(bo);
	}
	spin_unlock(&vm->lock);
	return bo;
}

bool sg_vm_overlaps(struct sg_vm *vm, unsigned long first, unsigned long last)
{
	bool overlaps;

	spin_lock(&vm->lock);
	overlaps = sg_vm_first(vm, first, last);
	spin_unlock(&vm->lock);
	return overlaps;
}

bool sg_vm_mapped(struct sg_vm *vm, u64 va)
{
	return sg_vm_overlaps(vm, va >> PAGE_SHIFT, va >> PAGE_SHIFT);
}
