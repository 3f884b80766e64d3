/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* Injected faults: the nth ioctl of a kind fails, or its caller is killed. For test harnesses. */
#ifndef SOFTGPU_FAULTS_H
#define SOFTGPU_FAULTS_H

#include <linux/types.h>

struct dentry;
struct file;

/* Space for a call's name, as "kfd/CRIU_OP/PROCESS_INFO". */
#define SG_CALL_NAME	40

typedef long (*sg_call_fn)(struct file *filp, unsigned int cmd, unsigned long arg);
typedef void (*sg_call_name_fn)(char name[SG_CALL_NAME], unsigned int cmd, unsigned long arg);

/* Makes the call, unless a fault replaces it. `name` is called only while calls are counted. */
long sg_faults_around(struct file *filp, unsigned int cmd, unsigned long arg, sg_call_fn call,
		      sg_call_name_fn name);

/* Makes `faults` and `calls` in the judge's folder, which removes them with itself. */
void sg_faults_init(struct dentry *folder);

/* chardev.c and drm.c: whether a call of that name exists. */
bool sg_kfd_call_known(const char *name);
bool sg_drm_call_known(const char *name);

#endif
