// SPDX-License-Identifier: GPL-2.0 OR MIT
/* A kernel whose driver has no SVM: Debian's 6.12. */
#include "criu.h"
#include "svm.h"

void sg_svm_init(struct sg_process *p)
{
}

void sg_svm_stop(struct sg_process *p)
{
}

void sg_svm_exit(struct sg_process *p)
{
}

int sg_svm_ioctl(struct sg_process *p, struct kfd_ioctl_svm_args *args)
{
	return -EPERM;
}

bool sg_svm_overlaps(struct sg_process *p, u64 start, u64 size)
{
	return false;
}

bool sg_svm_always_mapped(struct sg_pdd *pdd, u64 start, u64 size)
{
	return false;
}

int sg_svm_page(struct sg_process *p, struct sg_device *dev, u64 va, bool write, struct sg_page_ref *ref)
{
	return -EFAULT;
}

int sg_svm_fault(struct sg_vm *vm, u64 va, bool write)
{
	return -EFAULT;
}

void sg_svm_criu_info(struct sg_process *p, u32 *count, u64 *bytes)
{
	*count = 0;
	*bytes = 0;
}

int sg_svm_criu_dump(struct sg_process *p, u8 __user *priv, u64 *offset, u64 limit)
{
	return 0;
}

int sg_svm_criu_restore(struct sg_process *p, u8 __user *priv, u64 *offset, u64 size)
{
	return -EINVAL;
}

int sg_svm_criu_resume(struct sg_process *p)
{
	return 0;
}
