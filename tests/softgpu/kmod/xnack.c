// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Retry faults, which processes choose on chips that have them. */
#include "svm.h"

bool sg_xnack_default(void)
{
	return sg_params.xnack && sg_devices[0]->chip->xnack;
}

bool sg_xnack_possible(struct sg_process *p)
{
	return p->n_pdds && p->pdds[0]->dev->chip->xnack;
}

#if SG_HAS_SVM
int sg_xnack_ioctl(struct sg_process *p, struct kfd_ioctl_set_xnack_mode_args *args)
{
	int err = 0;

	mutex_lock(&p->lock);
	if (args->xnack_enabled < 0) {
		args->xnack_enabled = p->xnack;
	} else if (sg_queues_any(p)) {
		err = -EBUSY;
	} else if (args->xnack_enabled && !sg_xnack_possible(p)) {
		err = -EPERM;
	} else {
		p->xnack = args->xnack_enabled;
	}
	mutex_unlock(&p->lock);
	return err;
}
#else
int sg_xnack_ioctl(struct sg_process *p, struct kfd_ioctl_set_xnack_mode_args *args)
{
	return -EPERM;	/* belongs to SVM, which Debian's 6.12 does not have */
}
#endif
