// SPDX-License-Identifier: GPL-2.0 OR MIT
/* CRIU_OP: its dispatch, and the two pairs that evict and resume queues. */
#include <linux/pid_namespace.h>
#include <linux/sched.h>

#include "criu.h"
#include "harness.h"
#include "process.h"
#include "svm.h"
#include "userptr.h"

static void sg_criu_out_of_turn(struct sg_process *p, const char *op, const char *why)
{
	sg_violate(SG_UNPAUSE_OUT_OF_TURN, sg_process_pid(p), NULL, 0, op, "%s", why);
}

/*
 * Until 7.3 a second PROCESS_INFO evicts once more, and no call undoes that:
 * the process's queues stay evicted for ever. The same happens here, and the
 * judge reports it.
 */
static int sg_criu_process_info(struct sg_process *p, struct kfd_ioctl_criu_args *args)
{
	struct sg_criu_counts counts;

	mutex_lock(&p->lock);
	if (p->queues_paused)
		sg_criu_out_of_turn(p, "PROCESS_INFO", "queues are paused already: they will not be resumed");
	sg_process_evict_queues(p, SG_EVICT_CHECKPOINT);
	sg_harness_paused(p);
	p->queues_paused = true;
	args->pid = task_pid_nr_ns(p->lead, task_active_pid_ns(p->lead));
	sg_criu_count(p, &counts);
	args->num_devices = counts.devices;
	args->num_bos = counts.bos;
	args->num_objects = counts.objects;
	args->priv_data_size = counts.bytes;
	mutex_unlock(&p->lock);
	return 0;
}

static int sg_criu_unpause(struct sg_process *p)
{
	int err = 0;

	mutex_lock(&p->lock);
	if (!p->queues_paused) {
		sg_criu_out_of_turn(p, "UNPAUSE", "queues are not paused");
		err = -EINVAL;
	} else {
		sg_process_restore_queues(p);
		p->queues_paused = false;
	}
	mutex_unlock(&p->lock);
	return err;
}

/* Of any process, by any caller that may call CRIU_OP at all. */
static int sg_criu_resume(struct kfd_ioctl_criu_args *args)
{
	struct sg_process *target = sg_process_by_pid(args->pid);
	int err;

	if (!target)
		return -ESRCH;
	mutex_lock(&target->lock);
	err = sg_svm_criu_resume(target);
	if (!err) {
		err = sg_userptr_resume(target);
		if (err)
			sg_violate(SG_RESUME_REPEATED, sg_process_pid(target), NULL, 0, "RESUME",
				   "notifications of host memory are counted without evicting queues from now on");
	}
	mutex_unlock(&target->lock);
	sg_process_put(target);
	return err;
}

static int sg_criu_check_restore(const struct kfd_ioctl_criu_args *args)
{
	if ((args->num_bos && !args->bos) || !args->devices || !args->priv_data || !args->priv_data_size ||
	    !args->num_devices)
		return -EINVAL;
	return 0;
}

int sg_criu_ioctl(struct sg_process *p, struct kfd_ioctl_criu_args *args)
{
	int err;

	switch (args->op) {
	case KFD_CRIU_OP_PROCESS_INFO:
		return sg_criu_process_info(p, args);
	case KFD_CRIU_OP_CHECKPOINT:
		if (!args->devices || !args->bos || !args->priv_data)
			return -EINVAL;
		mutex_lock(&p->lock);
		err = sg_criu_checkpoint(p, args);
		mutex_unlock(&p->lock);
		return err;
	case KFD_CRIU_OP_UNPAUSE:
		return sg_criu_unpause(p);
	case KFD_CRIU_OP_RESTORE:
		err = sg_criu_check_restore(args);
		if (err)
			return err;
		mutex_lock(&p->lock);
		err = sg_criu_restore(p, args);
		mutex_unlock(&p->lock);
		return err;
	case KFD_CRIU_OP_RESUME:
		return sg_criu_resume(args);
	default:
		return -EINVAL;
	}
}
