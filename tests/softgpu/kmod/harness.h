/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* What a test harness, and never the product, reports to the judge. */
#ifndef SOFTGPU_HARNESS_H
#define SOFTGPU_HARNESS_H

struct dentry;
struct sg_process;

/* Makes the harness's files in the judge's folder, which removes them with itself. */
void sg_harness_init(struct dentry *folder);

/* PROCESS_INFO has just stopped the queues of this process; under its lock. */
void sg_harness_paused(struct sg_process *p);

#endif
