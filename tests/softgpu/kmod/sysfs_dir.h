/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* Folders in sysfs whose files have a fixed text. */
#ifndef SOFTGPU_SYSFS_DIR_H
#define SOFTGPU_SYSFS_DIR_H

#include <linux/kobject.h>
#include <linux/list.h>

struct sg_device;

struct sg_dir {
	struct kobject kobj;
	struct sg_device *dev;		/* shown to those who may open its render node; with what is below */
	struct list_head files, dirs;
	struct list_head link;		/* in the parent's dirs */
};

struct sg_dir *sg_dir_add(struct sg_dir *parent, struct kobject *parent_kobj, const char *name);
__printf(3, 4)
int sg_dir_file(struct sg_dir *dir, const char *name, const char *format, ...);
/* With all of its content. NULL is allowed. */
void sg_dir_remove(struct sg_dir *dir);

#endif
