// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Lists of BOs that a submission uses: DRM_AMDGPU_BO_LIST. */
#include <drm/drm_gem.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "bo_list.h"
#include "ctx.h"

/* BOs in one list. */
#define SG_BO_LIST_MAX	(128 * 1024)

static void sg_bo_list_release(struct kref *ref)
{
	struct sg_bo_list *list = container_of(ref, struct sg_bo_list, ref);
	unsigned int i;

	for (i = 0; i < list->count; i++)
		if (list->bos[i])
			sg_bo_put(list->bos[i]);
	kvfree(list);
	sg_died(SG_BO_LISTS);
}

void sg_bo_list_put(struct sg_bo_list *list)
{
	kref_put(&list->ref, sg_bo_list_release);
}

struct sg_bo_list *sg_bo_list_get(struct sg_file *file, u32 handle)
{
	struct sg_bo_list *list;

	mutex_lock(&file->exec->lock);
	list = handle <= INT_MAX ? idr_find(&file->exec->bo_lists, handle) : NULL;
	if (list)
		kref_get(&list->ref);
	mutex_unlock(&file->exec->lock);
	return list ?: ERR_PTR(-ENOENT);
}

/* User space may have smaller or larger entries than this kernel. */
static int sg_bo_list_entry(const struct drm_amdgpu_bo_list_in *in, unsigned int i, u32 *handle)
{
	struct drm_amdgpu_bo_list_entry entry = {};
	u64 at = in->bo_info_ptr + (u64)i * in->bo_info_size;

	if (copy_from_user(&entry, u64_to_user_ptr(at), min_t(u64, sizeof(entry), in->bo_info_size)))
		return -EFAULT;
	*handle = entry.bo_handle;
	return 0;
}

static int sg_bo_list_fill(struct sg_file *file, const struct drm_amdgpu_bo_list_in *in,
			   struct sg_bo_list *list)
{
	struct drm_gem_object *obj;
	unsigned int i;
	u32 handle;
	int err;

	for (i = 0; i < list->count; i++) {
		err = sg_bo_list_entry(in, i, &handle);
		if (err)
			return err;
		obj = drm_gem_object_lookup(file->drm, handle);
		if (!obj)
			return -ENOENT;
		list->bos[i] = sg_bo_of(obj);
		if (list->bos[i]->host && list->bos[i]->host->mm != current->mm)
			return -EPERM;
		cond_resched();
	}
	return 0;
}

struct sg_bo_list *sg_bo_list_create(struct sg_file *file, const struct drm_amdgpu_bo_list_in *in)
{
	struct sg_bo_list *list;
	int err;

	if (in->bo_number > SG_BO_LIST_MAX)
		return ERR_PTR(-EINVAL);
	list = kvzalloc(struct_size(list, bos, in->bo_number), GFP_KERNEL_ACCOUNT);
	if (!list)
		return ERR_PTR(-ENOMEM);
	kref_init(&list->ref);
	list->count = in->bo_number;
	sg_born(SG_BO_LISTS);
	err = sg_bo_list_fill(file, in, list);
	if (err) {
		sg_bo_list_put(list);
		return ERR_PTR(err);
	}
	return list;
}

static int sg_bo_list_op_create(struct sg_file *file, const struct drm_amdgpu_bo_list_in *in)
{
	struct sg_bo_list *list = sg_bo_list_create(file, in);
	int handle;

	if (IS_ERR(list))
		return PTR_ERR(list);
	mutex_lock(&file->exec->lock);
	handle = idr_alloc(&file->exec->bo_lists, list, 1, 0, GFP_KERNEL);
	mutex_unlock(&file->exec->lock);
	if (handle < 0)
		sg_bo_list_put(list);
	return handle;
}

static int sg_bo_list_op_update(struct sg_file *file, const struct drm_amdgpu_bo_list_in *in)
{
	struct sg_bo_list *list = sg_bo_list_create(file, in), *old;

	if (IS_ERR(list))
		return PTR_ERR(list);
	mutex_lock(&file->exec->lock);
	old = in->list_handle <= INT_MAX ?
	      idr_replace(&file->exec->bo_lists, list, in->list_handle) : ERR_PTR(-ENOENT);
	mutex_unlock(&file->exec->lock);
	sg_bo_list_put(IS_ERR(old) ? list : old);
	return PTR_ERR_OR_ZERO(old);
}

static void sg_bo_list_op_destroy(struct sg_file *file, u32 handle)
{
	struct sg_bo_list *list;

	mutex_lock(&file->exec->lock);
	list = handle <= INT_MAX ? idr_remove(&file->exec->bo_lists, handle) : NULL;
	mutex_unlock(&file->exec->lock);
	if (list)
		sg_bo_list_put(list);
}

int sg_bo_list_ioctl(struct drm_device *drm, void *data, struct drm_file *drm_file)
{
	struct sg_file *file = sg_file_of(drm_file);
	union drm_amdgpu_bo_list *args = data;
	struct drm_amdgpu_bo_list_in in = args->in;
	int handle = in.list_handle, err = 0;

	switch (in.operation) {
	case AMDGPU_BO_LIST_OP_CREATE:
		err = handle = sg_bo_list_op_create(file, &in);
		break;
	case AMDGPU_BO_LIST_OP_DESTROY:
		sg_bo_list_op_destroy(file, in.list_handle);
		handle = 0;
		break;
	case AMDGPU_BO_LIST_OP_UPDATE:
		err = sg_bo_list_op_update(file, &in);
		break;
	default:
		err = -EINVAL;
	}
	if (err < 0)
		return err;
	memset(args, 0, sizeof(*args));
	args->out.list_handle = handle;
	return 0;
}
