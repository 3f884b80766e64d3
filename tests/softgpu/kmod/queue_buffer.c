// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The memory that a queue needs: each buffer must be mapped on the GPU at
 * exactly the given address, with exactly the expected size. A restored queue
 * holds none of them: CRIU_OP RESTORE does not look.
 */
#include "queue.h"
#include "svm.h"

/* Less than a page does not show the mapping's size. */
static int sg_queue_hold(struct sg_queue *q, enum sg_queue_buffer which, u64 va, u64 size)
{
	q->buffers[which] = sg_vm_lookup_bo(q->pdd->vm, va, size & PAGE_MASK);
	if (!q->buffers[which])
		return -EINVAL;
	atomic_inc(&q->buffers[which]->queues);
	return 0;
}

static void sg_queue_release(struct sg_queue *q, enum sg_queue_buffer which)
{
	if (!q->buffers[which])
		return;
	atomic_dec(&q->buffers[which]->queues);
	sg_bo_put(q->buffers[which]);
	q->buffers[which] = NULL;
}

static int sg_queue_hold_compute(struct sg_queue *q)
{
	const struct sg_chip *chip = q->pdd->dev->chip;
	const struct sg_queue_props *props = &q->props;
	u64 save;
	int err;

	if (props->eop_address) {
		if (props->eop_size < chip->eop_size)
			return -EINVAL;
		err = sg_queue_hold(q, SG_BUFFER_EOP, props->eop_address,
				    ALIGN((u64)props->eop_size, PAGE_SIZE));
		if (err)
			return err;
	}
	if (props->ctl_stack_size != chip->ctl_stack_size || props->save_size < chip->cwsr_size)
		return -EINVAL;
	save = ALIGN(((u64)props->save_size + chip->debug_size) * chip->xccs, PAGE_SIZE);
	err = sg_queue_hold(q, SG_BUFFER_SAVE, props->save_address, save);
	if (err)
		err = sg_svm_always_mapped(q->pdd, props->save_address, save) ? 0 : -EINVAL;
	return err;
}

int sg_queue_take_buffers(struct sg_queue *q)
{
	const struct sg_queue_props *props = &q->props;
	int err;

	if (!sg_params.strict)
		return 0;
	err = sg_queue_hold(q, SG_BUFFER_WPTR, props->write_ptr, PAGE_SIZE);
	if (!err)
		err = sg_queue_hold(q, SG_BUFFER_RPTR, props->read_ptr, PAGE_SIZE);
	if (!err)
		err = sg_queue_hold(q, SG_BUFFER_RING, props->address,
				    SG_MODERN ? PAGE_ALIGN(props->size + props->metadata_size) :
						props->size);
	if (!err && !sg_queue_is_sdma(q))
		err = sg_queue_hold_compute(q);
	if (err)
		sg_queue_drop_buffers(q);
	return err;
}

/* UPDATE_QUEUE names another ring. */
int sg_queue_take_ring(struct sg_queue *q, u64 address, u64 size)
{
	u64 bytes = (size + q->props.metadata_size) & PAGE_MASK;
	struct sg_bo *ring = sg_vm_lookup_bo(q->pdd->vm, address, bytes);

	if (!ring)
		return sg_params.strict ? -EFAULT : 0;
	sg_queue_release(q, SG_BUFFER_RING);
	atomic_inc(&ring->queues);
	q->buffers[SG_BUFFER_RING] = ring;
	return 0;
}

void sg_queue_drop_buffers(struct sg_queue *q)
{
	int i;

	for (i = 0; i < SG_BUFFERS; i++)
		sg_queue_release(q, i);
}
