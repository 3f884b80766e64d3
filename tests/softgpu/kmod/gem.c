// SPDX-License-Identifier: GPL-2.0 OR MIT
/* GEM ioctls of a render node, except mapping into the GPU and host memory. */
#include <drm/drm_vma_manager.h>
#include <linux/dma-resv.h>
#include <linux/slab.h>

#include "gem.h"
#include "vm.h"

#define SG_NORMAL_DOMAINS	(AMDGPU_GEM_DOMAIN_CPU | AMDGPU_GEM_DOMAIN_GTT | AMDGPU_GEM_DOMAIN_VRAM)
#define SG_ON_CHIP_DOMAINS	(AMDGPU_GEM_DOMAIN_GDS | AMDGPU_GEM_DOMAIN_GWS | AMDGPU_GEM_DOMAIN_OA)

/* Flags that user space may set; bits 0-6, 9-16 of those that the headers define. */
#define SG_CREATE_FLAGS	(AMDGPU_GEM_CREATE_CPU_ACCESS_REQUIRED | AMDGPU_GEM_CREATE_NO_CPU_ACCESS | \
			 AMDGPU_GEM_CREATE_CPU_GTT_USWC | AMDGPU_GEM_CREATE_VRAM_CLEARED | \
			 AMDGPU_GEM_CREATE_VM_ALWAYS_VALID | AMDGPU_GEM_CREATE_EXPLICIT_SYNC | \
			 AMDGPU_GEM_CREATE_VRAM_WIPE_ON_RELEASE | AMDGPU_GEM_CREATE_ENCRYPTED | \
			 AMDGPU_GEM_CREATE_GFX12_DCC | AMDGPU_GEM_CREATE_DISCARDABLE | \
			 AMDGPU_GEM_CREATE_COHERENT | AMDGPU_GEM_CREATE_UNCACHED | \
			 AMDGPU_GEM_CREATE_EXT_COHERENT | AMDGPU_GEM_CREATE_VRAM_CONTIGUOUS)

void sg_gem_close_object(struct drm_gem_object *obj, struct drm_file *file)
{
	sg_vm_forget(&sg_file_of(file)->vm, sg_bo_of(obj));
}

/* One special domain, or any of the usual ones. */
static bool sg_domains_valid(u64 domains)
{
	u64 special = domains & AMDGPU_GEM_DOMAIN_MASK & ~SG_NORMAL_DOMAINS;

	if (domains & ~(u64)AMDGPU_GEM_DOMAIN_MASK)
		return false;
	return !special || (!(domains & SG_NORMAL_DOMAINS) && !(special & (special - 1)));
}

static struct sg_bo *sg_gem_new(struct sg_device *dev, const struct drm_amdgpu_gem_create_in *in)
{
	u64 flags = in->domain_flags | AMDGPU_GEM_CREATE_VRAM_CLEARED | AMDGPU_GEM_CREATE_VRAM_WIPE_ON_RELEASE;
	struct sg_bo *bo;

	if (in->domains & SG_ON_CHIP_DOMAINS) {
		if (flags & AMDGPU_GEM_CREATE_VM_ALWAYS_VALID)
			return ERR_PTR(-EINVAL);
		flags |= AMDGPU_GEM_CREATE_NO_CPU_ACCESS;
	}
	if (in->domains & AMDGPU_GEM_DOMAIN_VRAM) {
		bo = sg_bo_create(dev, in->bo_size, in->alignment, AMDGPU_GEM_DOMAIN_VRAM, flags);
		/* Full VRAM: the BO gets system memory, as evictable buffers do. */
		if (PTR_ERR_OR_ZERO(bo) != -ENOMEM)
			return bo;
	}
	return sg_bo_create(dev, in->bo_size, in->alignment, AMDGPU_GEM_DOMAIN_GTT, flags);
}

int sg_gem_create_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	union drm_amdgpu_gem_create *args = data;
	struct sg_bo *bo;
	u32 handle;
	int err;

	if (args->in.domain_flags & ~(u64)SG_CREATE_FLAGS || !sg_domains_valid(args->in.domains))
		return -EINVAL;
	if (args->in.domain_flags & AMDGPU_GEM_CREATE_ENCRYPTED)
		return -EINVAL;
	bo = sg_gem_new(sg_device_of(drm), &args->in);
	if (IS_ERR(bo))
		return PTR_ERR(bo);
	if (args->in.domains)
		bo->preferred = args->in.domains;
	err = drm_gem_handle_create(file, &bo->base, &handle);
	sg_bo_put(bo);
	if (err)
		return err;
	memset(args, 0, sizeof(*args));
	args->out.handle = handle;
	return 0;
}

int sg_gem_mmap_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	union drm_amdgpu_gem_mmap *args = data;
	struct drm_gem_object *obj = drm_gem_object_lookup(file, args->in.handle);
	struct sg_bo *bo;
	int err = 0;

	memset(args, 0, sizeof(*args));
	if (!obj)
		return -ENOENT;
	bo = sg_bo_of(obj);
	if (bo->store == SG_STORE_HOST || bo->flags & AMDGPU_GEM_CREATE_NO_CPU_ACCESS)
		err = -EPERM;
	else
		args->out.addr_ptr = drm_vma_node_offset_addr(&obj->vma_node);
	drm_gem_object_put(obj);
	return err;
}

/* Time left until an absolute time in ns; the top bit means for ever. */
static unsigned long sg_gem_timeout(u64 until)
{
	s64 left;

	if ((s64)until < 0)
		return MAX_SCHEDULE_TIMEOUT;
	left = ktime_to_ns(ktime_sub(ns_to_ktime(until), ktime_get()));
	return left < 0 ? 0 : min_t(u64, nsecs_to_jiffies(left), MAX_SCHEDULE_TIMEOUT - 1);
}

int sg_gem_wait_idle_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	union drm_amdgpu_gem_wait_idle *args = data;
	struct drm_gem_object *obj = drm_gem_object_lookup(file, args->in.handle);
	long left;

	if (!obj)
		return -ENOENT;
	left = dma_resv_wait_timeout(obj->resv, DMA_RESV_USAGE_READ, true, sg_gem_timeout(args->in.timeout));
	drm_gem_object_put(obj);
	if (left < 0)
		return left;
	memset(args, 0, sizeof(*args));
	args->out.status = left == 0;
	return 0;
}

static void sg_metadata_get(struct sg_bo *bo, struct drm_amdgpu_gem_metadata *args)
{
	args->data.tiling_info = bo->tiling;
	args->data.flags = bo->metadata_flags;
	args->data.data_size_bytes = bo->metadata_size;
	memcpy(args->data.data, bo->metadata, bo->metadata_size);
}

static int sg_metadata_set(struct sg_bo *bo, const struct drm_amdgpu_gem_metadata *args)
{
	if (args->data.data_size_bytes > sizeof(args->data.data))
		return -EINVAL;
	bo->tiling = args->data.tiling_info;
	/* Flags belong to the bytes, and the last ones stay when the bytes are removed. */
	if (args->data.data_size_bytes)
		bo->metadata_flags = args->data.flags;
	bo->metadata_size = args->data.data_size_bytes;
	memcpy(bo->metadata, args->data.data, bo->metadata_size);
	return 0;
}

int sg_gem_metadata_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	struct drm_amdgpu_gem_metadata *args = data;
	struct drm_gem_object *obj = drm_gem_object_lookup(file, args->handle);
	struct sg_bo *bo;
	int err = 0;

	static_assert(sizeof(bo->metadata) == sizeof(args->data.data));
	if (!obj)
		return -ENOENT;
	bo = sg_bo_of(obj);
	mutex_lock(&bo->metadata_lock);
	if (args->op == AMDGPU_GEM_METADATA_OP_GET_METADATA)
		sg_metadata_get(bo, args);
	else if (args->op == AMDGPU_GEM_METADATA_OP_SET_METADATA)
		err = sg_metadata_set(bo, args);
	mutex_unlock(&bo->metadata_lock);
	drm_gem_object_put(obj);
	return err;
}

static int sg_op_create_info(struct sg_bo *bo, struct drm_amdgpu_gem_op *args)
{
	struct drm_amdgpu_gem_create_in info = {
		.bo_size = bo->base.size,
		.alignment = bo->alignment,
		.domains = bo->preferred,
		.domain_flags = bo->flags,
	};

	return copy_to_user(u64_to_user_ptr(args->value), &info, sizeof(info)) ? -EFAULT : 0;
}

static int sg_op_placement(struct sg_bo *bo, struct drm_amdgpu_gem_op *args)
{
	if (bo->store == SG_STORE_HOST)
		return -EPERM;
	if ((bo->foreign || bo->origin) && args->value & AMDGPU_GEM_DOMAIN_VRAM)
		return -EINVAL;
	return 0;	/* a hint, without effect here */
}

#ifdef AMDGPU_GEM_OP_GET_MAPPING_INFO
struct sg_mapping_list {
	struct drm_amdgpu_gem_vm_entry *entries;
	u32 room, count;
};

static int sg_mapping_list_add(struct sg_mapping *mapping, void *data)
{
	struct sg_mapping_list *list = data;

	if (list->count < list->room) {
		struct drm_amdgpu_gem_vm_entry *entry = &list->entries[list->count];

		entry->addr = (u64)mapping->node.start << PAGE_SHIFT;
		entry->size = ((u64)mapping->node.last - mapping->node.start + 1) << PAGE_SHIFT;
		entry->offset = mapping->offset;
		entry->flags = mapping->flags;
	}
	list->count++;
	return 0;
}

static int sg_op_mappings(struct sg_bo *bo, struct drm_amdgpu_gem_op *args, struct sg_vm *vm)
{
	struct sg_mapping_list list = { .room = args->num_entries };
	int err = 0;

	if (list.room > INT_MAX / sizeof(*list.entries))
		return -EINVAL;
	list.entries = kvcalloc(list.room, sizeof(*list.entries), GFP_KERNEL_ACCOUNT | __GFP_NOWARN);
	if (!list.entries)
		return -ENOMEM;
	mutex_lock(&vm->change);
	sg_vm_each(vm, bo, sg_mapping_list_add, &list);
	mutex_unlock(&vm->change);
	if (list.count <= list.room &&
	    copy_to_user(u64_to_user_ptr(args->value), list.entries, list.count * sizeof(*list.entries)))
		err = -EFAULT;
	args->num_entries = list.count;
	kvfree(list.entries);
	return err;
}
#endif

int sg_gem_op_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	struct drm_amdgpu_gem_op *args = data;
	struct drm_gem_object *obj;
	int err;

#ifdef AMDGPU_GEM_OP_GET_MAPPING_INFO
	if (args->padding)
		return -EINVAL;
#endif
	obj = drm_gem_object_lookup(file, args->handle);
	if (!obj)
		return -ENOENT;
	switch (args->op) {
	case AMDGPU_GEM_OP_GET_GEM_CREATE_INFO:
		err = sg_op_create_info(sg_bo_of(obj), args);
		break;
	case AMDGPU_GEM_OP_SET_PLACEMENT:
		err = sg_op_placement(sg_bo_of(obj), args);
		break;
#ifdef AMDGPU_GEM_OP_GET_MAPPING_INFO
	case AMDGPU_GEM_OP_GET_MAPPING_INFO:
		err = sg_op_mappings(sg_bo_of(obj), args, &sg_file_of(file)->vm);
		break;
#endif
	default:
		err = -EINVAL;
	}
	drm_gem_object_put(obj);
	return err;
}

#ifdef DRM_IOCTL_AMDGPU_GEM_LIST_HANDLES
static void sg_list_entry(struct drm_amdgpu_gem_list_handles_entry *entry, struct sg_bo *bo, int handle)
{
	entry->gem_handle = handle;
	entry->size = bo->base.size;
	entry->preferred_domains = bo->preferred;
	entry->alloc_flags = bo->flags & SG_CREATE_FLAGS;
	entry->alignment = PAGE_ALIGN(bo->alignment) >> PAGE_SHIFT;	/* in pages here */
	if (bo->foreign || bo->origin)
		entry->flags |= AMDGPU_GEM_LIST_HANDLES_FLAG_IS_IMPORT;
}

int sg_gem_list_handles_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	struct drm_amdgpu_gem_list_handles *args = data;
	struct drm_amdgpu_gem_list_handles_entry *entries;
	struct drm_gem_object *obj;
	u32 count = 0, room;
	int handle, err = 0;

	spin_lock(&file->table_lock);
	idr_for_each_entry(&file->object_idr, obj, handle)
		count++;
	spin_unlock(&file->table_lock);
	room = count;
	if (args->num_entries < count || !count) {
		args->num_entries = count;
		return 0;
	}
	entries = kvcalloc(room, sizeof(*entries), GFP_KERNEL);
	if (!entries)
		return -ENOMEM;
	count = 0;
	spin_lock(&file->table_lock);
	idr_for_each_entry(&file->object_idr, obj, handle) {
		if (!obj)
			continue;
		if (count == room) {
			err = -EAGAIN;
			break;
		}
		sg_list_entry(&entries[count++], sg_bo_of(obj), handle);
	}
	spin_unlock(&file->table_lock);
	args->num_entries = count;
	if (!err && copy_to_user(u64_to_user_ptr(args->entries), entries, count * sizeof(*entries)))
		err = -EFAULT;
	kvfree(entries);
	return err;
}
#endif
