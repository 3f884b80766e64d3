// SPDX-License-Identifier: GPL-2.0 OR MIT
/* /sys/class/kfd/kfd/proc/<pid>/queues/<id>/{size,type,gpuid} */
#include <linux/slab.h>
#include <linux/sysfs.h>

#include "queue.h"

struct sg_queue_folder {
	struct kobject kobj;
	u64 size;
	u32 type;
	u32 gpuid;
};

static struct sg_queue_folder *sg_folder_of(struct kobject *kobj)
{
	return container_of(kobj, struct sg_queue_folder, kobj);
}

static ssize_t size_show(struct kobject *kobj, struct kobj_attribute *attr, char *to)
{
	return sysfs_emit(to, "%llu", sg_folder_of(kobj)->size);
}

static ssize_t type_show(struct kobject *kobj, struct kobj_attribute *attr, char *to)
{
	return sysfs_emit(to, "%u", sg_folder_of(kobj)->type);
}

static ssize_t gpuid_show(struct kobject *kobj, struct kobj_attribute *attr, char *to)
{
	return sysfs_emit(to, "%u", sg_folder_of(kobj)->gpuid);
}

static struct kobj_attribute sg_size_attr = __ATTR_RO(size);
static struct kobj_attribute sg_type_attr = __ATTR_RO(type);
static struct kobj_attribute sg_gpuid_attr = __ATTR_RO(gpuid);

static struct attribute *sg_queue_attrs[] = {
	&sg_size_attr.attr,
	&sg_type_attr.attr,
	&sg_gpuid_attr.attr,
	NULL,
};
ATTRIBUTE_GROUPS(sg_queue);

static void sg_queue_folder_release(struct kobject *kobj)
{
	kfree(sg_folder_of(kobj));
}

static const struct kobj_type sg_queue_ktype = {
	.release = sg_queue_folder_release,
	.sysfs_ops = &kobj_sysfs_ops,
	.default_groups = sg_queue_groups,
};

/* A queue works without its folder: a failure is not reported. */
void sg_queue_sysfs_add(struct sg_queue *q)
{
	struct sg_queue_folder *folder;

	if (!q->process->kobj_queues)
		return;
	folder = kzalloc(sizeof(*folder), GFP_KERNEL);
	if (!folder)
		return;
	folder->size = q->props.size;
	folder->type = q->props.type;
	folder->gpuid = q->pdd->dev->gpu_id;
	if (kobject_init_and_add(&folder->kobj, &sg_queue_ktype, q->process->kobj_queues, "%u",
				 q->id))
		kobject_put(&folder->kobj);
	else
		q->sysfs = &folder->kobj;
}

void sg_queue_sysfs_del(struct sg_queue *q)
{
	if (!q->sysfs)
		return;
	kobject_del(q->sysfs);
	kobject_put(q->sysfs);
	q->sysfs = NULL;
}
