// SPDX-License-Identifier: GPL-2.0 OR MIT
/* KFD ioctls that get or set a few numbers. */
#include <linux/file.h>
#include <linux/ktime.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "chardev.h"
#include "device.h"
#include "process.h"

int sg_ioctl_version(struct file *filp, struct sg_process *p, void *data)
{
	struct kfd_ioctl_get_version_args *args = data;

	args->major_version = KFD_IOCTL_MAJOR_VERSION;
	args->minor_version = KFD_IOCTL_MINOR_VERSION;
	return 0;
}

static bool sg_policy_known(u32 policy)
{
	return policy == KFD_IOC_CACHE_POLICY_COHERENT || policy == KFD_IOC_CACHE_POLICY_NONCOHERENT;
}

int sg_ioctl_memory_policy(struct file *filp, struct sg_process *p, void *data)
{
	struct kfd_ioctl_set_memory_policy_args *args = data;
	struct sg_pdd *pdd;
	int err;

	if (!sg_policy_known(args->default_policy) || !sg_policy_known(args->alternate_policy))
		return -EINVAL;
	mutex_lock(&p->lock);
	pdd = sg_pdd_by_user_id(p, args->gpu_id);
	/* Caches are always coherent here. */
	err = !pdd ? -EINVAL : pdd->vm ? 0 : -ESRCH;
	mutex_unlock(&p->lock);
	return err;
}

int sg_ioctl_clocks(struct file *filp, struct sg_process *p, void *data)
{
	struct kfd_ioctl_get_clock_counters_args *args = data;

	mutex_lock(&p->lock);
	args->gpu_clock_counter = sg_pdd_by_user_id(p, args->gpu_id) ? sg_device_clock() : 0;
	mutex_unlock(&p->lock);
	args->cpu_clock_counter = ktime_get_raw_ns();
	args->system_clock_counter = ktime_get_boottime_ns();
	args->system_clock_freq = NSEC_PER_SEC;
	return 0;
}

static void sg_apertures(struct kfd_process_device_apertures *to, struct sg_pdd *pdd)
{
	to->gpu_id = pdd->dev->gpu_id;
	to->lds_base = 1ULL << 48;
	to->lds_limit = to->lds_base | 0xffffffff;
	to->gpuvm_base = SZ_64K;
	to->gpuvm_limit = (1ULL << 47) - 1;
	to->scratch_base = 2ULL << 48;
	to->scratch_limit = to->scratch_base | 0xffffffff;
}

int sg_ioctl_apertures(struct file *filp, struct sg_process *p, void *data)
{
	struct kfd_ioctl_get_process_apertures_args *args = data;
	unsigned int i;

	for (i = 0; i < p->n_pdds && i < NUM_OF_SUPPORTED_GPUS; i++)
		sg_apertures(&args->process_apertures[i], p->pdds[i]);
	args->num_of_nodes = i;
	return 0;
}

int sg_ioctl_apertures_new(struct file *filp, struct sg_process *p, void *data)
{
	struct kfd_ioctl_get_process_apertures_new_args *args = data;
	struct kfd_process_device_apertures *all;
	unsigned int i;
	int err;

	if (!args->num_of_nodes) {
		args->num_of_nodes = p->n_pdds;
		return 0;
	}
	/* Nodes of the topology: the GPUs and one CPU. */
	if (args->num_of_nodes > sg_device_count + 1)
		return -EINVAL;
	all = kcalloc(args->num_of_nodes, sizeof(*all), GFP_KERNEL);
	if (!all)
		return -ENOMEM;
	for (i = 0; i < min(p->n_pdds, args->num_of_nodes); i++)
		sg_apertures(&all[i], p->pdds[i]);
	args->num_of_nodes = i;
	err = copy_to_user(u64_to_user_ptr(args->kfd_process_device_apertures_ptr), all, i * sizeof(*all)) ?
	      -EFAULT : 0;
	kfree(all);
	return err;
}

int sg_ioctl_trap_handler(struct file *filp, struct sg_process *p, void *data)
{
	struct kfd_ioctl_set_trap_handler_args *args = data;
	struct sg_pdd *pdd;
	int err = 0;

	mutex_lock(&p->lock);
	pdd = sg_pdd_by_user_id(p, args->gpu_id);
	if (!pdd) {
		err = -EINVAL;
	} else if (!pdd->vm) {
		err = -ESRCH;
	} else {
		pdd->tba = args->tba_addr;
		pdd->tma = args->tma_addr;
	}
	mutex_unlock(&p->lock);
	return err;
}

int sg_ioctl_scratch(struct file *filp, struct sg_process *p, void *data)
{
	struct kfd_ioctl_set_scratch_backing_va_args *args = data;
	struct sg_pdd *pdd;
	int err = 0;

	mutex_lock(&p->lock);
	pdd = sg_pdd_by_user_id(p, args->gpu_id);
	if (!pdd)
		err = -EINVAL;
	else if (!pdd->vm)
		err = -ENODEV;
	else
		pdd->scratch = args->va_addr;
	mutex_unlock(&p->lock);
	return err;
}

/* gfx9 and later have no tile tables: all counts are zero. */
int sg_ioctl_tile_config(struct file *filp, struct sg_process *p, void *data)
{
	struct kfd_ioctl_get_tile_config_args *args = data;
	struct sg_pdd *pdd;

	mutex_lock(&p->lock);
	pdd = sg_pdd_by_user_id(p, args->gpu_id);
	mutex_unlock(&p->lock);
	if (!pdd)
		return -EINVAL;
	args->gb_addr_config = 0x142a4;
	args->num_banks = 0;
	args->num_ranks = 0;
	args->num_tile_configs = 0;
	args->num_macro_tile_configs = 0;
	return 0;
}

int sg_ioctl_acquire_vm(struct file *filp, struct sg_process *p, void *data)
{
	struct kfd_ioctl_acquire_vm_args *args = data;
	struct file *drm_file = fget(args->drm_fd);
	struct sg_pdd *pdd;
	int err;

	if (!drm_file)
		return -EINVAL;
	mutex_lock(&p->lock);
	pdd = sg_pdd_by_user_id(p, args->gpu_id);
	if (!pdd) {
		err = -EINVAL;
	} else if (pdd->drm_file) {
		err = pdd->drm_file == drm_file ? 0 : -EBUSY;
	} else {
		err = sg_pdd_acquire(pdd, drm_file);
		if (!err)
			drm_file = NULL;	/* the pdd has it now */
	}
	mutex_unlock(&p->lock);
	if (drm_file)
		fput(drm_file);
	return err;
}

int sg_ioctl_runtime_enable(struct file *filp, struct sg_process *p, void *data)
{
	struct kfd_ioctl_runtime_enable_args *args = data;
	bool enable = args->mode_mask & KFD_RUNTIME_ENABLE_MODE_ENABLE_MASK;
	int err = 0;

	mutex_lock(&p->lock);
	if (!enable) {
		p->runtime_enabled = false;
		p->runtime_debug = 0;
	} else if (p->runtime_enabled) {
		err = -EBUSY;
	} else if (sg_queues_any(p)) {
		err = -EEXIST;
	} else {
		p->runtime_enabled = true;
		p->runtime_debug = args->r_debug;
	}
	mutex_unlock(&p->lock);
	return err;
}
