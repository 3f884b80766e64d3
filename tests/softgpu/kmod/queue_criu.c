// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Queues in CRIU_OP CHECKPOINT and RESTORE: a fixed record, MQDs, control stacks. */
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "queue.h"

#define SG_CRIU_OBJECT_QUEUE	0

struct sg_criu_queue {
	u32 object_type;
	u64 q_address;
	u64 q_size;
	u64 read_ptr;
	u64 write_ptr;
	u64 doorbell_off;
	u64 eop_address;
	u64 save_address;
	u32 gpu_id;
	u32 type;
	u32 format;
	u32 q_id;
	u32 priority;
	u32 q_percent;
	u32 doorbell_id;
	u32 gws;
	u32 sdma_id;
	u32 eop_size;
	u32 save_size;
	u32 ctl_stack_size;
	u32 mqd_size;
};

static_assert(sizeof(struct sg_criu_queue) == 120);
static_assert(offsetof(struct sg_criu_queue, gpu_id) == 64);
static_assert(offsetof(struct sg_criu_queue, mqd_size) == 112);

static u32 sg_criu_mqd_bytes(const struct sg_queue *q)
{
	return sg_mqd_bytes(q->props.type) * sg_queue_xccs(q->pdd);
}

static u32 sg_criu_ctl_stack_bytes(const struct sg_queue *q)
{
	return q->run.ctl_stack_bytes * sg_queue_xccs(q->pdd);
}

static u64 sg_criu_bytes(const struct sg_queue *q)
{
	return sizeof(struct sg_criu_queue) + sg_criu_mqd_bytes(q) + sg_criu_ctl_stack_bytes(q);
}

void sg_queues_criu_info(struct sg_process *p, u32 *count, u64 *bytes)
{
	struct sg_queue *q;

	*count = 0;
	*bytes = 0;
	list_for_each_entry(q, &p->queues->all, link) {
		++*count;
		*bytes += sg_criu_bytes(q);
	}
}

static void sg_criu_record(const struct sg_queue *q, struct sg_criu_queue *to)
{
	*to = (struct sg_criu_queue) {
		.object_type = SG_CRIU_OBJECT_QUEUE,
		.q_address = q->props.address,
		.q_size = q->props.size,
		.read_ptr = q->props.read_ptr,
		.write_ptr = q->props.write_ptr,
		.eop_address = q->props.eop_address,
		.save_address = q->props.save_address,
		.gpu_id = q->pdd->user_gpu_id,
		.type = q->props.type,
		.format = q->props.format,
		.q_id = q->id,
		.priority = q->props.priority,
		.q_percent = q->props.percent,
		.doorbell_id = q->doorbell,
		.sdma_id = q->sdma_id,
		.gws = q->gws,
		.eop_size = q->props.eop_size,
		.save_size = q->props.save_size,
		.ctl_stack_size = sg_criu_ctl_stack_bytes(q),
		.mqd_size = sg_criu_mqd_bytes(q),
	};
}

static int sg_criu_dump_one(struct sg_queue *q, u8 __user *to)
{
	u8 *image = kvzalloc(sg_criu_bytes(q), GFP_KERNEL), *at;
	u32 xcc;
	int err;

	if (!image)
		return -ENOMEM;
	sg_criu_record(q, (struct sg_criu_queue *)image);
	at = image + sizeof(struct sg_criu_queue);
	/* The XCCs of a partition work as one: each has the same image. */
	for (xcc = 0; xcc < sg_queue_xccs(q->pdd); xcc++, at += sg_mqd_bytes(q->props.type))
		memcpy(at, q->run.mqd, sg_mqd_bytes(q->props.type));
	for (xcc = 0; xcc < sg_queue_xccs(q->pdd); xcc++, at += q->run.ctl_stack_bytes)
		memcpy(at, q->run.ctl_stack, q->run.ctl_stack_bytes);
	err = copy_to_user(to, image, sg_criu_bytes(q)) ? -EFAULT : 0;
	kvfree(image);
	return err;
}

int sg_queues_criu_dump(struct sg_process *p, u8 __user *priv, u64 *offset)
{
	unsigned int gpu;
	struct sg_queue *q;
	int err;

	for (gpu = 0; gpu < p->n_pdds; gpu++) {
		list_for_each_entry(q, &p->queues->all, link) {
			if (q->pdd != p->pdds[gpu])
				continue;
			/* Only an evicted queue has its state in memory. */
			if (sg_queue_may_run(q))
				return -EINVAL;
			err = sg_criu_dump_one(q, priv + *offset);
			if (err)
				return err;
			*offset += sg_criu_bytes(q);
		}
	}
	return 0;
}

/*
 * Linux 7.2 compares the record's size with one XCC's MQD, though it dumps
 * the MQDs of all XCCs, so a queue of a multi-XCC chip cannot be restored there.
 */
static u32 sg_criu_mqd_expected(const struct sg_pdd *pdd, u32 one)
{
	return SG_MODERN && !sg_params.strict ? one * sg_queue_xccs(pdd) : one;
}

static int sg_criu_check(const struct sg_criu_queue *from, const struct sg_pdd *pdd)
{
	if (from->type != SG_QUEUE_COMPUTE && from->type != SG_QUEUE_SDMA &&
	    from->type != SG_QUEUE_SDMA_XGMI)
		return -EINVAL;
	if (pdd->dev->chip->mes)
		return -EINVAL;
	if (from->mqd_size != sg_criu_mqd_expected(pdd, sg_mqd_bytes(from->type)))
		return -EINVAL;
	if (from->ctl_stack_size > (u64)pdd->dev->chip->ctl_stack_size * sg_queue_xccs(pdd))
		return -EINVAL;
	return 0;
}

static int sg_criu_restore_one(struct sg_pdd *pdd, const struct sg_criu_queue *from, const u8 *extra)
{
	struct sg_queue_props props = {
		.type = from->type,
		.format = from->format,
		.percent = from->q_percent,
		.priority = from->priority,
		.address = from->q_address,
		.size = from->q_size,
		.read_ptr = from->read_ptr,
		.write_ptr = from->write_ptr,
		.eop_address = from->eop_address,
		.eop_size = from->eop_size,
		.save_address = from->save_address,
		.save_size = from->save_size,
		.ctl_stack_size = from->ctl_stack_size / sg_queue_xccs(pdd),
	};
	struct sg_queue_image image = {
		.id = from->q_id,
		.exact = { .sdma_id = from->sdma_id, .doorbell = from->doorbell_id },
		.mqd = extra,
		.ctl_stack = extra + from->mqd_size,
		.ctl_stack_bytes = from->ctl_stack_size,
	};
	struct sg_queue *q;
	int err;

	err = sg_queue_add(pdd, &props, &image, &q);
	if (!err)
		q->gws = from->gws;
	return err;
}

int sg_queue_criu_restore(struct sg_process *p, u8 __user *priv, u64 *offset, u64 size)
{
	struct sg_criu_queue from;
	struct sg_pdd *pdd;
	u64 bytes;
	u8 *extra;
	int err;

	if (*offset + sizeof(from) > size)
		return -EINVAL;
	if (copy_from_user(&from, priv + *offset, sizeof(from)))
		return -EFAULT;
	pdd = sg_pdd_by_user_id(p, from.gpu_id);
	if (!pdd)
		return -EINVAL;
	err = sg_criu_check(&from, pdd);
	if (err)
		return err;
	*offset += sizeof(from);
	bytes = (u64)from.mqd_size + from.ctl_stack_size;
	if (*offset + bytes > size)
		return -EINVAL;
	extra = kvmalloc(bytes, GFP_KERNEL);
	if (!extra)
		return -ENOMEM;
	err = copy_from_user(extra, priv + *offset, bytes) ? -EFAULT : 0;
	*offset += bytes;
	if (!err)
		err = sg_criu_restore_one(pdd, &from, extra);
	kvfree(extra);
	return err;
}
