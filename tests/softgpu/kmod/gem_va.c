// SPDX-License-Identifier: GPL-2.0 OR MIT
/* GEM_VA: mappings by user space in the GPU's address space of its DRM file. */
#include <drm/drm_syncobj.h>
#include <linux/dma-fence-chain.h>
#include <linux/overflow.h>
#include <linux/slab.h>

#include "gem.h"
#include "vm.h"

#define SG_VA_BOTTOM		SZ_64K
#define SG_VA_TOP_RESERVED	(SZ_64K + SZ_2M + SZ_2M)
#define SG_VA_SIZE		(1ULL << 48)
#define SG_VA_HOLE_START	0x0000800000000000ULL
#define SG_VA_HOLE_END		0xffff800000000000ULL
#define SG_VA_HOLE_MASK		0x0000ffffffffffffULL

#ifndef AMDGPU_VM_PAGE_NOALLOC
#define AMDGPU_VM_PAGE_NOALLOC	0
#endif

static int sg_va_check(struct drm_amdgpu_gem_va *args)
{
	const u32 usual = AMDGPU_VM_DELAY_UPDATE | AMDGPU_VM_PAGE_READABLE | AMDGPU_VM_PAGE_WRITEABLE |
			  AMDGPU_VM_PAGE_EXECUTABLE | AMDGPU_VM_MTYPE_MASK | AMDGPU_VM_PAGE_NOALLOC;
	const u32 prt = AMDGPU_VM_DELAY_UPDATE | AMDGPU_VM_PAGE_PRT;
	u64 end;

	if (args->va_address < SG_VA_BOTTOM)
		return -EINVAL;
	if (args->va_address >= SG_VA_HOLE_START && args->va_address < SG_VA_HOLE_END)
		return -EINVAL;
	args->va_address &= SG_VA_HOLE_MASK;
	if (check_add_overflow(args->va_address, args->map_size, &end) || end > SG_VA_SIZE - SG_VA_TOP_RESERVED)
		return -EINVAL;
	if (args->flags & ~usual && args->flags & ~prt)
		return -EINVAL;
	if (args->operation < AMDGPU_VA_OP_MAP || args->operation > AMDGPU_VA_OP_REPLACE)
		return -EINVAL;
	return 0;
}

static int sg_va_map(struct sg_vm *vm, struct sg_bo *bo, const struct drm_amdgpu_gem_va *args)
{
	struct sg_mapping *mapping;
	u32 flags = args->flags & (SG_MAP_READ | SG_MAP_WRITE | SG_MAP_EXEC | SG_MAP_PRT);
	int err;

	err = sg_vm_map_locked(vm, bo, args->va_address, args->offset_in_bo, args->map_size, flags, &mapping);
	if (!err)
		mapping->gem = true;
	return err;
}

static int sg_va_operate(struct sg_vm *vm, struct sg_bo *bo, const struct drm_amdgpu_gem_va *args)
{
	struct sg_mapping *mapping;
	int err;

	switch (args->operation) {
	case AMDGPU_VA_OP_MAP:
		return sg_va_map(vm, bo, args);
	case AMDGPU_VA_OP_UNMAP:
		mapping = sg_vm_find_gem(vm, bo, args->va_address);
		if (!mapping)
			return -ENOENT;
		sg_vm_unmap_locked(mapping);
		return 0;
	case AMDGPU_VA_OP_CLEAR:
		if (!args->map_size || !PAGE_ALIGNED(args->va_address | args->map_size))
			return -EINVAL;
		return sg_vm_clear(vm, args->va_address, args->map_size);
	default:
		if (!args->map_size || !PAGE_ALIGNED(args->va_address | args->map_size | args->offset_in_bo))
			return -EINVAL;
		if (bo && (args->offset_in_bo > bo->base.size ||
			   args->map_size > bo->base.size - args->offset_in_bo))
			return -EINVAL;
		err = sg_vm_clear(vm, args->va_address, args->map_size);
		return err ?: sg_va_map(vm, bo, args);
	}
}

#if SG_MODERN
static int sg_va_wait_inputs(struct drm_file *file, const struct drm_amdgpu_gem_va *args)
{
	u32 *handles, i;
	int err = 0;

	if (!args->num_syncobj_handles)
		return 0;
	handles = memdup_user(u64_to_user_ptr(args->input_fence_syncobj_handles),
			      size_mul(sizeof(u32), args->num_syncobj_handles));
	if (IS_ERR(handles))
		return PTR_ERR(handles);
	for (i = 0; i < args->num_syncobj_handles && !err; i++) {
		struct dma_fence *fence;

		err = handles[i] ? drm_syncobj_find_fence(file, handles[i], 0, 0, &fence) : -EINVAL;
		if (!err) {
			err = dma_fence_wait(fence, true);
			dma_fence_put(fence);
		}
	}
	kfree(handles);
	return err;
}

/* Mappings are made at once: the point on the timeline is signalled when the ioctl returns. */
static int sg_va_signal(struct drm_file *file, const struct drm_amdgpu_gem_va *args)
{
	struct dma_fence_chain *chain;
	struct drm_syncobj *syncobj;
	struct dma_fence *fence;

	if (!args->vm_timeline_syncobj_out || args->flags & AMDGPU_VM_DELAY_UPDATE)
		return 0;
	syncobj = drm_syncobj_find(file, args->vm_timeline_syncobj_out);
	if (!syncobj)
		return -ENOENT;
	fence = dma_fence_get_stub();
	chain = args->vm_timeline_point ? dma_fence_chain_alloc() : NULL;
	if (chain)
		drm_syncobj_add_point(syncobj, chain, fence, args->vm_timeline_point);
	else if (!args->vm_timeline_point)
		drm_syncobj_replace_fence(syncobj, fence);
	dma_fence_put(fence);
	drm_syncobj_put(syncobj);
	return args->vm_timeline_point && !chain ? -ENOMEM : 0;
}
#else
static int sg_va_wait_inputs(struct drm_file *file, const struct drm_amdgpu_gem_va *args)
{
	return 0;
}

static int sg_va_signal(struct drm_file *file, const struct drm_amdgpu_gem_va *args)
{
	return 0;
}
#endif

int sg_gem_va_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	struct drm_amdgpu_gem_va *args = data;
	struct sg_vm *vm = &sg_file_of(file)->vm;
	struct drm_gem_object *obj = NULL;
	int err = sg_va_check(args);

	if (err)
		return err;
#if SG_MODERN
	if (args->flags & AMDGPU_VM_DELAY_UPDATE && args->vm_timeline_syncobj_out)
		return -EINVAL;
#endif
	if (args->operation != AMDGPU_VA_OP_CLEAR && !(args->flags & AMDGPU_VM_PAGE_PRT)) {
		obj = drm_gem_object_lookup(file, args->handle);
		if (!obj)
			return -ENOENT;
	}
	err = sg_va_wait_inputs(file, args);
	if (!err) {
		mutex_lock(&vm->change);
		err = sg_va_operate(vm, obj ? sg_bo_of(obj) : NULL, args);
		mutex_unlock(&vm->change);
	}
	if (!err)
		err = sg_va_signal(file, args);
	if (obj)
		drm_gem_object_put(obj);
	return err;
}
