// SPDX-License-Identifier: GPL-2.0 OR MIT
/* User queues: made, changed and destroyed by ioctls; evicted and resumed by the gate. */
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "doorbell.h"
#include "queue.h"

#define SG_MAX_PERCENT		100
#define SG_MAX_PRIORITY		15
#define SG_MIN_RING		1024
/* Queues of a process on one GPU; more on chips with several XCCs. */
#define SG_MAX_ON_GPU		127
#define SG_MAX_ON_XCCS		255
/* kfd mmap offsets of doorbells. */
#define SG_DOORBELL_OFFSET	(3ULL << 62)
#define SG_MMAP_GPU_SHIFT	46

int sg_queues_init(struct sg_process *p)
{
	struct sg_queues *queues = kvzalloc(sizeof(*queues), GFP_KERNEL_ACCOUNT);
	int i;

	if (!queues)
		return -ENOMEM;
	idr_init(&queues->ids);
	INIT_LIST_HEAD(&queues->all);
	for (i = 0; i < SG_MAX_GPUS; i++)
		mutex_init(&queues->doorbell_maps[i].lock);
	p->queues = queues;
	return 0;
}

void sg_queues_exit(struct sg_process *p)
{
	if (!p->queues)
		return;
	sg_queues_kill(p);
	idr_destroy(&p->queues->ids);
	kvfree(p->queues);
	p->queues = NULL;
}

static bool sg_ring_size_is_bad(u32 size)
{
	return size && !is_power_of_2(size);
}

/* Arguments that both CREATE_QUEUE and UPDATE_QUEUE refuse. */
static int sg_queue_check(u32 percentage, u32 priority, u64 ring, u32 size)
{
	if ((percentage & 0xff) > SG_MAX_PERCENT || priority > SG_MAX_PRIORITY)
		return -EINVAL;
	if (ring && !access_ok((void __user *)ring, sizeof(u64)))
		return -EFAULT;
	return sg_ring_size_is_bad(size) ? -EINVAL : 0;
}

static bool sg_bad_pointer(u64 va)
{
	return !access_ok((void __user *)va, sizeof(u32));
}

static int sg_queue_type(u32 asked, struct sg_queue_props *props)
{
	props->format = SG_QUEUE_PM4;
	switch (asked) {
	case KFD_IOC_QUEUE_TYPE_COMPUTE_AQL:
		props->format = SG_QUEUE_AQL;
		fallthrough;
	case KFD_IOC_QUEUE_TYPE_COMPUTE:
		props->type = SG_QUEUE_COMPUTE;
		return 0;
	case KFD_IOC_QUEUE_TYPE_SDMA:
		props->type = SG_QUEUE_SDMA;
		return 0;
	case KFD_IOC_QUEUE_TYPE_SDMA_XGMI:
		props->type = SG_QUEUE_SDMA_XGMI;
		return 0;
	case KFD_IOC_QUEUE_TYPE_SDMA_BY_ENG_ID:
		props->type = SG_QUEUE_SDMA_BY_ENGINE;
		return 0;
	default:
		return -ENOTSUPP;
	}
}

/* ABI 1.22 gave the structure's padding a meaning. */
static u32 sg_metadata_bytes(const struct kfd_ioctl_create_queue_args *args)
{
#if SG_MODERN
	return args->metadata_ring_size;
#else
	return 0;
#endif
}

static int sg_queue_props_from(const struct kfd_ioctl_create_queue_args *args,
			       struct sg_queue_props *props)
{
	int err = sg_queue_check(args->queue_percentage, args->queue_priority,
				 args->ring_base_address, args->ring_size);

	if (err)
		return err;
	if (sg_ring_size_is_bad(sg_metadata_bytes(args)))
		return -EINVAL;
	if (sg_bad_pointer(args->read_pointer_address) ||
	    sg_bad_pointer(args->write_pointer_address) ||
	    (args->eop_buffer_address && sg_bad_pointer(args->eop_buffer_address)) ||
	    (args->ctx_save_restore_address && sg_bad_pointer(args->ctx_save_restore_address)))
		return -EFAULT;
	*props = (struct sg_queue_props) {
		.percent = args->queue_percentage & 0xff,
		.priority = args->queue_priority,
		.address = args->ring_base_address,
		.size = max_t(u32, args->ring_size, SG_MIN_RING),
		.read_ptr = args->read_pointer_address,
		.write_ptr = args->write_pointer_address,
		.eop_address = args->eop_buffer_address,
		.eop_size = args->eop_buffer_size,
		.save_address = args->ctx_save_restore_address,
		.save_size = args->ctx_save_restore_size,
		.ctl_stack_size = args->ctl_stack_size,
		.engine = args->sdma_engine_id,
	};
	if (args->queue_type == KFD_IOC_QUEUE_TYPE_COMPUTE_AQL)
		props->metadata_size = sg_metadata_bytes(args);
	return sg_queue_type(args->queue_type, props);
}

static int sg_queue_id(struct sg_queue *q, const struct sg_queue_image *image)
{
	struct idr *ids = &q->process->queues->ids;
	int id;

	if (!image) {
		id = idr_alloc(ids, q, 0, SG_MAX_QUEUES, GFP_KERNEL);
		if (id == -ENOSPC)
			id = -ENOMEM;
	} else if (image->id >= SG_MAX_QUEUES) {
		id = -EINVAL;
	} else {
		id = idr_alloc(ids, q, image->id, image->id + 1, GFP_KERNEL);
	}
	if (id < 0)
		return id;
	q->id = id;
	return 0;
}

/* Under p->queue_lock; nothing of the queue runs afterwards if it is gated. */
static void sg_queue_gate(struct sg_queue *q, bool gated)
{
	sg_run_lock(q);
	q->run.gated = gated;
	sg_run_unlock(q);
}

static void sg_queue_free(struct sg_queue *q)
{
	sg_queue_drop_buffers(q);
	sg_mqd_free(q);
	kfree(q);
}

static int sg_queue_build(struct sg_queue *q, const struct sg_queue_image *image)
{
	int err = image ? 0 : sg_queue_take_buffers(q);

	if (!err)
		err = sg_queue_id(q, image);
	if (err)
		return err;
	err = sg_queue_number(q, image ? &image->exact : NULL);
	if (err)
		goto no_number;
	err = sg_mqd_alloc(q, image);
	if (err)
		goto no_mqd;
	err = sg_run_start(q);
	if (!err)
		return 0;
no_mqd:
	sg_queue_unnumber(q);
no_number:
	idr_remove(&q->process->queues->ids, q->id);
	return err;
}

/* Under p->lock. */
int sg_queue_add(struct sg_pdd *pdd, const struct sg_queue_props *props,
		 const struct sg_queue_image *image, struct sg_queue **made)
{
	unsigned int most = pdd->dev->chip->xccs > 1 ? SG_MAX_ON_XCCS : SG_MAX_ON_GPU;
	struct sg_process *p = pdd->process;
	struct sg_queue *q;
	int err;

	if (!pdd->vm || p->mm_gone)
		return -ESRCH;
	if (p->queues->count[pdd->dev->index] >= most)
		return -ENOSPC;
	err = sg_doorbells_alloc(pdd);
	if (err)
		return err;
	q = kzalloc(sizeof(*q), GFP_KERNEL_ACCOUNT);
	if (!q)
		return -ENOMEM;
	q->process = p;
	q->pdd = pdd;
	q->props = *props;
	q->run.gated = true;
	mutex_init(&q->run.lock);
	init_waitqueue_head(&q->run.wake);
	err = sg_queue_build(q, image);
	if (err) {
		sg_queue_free(q);
		return err;
	}
	sg_doorbell_rung(q);	/* rings of the previous owner */
	sg_born(SG_QUEUES);
	p->queues->count[pdd->dev->index]++;
	sg_queue_sysfs_add(q);
	mutex_lock(&p->queue_lock);
	list_add_tail(&q->link, &p->queues->all);
	if (!pdd->evicted)
		sg_queue_gate(q, false);
	mutex_unlock(&p->queue_lock);
	*made = q;
	return 0;
}

int sg_queue_create(struct sg_process *p, struct kfd_ioctl_create_queue_args *args)
{
	struct sg_queue_props props;
	struct sg_pdd *pdd;
	struct sg_queue *q;
	int err;

	err = sg_queue_props_from(args, &props);
	if (err)
		return err;
	mutex_lock(&p->lock);
	pdd = sg_pdd_by_user_id(p, args->gpu_id);
	if (!pdd)
		err = -EINVAL;
	else if (props.type == SG_QUEUE_SDMA_BY_ENGINE &&
		 props.engine >= pdd->dev->chip->sdma_engines + pdd->dev->chip->sdma_xgmi_engines)
		err = -EINVAL;
	else
		err = sg_queue_add(pdd, &props, NULL, &q);
	if (!err) {
		args->queue_id = q->id;
		args->doorbell_offset = SG_DOORBELL_OFFSET | (u64)args->gpu_id << SG_MMAP_GPU_SHIFT |
					q->doorbell * sizeof(u64);
	}
	mutex_unlock(&p->lock);
	return err;
}

/* Under p->lock. */
static void sg_queue_remove(struct sg_queue *q)
{
	struct sg_process *p = q->process;

	mutex_lock(&p->queue_lock);
	/* A later eviction does not see it: it must be stopped already, also
	 * where a test broke its gate. */
	WRITE_ONCE(q->run.ungated, false);
	sg_queue_gate(q, true);
	list_del(&q->link);
	mutex_unlock(&p->queue_lock);
	sg_run_end(q);
	sg_queue_sysfs_del(q);
	p->queues->count[q->pdd->dev->index]--;
	idr_remove(&p->queues->ids, q->id);
	sg_queue_unnumber(q);
	sg_queue_free(q);
	sg_died(SG_QUEUES);
}

int sg_queue_destroy(struct sg_process *p, u32 id)
{
	struct sg_queue *q;

	mutex_lock(&p->lock);
	q = id < SG_MAX_QUEUES ? idr_find(&p->queues->ids, id) : NULL;
	if (q)
		sg_queue_remove(q);
	mutex_unlock(&p->lock);
	return q ? 0 : -EINVAL;
}

void sg_queues_kill(struct sg_process *p)
{
	struct sg_queue *q;
	int id;

	mutex_lock(&p->lock);
	idr_for_each_entry(&p->queues->ids, q, id)
		sg_queue_remove(q);
	mutex_unlock(&p->lock);
}

bool sg_queues_any(struct sg_process *p)
{
	return !idr_is_empty(&p->queues->ids);
}

static int sg_queue_update_locked(struct sg_process *p, const struct kfd_ioctl_update_queue_args *args)
{
	u64 size = max_t(u32, args->ring_size, SG_MIN_RING);
	struct sg_queue *q;
	int err = 0;

	q = args->queue_id < SG_MAX_QUEUES ? idr_find(&p->queues->ids, args->queue_id) : NULL;
	if (!q)
		return -EFAULT;
	if (args->ring_base_address)
		err = sg_queue_take_ring(q, args->ring_base_address, size);
	if (err)
		return err;
	sg_run_lock(q);
	q->props.address = args->ring_base_address;
	q->props.size = size;
	q->props.percent = args->queue_percentage & 0xff;
	q->props.priority = args->queue_priority;
	sg_run_unlock(q);
	return 0;
}

int sg_queue_update(struct sg_process *p, struct kfd_ioctl_update_queue_args *args)
{
	int err = sg_queue_check(args->queue_percentage, args->queue_priority,
				 args->ring_base_address, args->ring_size);

	if (err)
		return err;
	mutex_lock(&p->lock);
	err = sg_queue_update_locked(p, args);
	mutex_unlock(&p->lock);
	return err;
}

static void sg_queues_gate(struct sg_pdd *pdd, bool gated)
{
	struct sg_queue *q;

	list_for_each_entry(q, &pdd->process->queues->all, link)
		if (q->pdd == pdd)
			sg_queue_gate(q, gated);
}

void sg_queues_stop(struct sg_pdd *pdd)
{
	sg_queues_gate(pdd, true);
}

void sg_queues_start(struct sg_pdd *pdd)
{
	sg_queues_gate(pdd, false);
}
