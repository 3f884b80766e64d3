// SPDX-License-Identifier: GPL-2.0 OR MIT
/* CHECKPOINT: a process' GPUs, BOs, queues, events and SVM ranges into user memory. */
#include <linux/dma-buf.h>
#include <linux/fdtable.h>
#include <linux/file.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "chardev.h"
#include "criu.h"
#include "mem.h"
#include "svm.h"

/* Below this handle the driver has BOs of its own, which CRIU does not see. */
#define SG_GPUVM_BASE	SZ_64K

static bool sg_mem_dumped(const struct sg_mem *mem)
{
	return !mem->va || mem->va > SG_GPUVM_BASE;
}

static u32 sg_criu_count_bos(struct sg_process *p)
{
	struct sg_mem *mem;
	unsigned int i;
	int handle;
	u32 count = 0;

	for (i = 0; i < p->n_pdds; i++)
		idr_for_each_entry(&p->pdds[i]->handles, mem, handle)
			count += sg_mem_dumped(mem);
	return count;
}

void sg_criu_count(struct sg_process *p, struct sg_criu_counts *counts)
{
	u32 queues, events = sg_events_count(p), ranges;
	u64 queue_bytes, range_bytes;

	sg_queues_criu_info(p, &queues, &queue_bytes);
	sg_svm_criu_info(p, &ranges, &range_bytes);
	counts->devices = p->n_pdds;
	counts->bos = sg_criu_count_bos(p);
	counts->objects = queues + events + ranges;
	counts->bytes = sizeof(struct sg_criu_process_priv) +
			counts->devices * sizeof(struct sg_criu_device_priv) +
			(u64)counts->bos * sizeof(struct sg_criu_bo_priv) + queue_bytes +
			events * sizeof(struct sg_criu_event) + range_bytes;
}

int sg_criu_fd_reserve(struct sg_criu_fd *slot, struct sg_mem *mem)
{
	struct dma_buf *dmabuf = sg_mem_dmabuf(mem);
	int fd;

	if (IS_ERR(dmabuf))
		return PTR_ERR(dmabuf);
	fd = get_unused_fd_flags(0);
	if (fd < 0)
		return fd;
	get_dma_buf(dmabuf);
	slot->fd = fd;
	slot->file = dmabuf->file;
	return 0;
}

void sg_criu_fds_install(struct sg_criu_fd *slots, u32 count)
{
	u32 i;

	for (i = 0; i < count; i++)
		if (slots[i].file)
			fd_install(slots[i].fd, slots[i].file);
}

void sg_criu_fds_drop(struct sg_criu_fd *slots, u32 count)
{
	u32 i;

	for (i = 0; i < count; i++) {
		if (!slots[i].file)
			continue;
		put_unused_fd(slots[i].fd);
		fput(slots[i].file);
	}
}

static int sg_dump_process(struct sg_process *p, u8 __user *priv, u64 *offset)
{
	struct sg_criu_process_priv to = { .version = SG_CRIU_VERSION, .xnack_mode = p->xnack };

	if (copy_to_user(priv + *offset, &to, sizeof(to)))
		return -EFAULT;
	*offset += sizeof(to);
	return 0;
}

static int sg_dump_devices(struct sg_process *p, u8 __user *user, u8 __user *priv, u64 *offset)
{
	struct sg_criu_device_priv none = {};
	unsigned int i;

	for (i = 0; i < p->n_pdds; i++) {
		struct kfd_criu_device_bucket bucket = {
			.user_gpu_id = p->pdds[i]->user_gpu_id,
			.actual_gpu_id = p->pdds[i]->dev->gpu_id,
		};

		if (copy_to_user(user + i * sizeof(bucket), &bucket, sizeof(bucket)) ||
		    copy_to_user(priv + *offset, &none, sizeof(none)))
			return -EFAULT;
		*offset += sizeof(none);
	}
	return 0;
}

static u64 sg_dump_offset(const struct sg_mem *mem)
{
	if (mem->alloc_flags & KFD_IOC_ALLOC_MEM_FLAGS_DOORBELL)
		return sg_mmap_offset(SG_MMAP_DOORBELL, mem->pdd->dev->gpu_id);
	if (mem->alloc_flags & KFD_IOC_ALLOC_MEM_FLAGS_MMIO_REMAP)
		return sg_mmap_offset(SG_MMAP_MMIO, mem->pdd->dev->gpu_id);
	return sg_mem_mmap_offset(mem);
}

static int sg_dump_bo(struct sg_mem *mem, struct kfd_criu_bo_bucket *bucket, struct sg_criu_bo_priv *priv,
		      struct sg_criu_fd *slot)
{
	struct sg_process *p = mem->pdd->process;
	unsigned int i, n = 0;
	int err;

	bucket->gpu_id = mem->pdd->user_gpu_id;
	bucket->addr = mem->va;
	bucket->size = mem->size;
	bucket->alloc_flags = mem->alloc_flags;
	bucket->offset = sg_dump_offset(mem);
	bucket->dmabuf_fd = U32_MAX;
	priv->idr_handle = mem->handle;
	priv->user_addr = mem->user_addr;
	for (i = 0; i < p->n_pdds; i++)
		if (mem->maps[p->pdds[i]->dev->index][0])
			priv->mapped_gpuids[n++] = p->pdds[i]->user_gpu_id;
	if (mem->bo->store == SG_STORE_HOST || mem->bo->store == SG_STORE_FIXED)
		return 0;
	err = sg_criu_fd_reserve(slot, mem);
	if (!err)
		bucket->dmabuf_fd = slot->fd;
	return err;
}

struct sg_dump {
	struct kfd_criu_bo_bucket *buckets;
	struct sg_criu_bo_priv *privs;
	struct sg_criu_fd *fds;
};

static int sg_dump_fill(struct sg_process *p, struct sg_dump *dump)
{
	struct sg_mem *mem;
	unsigned int i;
	int handle, err;
	u32 n = 0;

	for (i = 0; i < p->n_pdds; i++)
		idr_for_each_entry(&p->pdds[i]->handles, mem, handle) {
			if (!sg_mem_dumped(mem))
				continue;
			err = sg_dump_bo(mem, &dump->buckets[n], &dump->privs[n], &dump->fds[n]);
			if (err)
				return err;
			n++;
		}
	return 0;
}

/* The last step: descriptors are installed in the caller's table when nothing can fail any more. */
static int sg_dump_bos(struct sg_process *p, u32 count, u8 __user *user, u8 __user *priv)
{
	struct sg_dump dump = {
		.buckets = kvcalloc(count, sizeof(*dump.buckets), GFP_KERNEL),
		.privs = kvcalloc(count, sizeof(*dump.privs), GFP_KERNEL),
		.fds = kvcalloc(count, sizeof(*dump.fds), GFP_KERNEL),
	};
	int err = -ENOMEM;

	if (!dump.buckets || !dump.privs || !dump.fds)
		goto out;
	err = sg_dump_fill(p, &dump);
	if (!err && (copy_to_user(user, dump.buckets, count * sizeof(*dump.buckets)) ||
		     copy_to_user(priv, dump.privs, count * sizeof(*dump.privs))))
		err = -EFAULT;
	if (err)
		sg_criu_fds_drop(dump.fds, count);
	else
		sg_criu_fds_install(dump.fds, count);
out:
	kvfree(dump.buckets);
	kvfree(dump.privs);
	kvfree(dump.fds);
	return err;
}

/* Threads that are not stopped may make events and ranges meanwhile: then they do not fit. */
static int sg_dump_events(struct sg_process *p, u8 __user *priv, u64 *offset, u64 limit)
{
	unsigned int count = sg_events_count(p);
	struct sg_criu_event *events = kvcalloc(count, sizeof(*events), GFP_KERNEL);
	int dumped, err = 0;

	if (!events)
		return -ENOMEM;
	dumped = sg_events_dump(p, events, count);
	if (dumped < 0)
		err = dumped;
	else if (*offset + dumped * sizeof(*events) > limit)
		err = -EINVAL;
	else if (copy_to_user(priv + *offset, events, dumped * sizeof(*events)))
		err = -EFAULT;
	else
		*offset += dumped * sizeof(*events);
	kvfree(events);
	return err;
}

int sg_criu_checkpoint(struct sg_process *p, struct kfd_ioctl_criu_args *args)
{
	u8 __user *priv = u64_to_user_ptr(args->priv_data);
	struct sg_criu_counts counts;
	u64 offset = 0, bos_at;
	int err;

	if (!p->queues_paused)
		return -EINVAL;
	sg_criu_count(p, &counts);
	if (counts.devices != args->num_devices || counts.bos != args->num_bos ||
	    counts.objects != args->num_objects || counts.bytes != args->priv_data_size)
		return -EINVAL;
	err = sg_dump_process(p, priv, &offset);
	err = err ?: sg_dump_devices(p, u64_to_user_ptr(args->devices), priv, &offset);
	bos_at = offset;
	offset += (u64)counts.bos * sizeof(struct sg_criu_bo_priv);
	err = err ?: sg_queues_criu_dump(p, priv, &offset);
	err = err ?: sg_dump_events(p, priv, &offset, counts.bytes);
	err = err ?: sg_svm_criu_dump(p, priv, &offset, counts.bytes);
	return err ?: sg_dump_bos(p, counts.bos, u64_to_user_ptr(args->bos), priv + bos_at);
}
