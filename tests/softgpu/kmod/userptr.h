/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* USERPTR allocations of KFD: host memory that queues use without a notification when it moves. */
#ifndef SOFTGPU_USERPTR_H
#define SOFTGPU_USERPTR_H

#include "softgpu.h"

void sg_userptr_init(struct sg_process *p);
void sg_userptr_stop(struct sg_process *p);
/* From RESTORE, pages are looked up by RESUME's worker only. */
int sg_userptr_add(struct sg_mem *mem, bool restore);
void sg_userptr_remove(struct sg_mem *mem);

/* RESTORE: notifications are ignored from now on. */
void sg_userptr_block(struct sg_process *p);
/* RESUME: they count again, and the worker resumes the queues. -EINVAL: they were not blocked. */
int sg_userptr_resume(struct sg_process *p);

#endif
