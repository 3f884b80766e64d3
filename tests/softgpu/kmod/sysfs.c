// SPDX-License-Identifier: GPL-2.0 OR MIT
/* /sys/class/kfd/kfd/proc/<pid>: VRAM, queues and eviction times of a process. */
#include <linux/device.h>
#include <linux/kobject.h>
#include <linux/ktime.h>
#include <linux/sysfs.h>

#include "chardev.h"
#include "process.h"

static ssize_t sg_vram_show(struct kobject *kobj, struct kobj_attribute *attr, char *to)
{
	struct sg_pdd *pdd = container_of(attr, struct sg_pdd, vram_attr);

	return sysfs_emit(to, "%lld", atomic64_read(&pdd->vram));
}

static ssize_t sg_evicted_show(struct kobject *kobj, struct kobj_attribute *attr, char *to)
{
	struct sg_pdd *pdd = container_of(attr, struct sg_pdd, evict_attr);
	u64 ns;

	mutex_lock(&pdd->process->queue_lock);
	ns = pdd->evicted_ns + (pdd->evicted ? ktime_get_ns() - pdd->evicted_at : 0);
	mutex_unlock(&pdd->process->queue_lock);
	return sysfs_emit(to, "%llu\n", div_u64(ns, NSEC_PER_MSEC));
}

static void sg_attr_init(struct kobj_attribute *attr, const char *name,
			 ssize_t (*show)(struct kobject *, struct kobj_attribute *, char *))
{
	sysfs_attr_init(&attr->attr);
	attr->attr.name = name;
	attr->attr.mode = 0444;
	attr->show = show;
}

static int sg_pdd_sysfs_add(struct sg_pdd *pdd)
{
	char name[24];
	int err;

	snprintf(pdd->vram_name, sizeof(pdd->vram_name), "vram_%u", pdd->dev->gpu_id);
	sg_attr_init(&pdd->vram_attr, pdd->vram_name, sg_vram_show);
	err = sysfs_create_file(pdd->process->kobj, &pdd->vram_attr.attr);
	if (err)
		return err;
	snprintf(name, sizeof(name), "stats_%u", pdd->dev->gpu_id);
	pdd->stats = kobject_create_and_add(name, pdd->process->kobj);
	if (!pdd->stats)
		return -ENOMEM;
	sg_attr_init(&pdd->evict_attr, "evicted_ms", sg_evicted_show);
	return sysfs_create_file(pdd->stats, &pdd->evict_attr.attr);
}

/* As with the driver, a process may exist without its folder. */
void sg_process_sysfs_add(struct sg_process *p)
{
	struct kobject *proc = sg_chardev_proc();
	unsigned int i;
	char name[16];

	if (!proc)
		return;
	snprintf(name, sizeof(name), "%d", sg_process_pid(p));
	p->kobj = kobject_create_and_add(name, proc);
	if (!p->kobj)
		return;
	p->kobj_queues = kobject_create_and_add("queues", p->kobj);
	for (i = 0; i < p->n_pdds; i++)
		if (sg_pdd_sysfs_add(p->pdds[i]))
			return;
}

void sg_process_sysfs_del(struct sg_process *p)
{
	unsigned int i;

	if (!p->kobj)
		return;
	for (i = 0; i < p->n_pdds; i++) {
		struct sg_pdd *pdd = p->pdds[i];

		if (pdd->vram_attr.show)
			sysfs_remove_file(p->kobj, &pdd->vram_attr.attr);
		if (!pdd->stats)
			continue;
		if (pdd->evict_attr.show)
			sysfs_remove_file(pdd->stats, &pdd->evict_attr.attr);
		kobject_del(pdd->stats);
		kobject_put(pdd->stats);
	}
	if (p->kobj_queues) {
		kobject_del(p->kobj_queues);
		kobject_put(p->kobj_queues);
	}
	kobject_del(p->kobj);
	kobject_put(p->kobj);
	p->kobj = NULL;
	p->kobj_queues = NULL;
}
