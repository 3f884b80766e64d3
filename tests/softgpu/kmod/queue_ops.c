// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Rarer calls for a queue: CU masks, wave state, global wave sync. */
#include <linux/uaccess.h>

#include "queue.h"

#define SG_MAX_CUS	1024

static struct sg_queue *sg_queue_find(struct sg_process *p, u32 id)
{
	return id < SG_MAX_QUEUES ? idr_find(&p->queues->ids, id) : NULL;
}

/* gfx10 and later mask CUs in pairs. */
static bool sg_cu_pairs(const u32 *mask, u32 bits)
{
	u32 i;

	for (i = 0; i < bits; i += 2) {
		u32 pair = mask[i / 32] >> i % 32 & 3;

		if (pair && pair != 3)
			return false;
	}
	return true;
}

/* Kernels run on all CUs of this GPU at once: a mask is checked and then without effect. */
int sg_queue_set_cu_mask(struct sg_process *p, struct kfd_ioctl_set_cu_mask_args *args)
{
	u32 bits = min_t(u32, args->num_cu_mask, SG_MAX_CUS);
	u32 mask[SG_MAX_CUS / 32];
	struct sg_queue *q;
	int err = 0;

	if (!args->num_cu_mask || args->num_cu_mask % 32)
		return -EINVAL;
	if (copy_from_user(mask, u64_to_user_ptr(args->cu_mask_ptr), bits / 8))
		return -EFAULT;
	mutex_lock(&p->lock);
	q = sg_queue_find(p, args->queue_id);
	if (!q)
		err = -EFAULT;
	else if (q->pdd->dev->chip->gfx_target >= 100000 && !sg_cu_pairs(mask, bits))
		err = -EINVAL;
	mutex_unlock(&p->lock);
	return err;
}

/* Of an evicted compute queue: its control stack. */
int sg_queue_wave_state(struct sg_process *p, struct kfd_ioctl_get_queue_wave_state_args *args)
{
	struct sg_queue *q;
	int err = 0;

	mutex_lock(&p->lock);
	q = sg_queue_find(p, args->queue_id);
	if (!q) {
		err = -EFAULT;
	} else if (sg_queue_is_sdma(q) || sg_queue_may_run(q)) {
		err = -EINVAL;
	} else if (copy_to_user(u64_to_user_ptr(args->ctl_stack_address), q->run.ctl_stack,
				q->run.ctl_stack_bytes)) {
		err = -EFAULT;
	} else {
		args->ctl_stack_used_size = q->run.ctl_stack_bytes;
		args->save_area_used_size = q->run.in_flight ? sizeof(struct sg_wave) : 0;
	}
	mutex_unlock(&p->lock);
	return err;
}

/* One queue of a process on a GPU has it. */
int sg_queue_alloc_gws(struct sg_process *p, struct kfd_ioctl_alloc_queue_gws_args *args)
{
	struct sg_queue *q, *other;
	bool want = args->num_gws, had = false;
	int err = 0, id;

	mutex_lock(&p->lock);
	q = sg_queue_find(p, args->queue_id);
	if (!q)
		err = -EINVAL;
	else if (!q->pdd->dev->chip->gws)
		err = -ENODEV;
	idr_for_each_entry(&p->queues->ids, other, id)
		had |= q && other->gws && other->pdd == q->pdd;
	if (!err && want == had)
		err = want ? -EBUSY : -EINVAL;
	if (!err)
		q->gws = want;
	args->first_gws = 0;
	mutex_unlock(&p->lock);
	return err;
}
