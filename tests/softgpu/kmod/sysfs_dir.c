// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Folders in sysfs whose files have a fixed text. */
#include <linux/slab.h>
#include <linux/sysfs.h>

#include "device.h"
#include "sysfs_dir.h"

struct sg_text {
	struct attribute attr;
	struct list_head link;
	char *text;
};

static ssize_t sg_text_show(struct kobject *kobj, struct attribute *attr, char *to)
{
	struct sg_dir *dir = container_of(kobj, struct sg_dir, kobj);

	if (dir->dev && sg_device_hidden(dir->dev))
		return -EPERM;
	return sysfs_emit(to, "%s", container_of(attr, struct sg_text, attr)->text);
}

static const struct sysfs_ops sg_text_ops = {
	.show = sg_text_show,
};

static void sg_dir_release(struct kobject *kobj)
{
	struct sg_dir *dir = container_of(kobj, struct sg_dir, kobj);
	struct sg_text *file, *next;

	list_for_each_entry_safe(file, next, &dir->files, link) {
		kfree(file->text);
		kfree(file);
	}
	kfree(dir);
}

static const struct kobj_type sg_dir_type = {
	.release = sg_dir_release,
	.sysfs_ops = &sg_text_ops,
};

struct sg_dir *sg_dir_add(struct sg_dir *parent, struct kobject *parent_kobj, const char *name)
{
	struct sg_dir *dir = kzalloc(sizeof(*dir), GFP_KERNEL);

	if (!dir)
		return ERR_PTR(-ENOMEM);
	INIT_LIST_HEAD(&dir->files);
	INIT_LIST_HEAD(&dir->dirs);
	INIT_LIST_HEAD(&dir->link);
	dir->dev = parent ? parent->dev : NULL;
	if (kobject_init_and_add(&dir->kobj, &sg_dir_type, parent ? &parent->kobj : parent_kobj, "%s", name)) {
		kobject_put(&dir->kobj);
		return ERR_PTR(-ENOMEM);
	}
	if (parent)
		list_add_tail(&dir->link, &parent->dirs);
	return dir;
}

int sg_dir_file(struct sg_dir *dir, const char *name, const char *format, ...)
{
	struct sg_text *file = kzalloc(sizeof(*file), GFP_KERNEL);
	va_list args;

	if (!file)
		return -ENOMEM;
	va_start(args, format);
	file->text = kvasprintf(GFP_KERNEL, format, args);
	va_end(args);
	if (!file->text) {
		kfree(file);
		return -ENOMEM;
	}
	sysfs_attr_init(&file->attr);
	file->attr.name = name;
	file->attr.mode = 0444;
	list_add_tail(&file->link, &dir->files);
	return sysfs_create_file(&dir->kobj, &file->attr);
}

void sg_dir_remove(struct sg_dir *dir)
{
	struct sg_dir *child, *next;

	if (IS_ERR_OR_NULL(dir))
		return;
	list_for_each_entry_safe(child, next, &dir->dirs, link)
		sg_dir_remove(child);
	list_del(&dir->link);
	kobject_del(&dir->kobj);
	kobject_put(&dir->kobj);
}
