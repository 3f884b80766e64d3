// SPDX-License-Identifier: GPL-2.0 OR MIT
/* The render nodes: driver description, files, ioctl table. */
#include <drm/drm_drv.h>
#include <drm/drm_file.h>
#include <drm/drm_gem.h>
#include <drm/drm_ioctl.h>
#include <drm/drm_print.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "device.h"
#include "faults.h"
#include "gem.h"
#include "prime.h"
#include "process.h"

static int sg_drm_open(struct drm_device *drm, struct drm_file *file_priv)
{
	struct sg_device *dev = sg_device_of(drm);
	struct sg_file *file = kzalloc(sizeof(*file), GFP_KERNEL);
	int err;

	if (!file)
		return -ENOMEM;
	file->drm = file_priv;
	file->dev = dev;
	sg_vm_init(&file->vm, dev);
	err = sg_exec_file_open(file);
	if (err) {
		sg_vm_fini(&file->vm);
		kfree(file);
		return err;
	}
	file_priv->driver_priv = file;
	sg_born(SG_DRM_FILES);
	return 0;
}

static void sg_drm_postclose(struct drm_device *drm, struct drm_file *file_priv)
{
	struct sg_file *file = file_priv->driver_priv;

	sg_exec_file_close(file);
	sg_vm_fini(&file->vm);
	kfree(file);
	sg_died(SG_DRM_FILES);
}

/* Reserving a VMID succeeds, without effect. */
static int sg_vm_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	union drm_amdgpu_vm *args = data;

	if (args->in.flags)
		return -EINVAL;
	switch (args->in.op) {
	case AMDGPU_VM_OP_RESERVE_VMID:
	case AMDGPU_VM_OP_UNRESERVE_VMID:
		return 0;
	default:
		return -EINVAL;
	}
}

#define SG_ALLOW	(DRM_AUTH | DRM_RENDER_ALLOW)

static const struct drm_ioctl_desc sg_drm_ioctls[] = {
	DRM_IOCTL_DEF_DRV(AMDGPU_GEM_CREATE, sg_gem_create_ioctl, SG_ALLOW),
	DRM_IOCTL_DEF_DRV(AMDGPU_CTX, sg_ctx_ioctl, SG_ALLOW),
	DRM_IOCTL_DEF_DRV(AMDGPU_VM, sg_vm_ioctl, SG_ALLOW),
	DRM_IOCTL_DEF_DRV(AMDGPU_BO_LIST, sg_bo_list_ioctl, SG_ALLOW),
	DRM_IOCTL_DEF_DRV(AMDGPU_FENCE_TO_HANDLE, sg_fence_to_handle_ioctl, SG_ALLOW),
	DRM_IOCTL_DEF_DRV(AMDGPU_GEM_MMAP, sg_gem_mmap_ioctl, SG_ALLOW),
	DRM_IOCTL_DEF_DRV(AMDGPU_GEM_WAIT_IDLE, sg_gem_wait_idle_ioctl, SG_ALLOW),
	DRM_IOCTL_DEF_DRV(AMDGPU_CS, sg_cs_ioctl, SG_ALLOW),
	DRM_IOCTL_DEF_DRV(AMDGPU_INFO, sg_info_ioctl, SG_ALLOW),
	DRM_IOCTL_DEF_DRV(AMDGPU_WAIT_CS, sg_wait_cs_ioctl, SG_ALLOW),
	DRM_IOCTL_DEF_DRV(AMDGPU_WAIT_FENCES, sg_wait_fences_ioctl, SG_ALLOW),
	DRM_IOCTL_DEF_DRV(AMDGPU_GEM_METADATA, sg_gem_metadata_ioctl, SG_ALLOW),
	DRM_IOCTL_DEF_DRV(AMDGPU_GEM_VA, sg_gem_va_ioctl, SG_ALLOW),
	DRM_IOCTL_DEF_DRV(AMDGPU_GEM_OP, sg_gem_op_ioctl, SG_ALLOW),
	DRM_IOCTL_DEF_DRV(AMDGPU_GEM_USERPTR, sg_gem_userptr_ioctl, SG_ALLOW),
#ifdef DRM_IOCTL_AMDGPU_GEM_LIST_HANDLES
	DRM_IOCTL_DEF_DRV(AMDGPU_GEM_LIST_HANDLES, sg_gem_list_handles_ioctl, SG_ALLOW),
#endif
};

/* DRM's own calls that a driver of this kind has. */
#define SG_CORE(name)	{ DRM_IOCTL_NR(DRM_IOCTL_##name), #name }

static const struct {
	unsigned int nr;
	const char *name;
} sg_core_calls[] = {
	SG_CORE(VERSION), SG_CORE(GET_CAP), SG_CORE(SET_CLIENT_CAP),
	SG_CORE(GEM_CLOSE), SG_CORE(PRIME_HANDLE_TO_FD), SG_CORE(PRIME_FD_TO_HANDLE),
	SG_CORE(SYNCOBJ_CREATE), SG_CORE(SYNCOBJ_DESTROY), SG_CORE(SYNCOBJ_HANDLE_TO_FD),
	SG_CORE(SYNCOBJ_FD_TO_HANDLE), SG_CORE(SYNCOBJ_WAIT), SG_CORE(SYNCOBJ_RESET),
	SG_CORE(SYNCOBJ_SIGNAL), SG_CORE(SYNCOBJ_TIMELINE_WAIT), SG_CORE(SYNCOBJ_QUERY),
	SG_CORE(SYNCOBJ_TRANSFER), SG_CORE(SYNCOBJ_TIMELINE_SIGNAL), SG_CORE(SYNCOBJ_EVENTFD),
};

static void sg_drm_name(char name[SG_CALL_NAME], unsigned int nr)
{
	unsigned int own = nr - DRM_COMMAND_BASE, i;

	if (nr >= DRM_COMMAND_BASE && own < ARRAY_SIZE(sg_drm_ioctls) && sg_drm_ioctls[own].name) {
		snprintf(name, SG_CALL_NAME, "amdgpu/%s", sg_drm_ioctls[own].name + strlen("AMDGPU_"));
		return;
	}
	for (i = 0; i < ARRAY_SIZE(sg_core_calls); i++) {
		if (sg_core_calls[i].nr == nr) {
			snprintf(name, SG_CALL_NAME, "drm/%s", sg_core_calls[i].name);
			return;
		}
	}
	snprintf(name, SG_CALL_NAME, "drm/0x%02x", nr);
}

static void sg_drm_call_name(char name[SG_CALL_NAME], unsigned int cmd, unsigned long arg)
{
	sg_drm_name(name, DRM_IOCTL_NR(cmd));
}

bool sg_drm_call_known(const char *wanted)
{
	char name[SG_CALL_NAME];
	unsigned int nr;

	for (nr = 0; nr <= _IOC_NRMASK; nr++) {
		sg_drm_name(name, nr);
		if (!strcmp(name, wanted))
			return true;
	}
	return false;
}

static long sg_drm_ioctl(struct file *filp, unsigned int cmd, unsigned long arg)
{
	return sg_faults_around(filp, cmd, arg, drm_ioctl, sg_drm_call_name);
}

static const struct file_operations sg_drm_fops = {
	.owner = THIS_MODULE,
	.open = drm_open,
	.release = drm_release,
	.unlocked_ioctl = sg_drm_ioctl,
	.compat_ioctl = drm_compat_ioctl,
	.mmap = drm_gem_mmap,
	.poll = drm_poll,
	.read = drm_read,
	.llseek = noop_llseek,
	.show_fdinfo = drm_show_fdinfo,
#ifdef FOP_UNSIGNED_OFFSET
	.fop_flags = FOP_UNSIGNED_OFFSET,
#endif
};

/* drm_show_fdinfo() prints the client id, which identifies the fds of one drm_file. */
static void sg_drm_fdinfo(struct drm_printer *p, struct drm_file *file_priv)
{
	struct sg_device *dev = sg_file_of(file_priv)->dev;

	drm_printf(p, "softgpu-index:\t%u\n", dev->index);
}

static const struct drm_driver sg_drm_driver = {
	.driver_features = DRIVER_GEM | DRIVER_RENDER | DRIVER_SYNCOBJ | DRIVER_SYNCOBJ_TIMELINE,
	.open = sg_drm_open,
	.postclose = sg_drm_postclose,
	.show_fdinfo = sg_drm_fdinfo,
	.ioctls = sg_drm_ioctls,
	.num_ioctls = ARRAY_SIZE(sg_drm_ioctls),
	.gem_prime_import = sg_prime_import,
	.fops = &sg_drm_fops,
	.name = "amdgpu",
	.desc = "AMD GPU, in software",
	.major = 3,
	.minor = SG_MODERN ? 64 : 61,
};

struct sg_device *sg_drm_alloc(struct device *parent)
{
	struct drm_device *drm;
	struct sg_device *dev;

	dev = devm_drm_dev_alloc(parent, &sg_drm_driver, struct sg_device, drm);
	if (IS_ERR(dev))
		return dev;
	drm = &dev->drm;
	/* devm drops its reference with the platform device; this one is ours. */
	drm_dev_get(drm);
	return dev;
}

int sg_drm_register(struct sg_device *dev)
{
	return drm_dev_register(&dev->drm, 0);
}

struct sg_file *sg_file_from(struct file *filp)
{
	struct drm_file *file_priv;

	if (filp->f_op != &sg_drm_fops)
		return NULL;
	file_priv = filp->private_data;
	return file_priv->driver_priv;
}
