// SPDX-License-Identifier: GPL-2.0 OR MIT
/* RESTORE: makes everything that CHECKPOINT wrote again in the caller, with queues evicted. */
#include <linux/file.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "chardev.h"
#include "criu.h"
#include "doorbell.h"
#include "mem.h"
#include "process.h"
#include "svm.h"
#include "userptr.h"

struct sg_restore {
	struct sg_process *p;
	const struct kfd_ioctl_criu_args *args;
	u8 __user *priv;
	u64 offset, size;		/* of private data: read so far, in all */
};

static int sg_restore_read(struct sg_restore *r, void *to, u64 size)
{
	if (r->offset + size > r->size)
		return -EINVAL;
	if (copy_from_user(to, r->priv + r->offset, size))
		return -EFAULT;
	r->offset += size;
	return 0;
}

static int sg_restore_process(struct sg_restore *r)
{
	struct sg_criu_process_priv from;
	int err = sg_restore_read(r, &from, sizeof(from));

	if (err)
		return err;
	if (from.version != SG_CRIU_VERSION)
		return -EINVAL;
	if (from.xnack_mode && !sg_xnack_possible(r->p))
		return -EPERM;
	r->p->xnack = from.xnack_mode;
	return 0;
}

static int sg_restore_device(struct sg_process *p, const struct kfd_criu_device_bucket *bucket)
{
	struct sg_device *dev = sg_device_by_id(bucket->actual_gpu_id);
	struct sg_pdd *pdd = dev ? sg_pdd_of(p, dev) : NULL;
	struct file *drm_file;

	if (!bucket->user_gpu_id || !pdd || pdd->drm_file)
		return -EINVAL;
	pdd->user_gpu_id = bucket->user_gpu_id;
	drm_file = fget(bucket->drm_fd);
	if (!drm_file)
		return -EINVAL;
	if (sg_pdd_acquire(pdd, drm_file)) {
		fput(drm_file);
		return -EINVAL;
	}
	return sg_doorbells_alloc(pdd);
}

static int sg_restore_devices(struct sg_restore *r)
{
	const struct kfd_ioctl_criu_args *args = r->args;
	struct kfd_criu_device_bucket *buckets;
	int err = 0;
	u32 i;

	if (args->num_devices != r->p->n_pdds)
		return -EINVAL;
	if (r->offset + args->num_devices * sizeof(struct sg_criu_device_priv) > r->size)
		return -EINVAL;
	buckets = memdup_array_user(u64_to_user_ptr(args->devices), args->num_devices, sizeof(*buckets));
	if (IS_ERR(buckets))
		return PTR_ERR(buckets);
	for (i = 0; i < args->num_devices && !err; i++)
		err = sg_restore_device(r->p, &buckets[i]);
	r->offset += args->num_devices * sizeof(struct sg_criu_device_priv);
	kfree(buckets);
	return err;
}

static int sg_restore_check_bo(const struct kfd_criu_bo_bucket *bucket, const struct sg_criu_bo_priv *priv)
{
	if (priv->idr_handle > INT_MAX)
		return -EINVAL;
	if (bucket->alloc_flags & KFD_IOC_ALLOC_MEM_FLAGS_DOORBELL)
		return bucket->size == SG_DOORBELL_BYTES ? 0 : -EINVAL;
	if (bucket->alloc_flags & KFD_IOC_ALLOC_MEM_FLAGS_MMIO_REMAP)
		return bucket->size == PAGE_SIZE ? 0 : -EINVAL;
	return 0;
}

static int sg_restore_map_bo(struct sg_process *p, struct sg_mem *mem, const struct sg_criu_bo_priv *priv)
{
	unsigned int i;
	int err = 0;

	for (i = 0; i < p->n_pdds && priv->mapped_gpuids[i] && !err; i++)
		err = sg_mem_map_one(mem, priv->mapped_gpuids[i], true);
	return err;
}

static u64 sg_restored_offset(const struct sg_mem *mem)
{
	if (mem->alloc_flags & KFD_IOC_ALLOC_MEM_FLAGS_DOORBELL)
		return sg_mmap_offset(SG_MMAP_DOORBELL, mem->pdd->dev->gpu_id);
	if (mem->alloc_flags & KFD_IOC_ALLOC_MEM_FLAGS_MMIO_REMAP)
		return sg_mmap_offset(SG_MMAP_MMIO, mem->pdd->dev->gpu_id);
	return sg_mem_mmap_offset(mem);
}

static int sg_restore_bo(struct sg_process *p, struct kfd_criu_bo_bucket *bucket,
			 const struct sg_criu_bo_priv *priv, struct sg_criu_fd *slot)
{
	struct sg_pdd *pdd = sg_pdd_by_user_id(p, bucket->gpu_id);
	struct sg_mem_request request = {
		.va = bucket->addr,
		.size = bucket->size,
		.flags = bucket->alloc_flags,
		.user_addr = priv->user_addr,
		.handle = priv->idr_handle,
		.restore = true,
	};
	struct sg_mem *mem;
	int err;

	if (!pdd)
		return -ENODEV;
	err = sg_restore_check_bo(bucket, priv);
	if (err)
		return err;
	err = sg_mem_create(pdd, &request, &mem);
	if (err)
		return err;
	if (bucket->alloc_flags & ~KFD_IOC_ALLOC_MEM_FLAGS_USERPTR & 0xff)
		bucket->restored_offset = sg_restored_offset(mem);
	/* A later failure leaves the BO in the process, as with the driver. */
	err = sg_restore_map_bo(p, mem, priv);
	if (err)
		return err;
	bucket->dmabuf_fd = U32_MAX;
	if (mem->bo->store != SG_STORE_OWN)
		return 0;
	err = sg_criu_fd_reserve(slot, mem);
	if (!err)
		bucket->dmabuf_fd = slot->fd;
	return err;
}

static int sg_restore_each_bo(struct sg_restore *r, struct kfd_criu_bo_bucket *buckets, struct sg_criu_fd *fds)
{
	u32 count = r->args->num_bos, i;
	struct sg_criu_bo_priv *privs = kvcalloc(count, sizeof(*privs), GFP_KERNEL_ACCOUNT | __GFP_NOWARN);
	int err;

	if (!privs)
		return -ENOMEM;
	err = sg_restore_read(r, privs, count * sizeof(*privs));
	for (i = 0; i < count && !err; i++)
		err = sg_restore_bo(r->p, &buckets[i], &privs[i], &fds[i]);
	kvfree(privs);
	return err;
}

static int sg_restore_bos(struct sg_restore *r)
{
	u64 count = r->args->num_bos;
	struct kfd_criu_bo_bucket *buckets;
	struct sg_criu_fd *fds;
	int err = -ENOMEM;

	if (r->offset + count * sizeof(struct sg_criu_bo_priv) > r->size)
		return -EINVAL;
	/* From here to RESUME the driver ignores changes of host memory. */
	sg_userptr_block(r->p);
	buckets = kvcalloc(count, sizeof(*buckets), GFP_KERNEL_ACCOUNT | __GFP_NOWARN);
	fds = kvcalloc(count, sizeof(*fds), GFP_KERNEL_ACCOUNT | __GFP_NOWARN);
	if (!buckets || !fds)
		goto out;
	err = copy_from_user(buckets, u64_to_user_ptr(r->args->bos), count * sizeof(*buckets)) ? -EFAULT : 0;
	err = err ?: sg_restore_each_bo(r, buckets, fds);
	if (!err && copy_to_user(u64_to_user_ptr(r->args->bos), buckets, count * sizeof(*buckets)))
		err = -EFAULT;
	if (err)
		sg_criu_fds_drop(fds, count);
	else
		sg_criu_fds_install(fds, count);
out:
	kvfree(buckets);
	kvfree(fds);
	return err;
}

static int sg_restore_event(struct sg_restore *r)
{
	struct sg_criu_event from;
	int err = sg_restore_read(r, &from, sizeof(from));

	return err ?: sg_event_restore(r->p, &from);
}

static int sg_restore_object(struct sg_restore *r)
{
	u32 type;

	if (r->offset + sizeof(type) > r->size)
		return -EINVAL;
	if (copy_from_user(&type, r->priv + r->offset, sizeof(type)))
		return -EFAULT;
	switch (type) {
	case SG_CRIU_QUEUE:
		return sg_queue_criu_restore(r->p, r->priv, &r->offset, r->size);
	case SG_CRIU_EVENT:
		return sg_restore_event(r);
	case SG_CRIU_SVM:
		return sg_svm_criu_restore(r->p, r->priv, &r->offset, r->size);
	default:
		return -EINVAL;
	}
}

int sg_criu_restore(struct sg_process *p, struct kfd_ioctl_criu_args *args)
{
	struct sg_restore r = {
		.p = p,
		.args = args,
		.priv = u64_to_user_ptr(args->priv_data),
		.size = args->priv_data_size,
	};
	int err;
	u32 i;

	/* No queue that is made from here on runs before RESUME. */
	sg_process_evict_queues(p, SG_EVICT_RESTORE);
	err = sg_restore_process(&r);
	err = err ?: sg_restore_devices(&r);
	err = err ?: sg_restore_bos(&r);
	for (i = 0; i < args->num_objects && !err; i++)
		err = sg_restore_object(&r);
	if (!err && r.offset != r.size)
		err = -EINVAL;
	return err;
}
