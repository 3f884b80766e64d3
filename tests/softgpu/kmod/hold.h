/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* Held copies: jobs of processes of a name wait until the harness releases them. */
#ifndef SOFTGPU_HOLD_H
#define SOFTGPU_HOLD_H

#include <linux/types.h>

struct dentry;

/* Whether a job of a process of this name may begin; if it may, it does. Any context. */
bool sg_hold_lets_go(const char *comm);

/* Makes `hold` in the judge's folder, which removes it with itself. */
void sg_hold_init(struct dentry *folder);

#endif
