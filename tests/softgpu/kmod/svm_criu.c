// SPDX-License-Identifier: GPL-2.0 OR MIT
/* SVM ranges in CRIU's images: attributes are dumped, kept by RESTORE, and set by RESUME. */
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "criu.h"
#include "svm.h"
#include "svm_range.h"

#define SG_COMMON_ATTRS	4

struct sg_svm_priv {
	u32 object_type;
	u64 start;			/* pages */
	u64 npages;
	struct kfd_ioctl_svm_attribute attrs[];	/* the common ones, then one a GPU */
};

static_assert(offsetof(struct sg_svm_priv, attrs) == 24);

struct sg_svm_saved {
	struct list_head link;
	struct sg_svm_priv *data;
};

static u32 sg_attr_count(struct sg_process *p)
{
	return SG_COMMON_ATTRS + p->n_pdds;
}

static size_t sg_svm_priv_bytes(struct sg_process *p)
{
	return struct_size_t(struct sg_svm_priv, attrs, sg_attr_count(p));
}

void sg_svm_criu_info(struct sg_process *p, u32 *count, u64 *bytes)
{
	struct sg_svm_range *range;

	*count = 0;
	mutex_lock(&p->mem_lock);
	mutex_lock(&p->svm.lock);
	sg_svm_flush(p);
	for (range = sg_svm_first(p, 0, ULONG_MAX); range; range = sg_svm_next(range, 0, ULONG_MAX))
		(*count)++;
	mutex_unlock(&p->svm.lock);
	mutex_unlock(&p->mem_lock);
	*bytes = *count * sg_svm_priv_bytes(p);
}

/* The first range at or after this page. */
static bool sg_svm_find(struct sg_process *p, unsigned long at, u64 *first, u64 *npages)
{
	struct sg_svm_range *range;

	mutex_lock(&p->svm.lock);
	range = sg_svm_first(p, at, ULONG_MAX);
	if (range) {
		*first = range->node.start;
		*npages = range->node.last - range->node.start + 1;
	}
	mutex_unlock(&p->svm.lock);
	return range;
}

static void sg_svm_questions(struct sg_process *p, struct kfd_ioctl_svm_attribute *attrs)
{
	unsigned int i;

	attrs[0].type = KFD_IOCTL_SVM_ATTR_PREFERRED_LOC;
	attrs[1].type = KFD_IOCTL_SVM_ATTR_PREFETCH_LOC;
	attrs[2].type = KFD_IOCTL_SVM_ATTR_SET_FLAGS;
	attrs[3].type = KFD_IOCTL_SVM_ATTR_GRANULARITY;
	for (i = 0; i < p->n_pdds; i++) {
		attrs[SG_COMMON_ATTRS + i].type = KFD_IOCTL_SVM_ATTR_ACCESS;
		attrs[SG_COMMON_ATTRS + i].value = p->pdds[i]->user_gpu_id;
	}
}

int sg_svm_criu_dump(struct sg_process *p, u8 __user *priv, u64 *offset, u64 limit)
{
	size_t bytes = sg_svm_priv_bytes(p);
	struct sg_svm_priv *to;
	unsigned long at = 0;
	u64 first, npages;
	int err = 0;

	to = kzalloc(bytes, GFP_KERNEL);
	if (!to)
		return -ENOMEM;
	while (!err && sg_svm_find(p, at, &first, &npages)) {
		memset(to, 0, bytes);
		to->object_type = SG_CRIU_SVM;
		to->start = first;
		to->npages = npages;
		sg_svm_questions(p, to->attrs);
		err = *offset + bytes > limit ? -EINVAL : 0;
		if (!err)
			err = sg_svm_get(p, first, npages, sg_attr_count(p), to->attrs);
		if (!err && copy_to_user(priv + *offset, to, bytes))
			err = -EFAULT;
		*offset += bytes;
		at = first + npages;
	}
	kfree(to);
	return err;
}

int sg_svm_criu_restore(struct sg_process *p, u8 __user *priv, u64 *offset, u64 size)
{
	size_t bytes = sg_svm_priv_bytes(p);
	struct sg_svm_saved *saved;

	if (*offset + bytes > size)
		return -EINVAL;
	saved = kzalloc(sizeof(*saved), GFP_KERNEL_ACCOUNT);
	if (!saved)
		return -ENOMEM;
	saved->data = memdup_user(priv + *offset, bytes);
	if (IS_ERR(saved->data)) {
		int err = PTR_ERR(saved->data);

		kfree(saved);
		return err;
	}
	*offset += bytes;
	list_add_tail(&saved->link, &p->svm.restored);
	return 0;
}

/* Drops a prefetch that never happened; clears flags that were not set. */
static int sg_svm_set_saved(struct sg_process *p, const struct sg_svm_priv *data)
{
	u32 count = sg_attr_count(p), flags = U32_MAX, i;
	struct kfd_ioctl_svm_attribute *attrs = kcalloc(count + 1, sizeof(*attrs), GFP_KERNEL);
	int err;

	if (!attrs)
		return -ENOMEM;
	memcpy(attrs, data->attrs, count * sizeof(*attrs));
	for (i = 0; i < count; i++) {
		if (attrs[i].type == KFD_IOCTL_SVM_ATTR_SET_FLAGS)
			flags = attrs[i].value;
		if (attrs[i].type == KFD_IOCTL_SVM_ATTR_PREFETCH_LOC &&
		    attrs[i].value == KFD_IOCTL_SVM_LOCATION_UNDEFINED) {
			attrs[i].type = KFD_IOCTL_SVM_ATTR_SET_FLAGS;
			attrs[i].value = 0;
		}
	}
	attrs[count].type = KFD_IOCTL_SVM_ATTR_CLR_FLAGS;
	attrs[count].value = ~flags;
	err = sg_svm_set(p, data->start, data->npages, count + 1, attrs);
	kfree(attrs);
	return err;
}

void sg_svm_criu_drop(struct sg_process *p)
{
	struct sg_svm_saved *saved, *next;

	list_for_each_entry_safe(saved, next, &p->svm.restored, link) {
		list_del(&saved->link);
		kfree(saved->data);
		kfree(saved);
	}
}

int sg_svm_criu_resume(struct sg_process *p)
{
	struct sg_svm_saved *saved;
	int err = 0;

	list_for_each_entry(saved, &p->svm.restored, link) {
		err = sg_svm_set_saved(p, saved->data);
		if (err)
			break;
	}
	sg_svm_criu_drop(p);
	return err;
}
