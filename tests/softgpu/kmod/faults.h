/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* Faults on demand: the nth ioctl of a kind fails, or its caller is killed. For test harnesses. */
#ifndef SOFTGPU_FAULTS_H
#define SOFTGPU_FAULTS_H

#include <linux/types.h>

struct dentry;
struct file;

/* Room for a call's name, "kfd/CRIU_OP/PROCESS_INFO" and its like. */
#define SG_CALL_NAME	40

typedef long (*sg_call_fn)(struct file *filp, unsigned int cmd, unsigned long arg);
typedef void (*sg_call_name_fn)(char name[SG_CALL_NAME], unsigned int cmd, unsigned long arg);

/* Makes the call, unless it is the one that is to fail. `name` is asked only while somebody counts. */
long sg_faults_around(struct file *filp, unsigned int cmd, unsigned long arg, sg_call_fn call,
		      sg_call_name_fn name);

/* Makes `faults` and `calls` in the judge's folder, which takes them away with itself. */
void sg_faults_init(struct dentry *folder);

/* chardev.c and drm.c: whether there is a call of that name. */
bool sg_kfd_call_known(const char *name);
bool sg_drm_call_known(const char *name);

#endif
