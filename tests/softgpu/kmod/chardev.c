// SPDX-License-Identifier: GPL-2.0 OR MIT
/* /dev/kfd: which thread may call what, sizes of arguments, the table of ioctls. */
#include <linux/capability.h>
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/ptrace.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "chardev.h"
#include "criu.h"
#include "faults.h"
#include "mem.h"
#include "process.h"
#include "svm.h"

static int sg_major;
static struct device *sg_kfd_device;
static struct kobject *sg_proc;

static const struct class sg_kfd_class = {
	.name = "kfd",
};

struct sg_ioctl {
	const char *name;
	unsigned int cmd;
	sg_ioctl_fn fn;
	bool criu;
};

/* ioctls that do not need the file. */
#define SG_FORWARD(name, function, type) \
	static int name(struct file *filp, struct sg_process *p, void *data) \
	{ return function(p, (type *)data); }

#define SG_FORWARD_ID(name, function, type, field) \
	static int name(struct file *filp, struct sg_process *p, void *data) \
	{ return function(p, ((type *)data)->field); }

SG_FORWARD(sg_fn_create_queue, sg_queue_create, struct kfd_ioctl_create_queue_args)
SG_FORWARD(sg_fn_update_queue, sg_queue_update, struct kfd_ioctl_update_queue_args)
SG_FORWARD_ID(sg_fn_destroy_queue, sg_queue_destroy, struct kfd_ioctl_destroy_queue_args, queue_id)
SG_FORWARD(sg_fn_cu_mask, sg_queue_set_cu_mask, struct kfd_ioctl_set_cu_mask_args)
SG_FORWARD(sg_fn_wave_state, sg_queue_wave_state, struct kfd_ioctl_get_queue_wave_state_args)
SG_FORWARD(sg_fn_gws, sg_queue_alloc_gws, struct kfd_ioctl_alloc_queue_gws_args)
SG_FORWARD(sg_fn_create_event, sg_event_create, struct kfd_ioctl_create_event_args)
SG_FORWARD_ID(sg_fn_destroy_event, sg_event_destroy, struct kfd_ioctl_destroy_event_args, event_id)
SG_FORWARD_ID(sg_fn_set_event, sg_event_set, struct kfd_ioctl_set_event_args, event_id)
SG_FORWARD_ID(sg_fn_reset_event, sg_event_reset, struct kfd_ioctl_reset_event_args, event_id)
SG_FORWARD(sg_fn_wait_events, sg_event_wait, struct kfd_ioctl_wait_events_args)
SG_FORWARD(sg_fn_smi, sg_smi_open, struct kfd_ioctl_smi_events_args)
SG_FORWARD(sg_fn_svm, sg_svm_ioctl, struct kfd_ioctl_svm_args)
SG_FORWARD(sg_fn_xnack, sg_xnack_ioctl, struct kfd_ioctl_set_xnack_mode_args)
SG_FORWARD(sg_fn_available, sg_mem_available, struct kfd_ioctl_get_available_memory_args)
SG_FORWARD(sg_fn_alloc, sg_mem_alloc_ioctl, struct kfd_ioctl_alloc_memory_of_gpu_args)
SG_FORWARD(sg_fn_free, sg_mem_free_ioctl, struct kfd_ioctl_free_memory_of_gpu_args)
SG_FORWARD(sg_fn_map, sg_mem_map_ioctl, struct kfd_ioctl_map_memory_to_gpu_args)
SG_FORWARD(sg_fn_unmap, sg_mem_unmap_ioctl, struct kfd_ioctl_unmap_memory_from_gpu_args)
SG_FORWARD(sg_fn_dmabuf_info, sg_dmabuf_info, struct kfd_ioctl_get_dmabuf_info_args)
SG_FORWARD(sg_fn_import, sg_dmabuf_import, struct kfd_ioctl_import_dmabuf_args)
SG_FORWARD(sg_fn_export, sg_dmabuf_export, struct kfd_ioctl_export_dmabuf_args)
SG_FORWARD(sg_fn_criu, sg_criu_ioctl, struct kfd_ioctl_criu_args)

/* Calls that the driver keeps for old programs, and the debugger's, which is not implemented. */
static int sg_fn_refused(struct file *filp, struct sg_process *p, void *data)
{
	return -EPERM;
}

#define SG_IOCTL(command, function) \
	[_IOC_NR(command)] = { .name = #command, .cmd = command, .fn = function }

static const struct sg_ioctl sg_ioctls[] = {
	SG_IOCTL(AMDKFD_IOC_GET_VERSION, sg_ioctl_version),
	SG_IOCTL(AMDKFD_IOC_CREATE_QUEUE, sg_fn_create_queue),
	SG_IOCTL(AMDKFD_IOC_DESTROY_QUEUE, sg_fn_destroy_queue),
	SG_IOCTL(AMDKFD_IOC_SET_MEMORY_POLICY, sg_ioctl_memory_policy),
	SG_IOCTL(AMDKFD_IOC_GET_CLOCK_COUNTERS, sg_ioctl_clocks),
	SG_IOCTL(AMDKFD_IOC_GET_PROCESS_APERTURES, sg_ioctl_apertures),
	SG_IOCTL(AMDKFD_IOC_UPDATE_QUEUE, sg_fn_update_queue),
	SG_IOCTL(AMDKFD_IOC_CREATE_EVENT, sg_fn_create_event),
	SG_IOCTL(AMDKFD_IOC_DESTROY_EVENT, sg_fn_destroy_event),
	SG_IOCTL(AMDKFD_IOC_SET_EVENT, sg_fn_set_event),
	SG_IOCTL(AMDKFD_IOC_RESET_EVENT, sg_fn_reset_event),
	SG_IOCTL(AMDKFD_IOC_WAIT_EVENTS, sg_fn_wait_events),
	SG_IOCTL(AMDKFD_IOC_DBG_REGISTER_DEPRECATED, sg_fn_refused),
	SG_IOCTL(AMDKFD_IOC_DBG_UNREGISTER_DEPRECATED, sg_fn_refused),
	SG_IOCTL(AMDKFD_IOC_DBG_ADDRESS_WATCH_DEPRECATED, sg_fn_refused),
	SG_IOCTL(AMDKFD_IOC_DBG_WAVE_CONTROL_DEPRECATED, sg_fn_refused),
	SG_IOCTL(AMDKFD_IOC_SET_SCRATCH_BACKING_VA, sg_ioctl_scratch),
	SG_IOCTL(AMDKFD_IOC_GET_TILE_CONFIG, sg_ioctl_tile_config),
	SG_IOCTL(AMDKFD_IOC_SET_TRAP_HANDLER, sg_ioctl_trap_handler),
	SG_IOCTL(AMDKFD_IOC_GET_PROCESS_APERTURES_NEW, sg_ioctl_apertures_new),
	SG_IOCTL(AMDKFD_IOC_ACQUIRE_VM, sg_ioctl_acquire_vm),
	SG_IOCTL(AMDKFD_IOC_ALLOC_MEMORY_OF_GPU, sg_fn_alloc),
	SG_IOCTL(AMDKFD_IOC_FREE_MEMORY_OF_GPU, sg_fn_free),
	SG_IOCTL(AMDKFD_IOC_MAP_MEMORY_TO_GPU, sg_fn_map),
	SG_IOCTL(AMDKFD_IOC_UNMAP_MEMORY_FROM_GPU, sg_fn_unmap),
	SG_IOCTL(AMDKFD_IOC_SET_CU_MASK, sg_fn_cu_mask),
	SG_IOCTL(AMDKFD_IOC_GET_QUEUE_WAVE_STATE, sg_fn_wave_state),
	SG_IOCTL(AMDKFD_IOC_GET_DMABUF_INFO, sg_fn_dmabuf_info),
	SG_IOCTL(AMDKFD_IOC_IMPORT_DMABUF, sg_fn_import),
	SG_IOCTL(AMDKFD_IOC_ALLOC_QUEUE_GWS, sg_fn_gws),
	SG_IOCTL(AMDKFD_IOC_SMI_EVENTS, sg_fn_smi),
	SG_IOCTL(AMDKFD_IOC_SVM, sg_fn_svm),
	SG_IOCTL(AMDKFD_IOC_SET_XNACK_MODE, sg_fn_xnack),
	[_IOC_NR(AMDKFD_IOC_CRIU_OP)] = {
		.name = "AMDKFD_IOC_CRIU_OP", .cmd = AMDKFD_IOC_CRIU_OP, .fn = sg_fn_criu, .criu = true,
	},
	SG_IOCTL(AMDKFD_IOC_AVAILABLE_MEMORY, sg_fn_available),
	SG_IOCTL(AMDKFD_IOC_EXPORT_DMABUF, sg_fn_export),
	SG_IOCTL(AMDKFD_IOC_RUNTIME_ENABLE, sg_ioctl_runtime_enable),
	SG_IOCTL(AMDKFD_IOC_DBG_TRAP, sg_fn_refused),
};

/*
 * The opener's own threads; for CRIU also the thread that traces the opener.
 * `current` is a thread: a sibling of the tracer is refused, as by the driver.
 */
static int sg_check_caller(struct sg_process *p, const struct sg_ioctl *ioctl)
{
	bool tracer = false;

	if (ioctl->criu) {
		rcu_read_lock();
		tracer = ptrace_parent(p->lead) == current;
		rcu_read_unlock();
	}
	if (p->lead != current->group_leader && !tracer)
		return -EBADF;
	if (ioctl->criu && !capable(CAP_CHECKPOINT_RESTORE) && !capable(CAP_SYS_ADMIN))
		return -EACCES;
	return 0;
}

/* A header before an array: its size says how long the array may be. */
static int sg_check_svm_size(const struct kfd_ioctl_svm_args *args, unsigned int usize)
{
	if (usize < struct_size(args, attrs, 0) || struct_size(args, attrs, args->nattr) > usize)
		return -EINVAL;
	return 0;
}

static int sg_call(struct file *filp, const struct sg_ioctl *ioctl, unsigned int usize, void *data,
		   unsigned long arg)
{
	int err;

	if (ioctl->cmd & IOC_IN) {
		if (copy_from_user(data, (void __user *)arg, usize))
			return -EFAULT;
	}
	if (ioctl->cmd == AMDKFD_IOC_SVM) {
		err = sg_check_svm_size(data, usize);
		if (err)
			return err;
	}
	err = ioctl->fn(filp, filp->private_data, data);
	/* Also after an error: CRIU reads the results. */
	if (ioctl->cmd & IOC_OUT && copy_to_user((void __user *)arg, data, usize))
		return -EFAULT;
	return err;
}

static const char * const sg_criu_names[] = {
	[KFD_CRIU_OP_PROCESS_INFO] = "/PROCESS_INFO",
	[KFD_CRIU_OP_CHECKPOINT] = "/CHECKPOINT",
	[KFD_CRIU_OP_UNPAUSE] = "/UNPAUSE",
	[KFD_CRIU_OP_RESTORE] = "/RESTORE",
	[KFD_CRIU_OP_RESUME] = "/RESUME",
};

static void sg_kfd_name(char name[SG_CALL_NAME], unsigned int nr, const char *more)
{
	const char *full = nr < ARRAY_SIZE(sg_ioctls) ? sg_ioctls[nr].name : NULL;

	if (full)
		snprintf(name, SG_CALL_NAME, "kfd/%s%s", full + strlen("AMDKFD_IOC_"), more);
	else
		snprintf(name, SG_CALL_NAME, "kfd/0x%02x", nr);
}

static void sg_kfd_call_name(char name[SG_CALL_NAME], unsigned int cmd, unsigned long arg)
{
	const struct kfd_ioctl_criu_args __user *criu = (void __user *)arg;
	const char *more = "";
	u32 op;

	if (_IOC_NR(cmd) == _IOC_NR(AMDKFD_IOC_CRIU_OP) && !get_user(op, &criu->op) &&
	    op < ARRAY_SIZE(sg_criu_names))
		more = sg_criu_names[op];
	sg_kfd_name(name, _IOC_NR(cmd), more);
}

bool sg_kfd_call_known(const char *wanted)
{
	char name[SG_CALL_NAME];
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(sg_ioctls); i++) {
		sg_kfd_name(name, i, "");
		if (sg_ioctls[i].name && !strcmp(name, wanted))
			return true;
	}
	for (i = 0; i < ARRAY_SIZE(sg_criu_names); i++) {
		sg_kfd_name(name, _IOC_NR(AMDKFD_IOC_CRIU_OP), sg_criu_names[i]);
		if (!strcmp(name, wanted))
			return true;
	}
	return false;
}

static long sg_kfd_call(struct file *filp, unsigned int cmd, unsigned long arg)
{
	unsigned int nr = _IOC_NR(cmd), usize = _IOC_SIZE(cmd);
	const struct sg_ioctl *ioctl;
	void *data;
	int err;

	if (nr >= ARRAY_SIZE(sg_ioctls) || nr < AMDKFD_COMMAND_START)
		return -ENOTTY;
	ioctl = &sg_ioctls[nr];
	err = sg_check_caller(filp->private_data, ioctl);
	if (err)
		return err;
	if (!ioctl->fn)
		return -EINVAL;
	/* Callers may know a shorter or a longer structure: missing fields are zero. */
	data = kzalloc(max_t(unsigned int, usize, _IOC_SIZE(ioctl->cmd)), GFP_KERNEL_ACCOUNT);
	if (!data)
		return -ENOMEM;
	err = sg_call(filp, ioctl, usize, data, arg);
	kfree(data);
	return err;
}

static long sg_kfd_ioctl(struct file *filp, unsigned int cmd, unsigned long arg)
{
	return sg_faults_around(filp, cmd, arg, sg_kfd_call, sg_kfd_call_name);
}

static int sg_kfd_open(struct inode *inode, struct file *filp)
{
	struct sg_process *p;

	if (iminor(inode))
		return -ENODEV;
	if (in_compat_syscall())
		return -EPERM;
	p = sg_process_open();
	if (IS_ERR(p))
		return PTR_ERR(p);
	filp->private_data = p;
	return 0;
}

static int sg_kfd_release(struct inode *inode, struct file *filp)
{
	sg_process_put(filp->private_data);
	return 0;
}

static const struct file_operations sg_kfd_fops = {
	.owner = THIS_MODULE,
	.open = sg_kfd_open,
	.release = sg_kfd_release,
	.unlocked_ioctl = sg_kfd_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.mmap = sg_kfd_mmap,
};

struct device *sg_chardev_device(void)
{
	return sg_kfd_device;
}

struct kobject *sg_chardev_proc(void)
{
	return sg_proc;
}

int sg_chardev_init(void)
{
	int err;

	sg_major = register_chrdev(0, "kfd", &sg_kfd_fops);
	if (sg_major < 0)
		return sg_major;
	err = class_register(&sg_kfd_class);
	if (err)
		goto chrdev;
	sg_kfd_device = device_create(&sg_kfd_class, NULL, MKDEV(sg_major, 0), NULL, "kfd");
	if (IS_ERR(sg_kfd_device)) {
		err = PTR_ERR(sg_kfd_device);
		goto class;
	}
	sg_proc = kobject_create_and_add("proc", &sg_kfd_device->kobj);
	return 0;
class:
	class_unregister(&sg_kfd_class);
chrdev:
	unregister_chrdev(sg_major, "kfd");
	return err;
}

void sg_chardev_exit(void)
{
	kobject_del(sg_proc);
	kobject_put(sg_proc);
	device_destroy(&sg_kfd_class, MKDEV(sg_major, 0));
	class_unregister(&sg_kfd_class);
	unregister_chrdev(sg_major, "kfd");
}
