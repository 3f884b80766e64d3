/* SPDX-License-Identifier: GPL-2.0 OR MIT */
#ifndef SOFTGPU_VM_H
#define SOFTGPU_VM_H

#include "softgpu.h"

/* With vm->change held. Removes [va, va + size) from GEM_VA's mappings, splitting at its ends. */
int sg_vm_clear(struct sg_vm *vm, u64 va, u64 size);
int sg_vm_map_locked(struct sg_vm *vm, struct sg_bo *bo, u64 va, u64 offset, u64 size, u32 flags,
		     struct sg_mapping **out);
void sg_vm_unmap_locked(struct sg_mapping *mapping);
/* The mapping by GEM_VA of this BO that begins at va, or NULL. */
struct sg_mapping *sg_vm_find_gem(struct sg_vm *vm, struct sg_bo *bo, u64 va);
/* All mappings by GEM_VA of this BO: its handle is closed. */
void sg_vm_forget(struct sg_vm *vm, struct sg_bo *bo);
/* Calls `each` for every mapping of this BO, until it returns an error. */
int sg_vm_each(struct sg_vm *vm, struct sg_bo *bo,
	       int (*each)(struct sg_mapping *mapping, void *data), void *data);
/* The process that owns this compute VM has ended. */
void sg_vm_release(struct sg_vm *vm);
/* That process, with a reference, or NULL. */
struct sg_process *sg_vm_process(struct sg_vm *vm);
/* Is anything mapped in these pages? */
bool sg_vm_overlaps(struct sg_vm *vm, unsigned long first, unsigned long last);
void sg_mapping_put(struct sg_mapping *mapping);

#endif
