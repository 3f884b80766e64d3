/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* SVM: ranges of a process' address space that GPUs may use as they are. */
#ifndef SOFTGPU_SVM_H
#define SOFTGPU_SVM_H

#include "softgpu.h"

void sg_svm_init(struct sg_process *p);
/* Ends the worker for good: the address space is ending. */
void sg_svm_stop(struct sg_process *p);
void sg_svm_exit(struct sg_process *p);

int sg_svm_ioctl(struct sg_process *p, struct kfd_ioctl_svm_args *args);
int sg_xnack_ioctl(struct sg_process *p, struct kfd_ioctl_set_xnack_mode_args *args);
/* The defaults of a process. */
bool sg_xnack_default(void);
bool sg_xnack_possible(struct sg_process *p);

/* Does any range touch [start, start + size)? Addresses of the process. */
bool sg_svm_overlaps(struct sg_process *p, u64 start, u64 size);
/* Is all of it mapped for good on this GPU? A queue's save area must be. */
bool sg_svm_always_mapped(struct sg_pdd *pdd, u64 start, u64 size);
/* Inside a slice, like sg_vm_page(). */
int sg_svm_page(struct sg_process *p, struct sg_device *dev, u64 va, bool write, struct sg_page_ref *ref);

/* CRIU, under p->lock. */
void sg_svm_criu_info(struct sg_process *p, u32 *count, u64 *bytes);
/* -EINVAL: it goes beyond `limit`. */
int sg_svm_criu_dump(struct sg_process *p, u8 __user *priv, u64 *offset, u64 limit);
int sg_svm_criu_restore(struct sg_process *p, u8 __user *priv, u64 *offset, u64 size);
/* From RESUME: attributes are set one range after the other; after a failure the rest is dropped. */
int sg_svm_criu_resume(struct sg_process *p);
void sg_svm_criu_drop(struct sg_process *p);

#endif
