/* SPDX-License-Identifier: GPL-2.0 OR MIT */
#ifndef SOFTGPU_PROCESS_H
#define SOFTGPU_PROCESS_H

#include "softgpu.h"

int sg_processes_init(void);
void sg_processes_exit(void);

/* The process of the current task: made if it has none. With a reference. */
struct sg_process *sg_process_open(void);
/* By pid, as the caller's pid namespace has it. With a reference, or NULL. */
struct sg_process *sg_process_by_pid(pid_t pid);

/* All of them, in no order; no lock but the list's is held. */
void sg_processes_each(void (*act)(struct sg_process *p, void *data), void *data);

/* Takes the GPU's address space from an open render node. On success the pdd has the file. */
int sg_pdd_acquire(struct sg_pdd *pdd, struct file *drm_file);

/* sysfs.c */
void sg_process_sysfs_add(struct sg_process *p);
void sg_process_sysfs_del(struct sg_process *p);

/* drm.c */
struct sg_file *sg_file_from(struct file *filp);

#endif
