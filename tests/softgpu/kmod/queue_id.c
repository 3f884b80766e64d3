// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The numbers of a queue: its SDMA engine and slot, its doorbell. CRIU
 * restores them exactly or not at all.
 */
#include "exec_device.h"
#include "queue.h"

/* Doorbells of SDMA engines, and of others that are not compute: not assigned. */
#define SG_DOORBELL_ENGINES	0x100
#define SG_DOORBELL_OTHERS_END	0x200
#define SG_DOORBELL_PER_ENGINE	10
/* Odd slots of an engine have theirs in the other half of the page. */
#define SG_DOORBELL_MIRROR	512
/* From 7.x on, multi-XCC chips align an engine's first one: stores are 32 bytes. */
#define SG_DOORBELL_ALIGN	4

static u32 sg_sdma_total(const struct sg_queue *q, u32 engines)
{
	return engines * q->pdd->dev->chip->sdma_queues_per_engine;
}

static struct ida *sg_sdma_pool(struct sg_queue *q, u32 *engines)
{
	struct sg_device *dev = q->pdd->dev;
	bool xgmi = q->props.type == SG_QUEUE_SDMA_XGMI;

	*engines = xgmi ? dev->chip->sdma_xgmi_engines : dev->chip->sdma_engines;
	return xgmi ? &dev->exec->xgmi_ids : &dev->exec->sdma_ids;
}

/* gfx11 keeps the first two slots of every engine for the kernel. */
static u32 sg_sdma_reserved(const struct sg_queue *q, u32 engines)
{
	return q->pdd->dev->chip->sdma_version >= 0x060000 ? engines * 2 : 0;
}

static int sg_sdma_exact(struct ida *pool, u32 total, u32 reserved, u32 id)
{
	int got;

	if (id >= total)
		return -EINVAL;
	if (id < reserved)
		return -EBUSY;
	got = ida_alloc_range(pool, id, id, GFP_KERNEL);
	return got == -ENOSPC ? -EBUSY : got;
}

/* The first free slot of one engine: every `engines`th. */
static int sg_sdma_of_engine(struct ida *pool, u32 total, u32 reserved, u32 engines, u32 engine)
{
	u32 id;

	for (id = engine; id < total; id += engines) {
		int got = id < reserved ? -ENOSPC : ida_alloc_range(pool, id, id, GFP_KERNEL);

		if (got != -ENOSPC)
			return got;
	}
	return -ENOMEM;
}

static int sg_sdma_number(struct sg_queue *q, const struct sg_queue_exact *exact)
{
	const struct sg_chip *chip = q->pdd->dev->chip;
	u32 engines, total, reserved;
	bool chosen = q->props.type == SG_QUEUE_SDMA_BY_ENGINE;
	struct ida *pool;
	int id;

	if (chosen)
		q->props.type = q->props.engine < chip->sdma_engines ? SG_QUEUE_SDMA :
								       SG_QUEUE_SDMA_XGMI;
	pool = sg_sdma_pool(q, &engines);
	total = sg_sdma_total(q, engines);
	reserved = sg_sdma_reserved(q, engines);
	if (total <= reserved)
		return -ENOMEM;
	if (exact) {
		id = sg_sdma_exact(pool, total, reserved, exact->sdma_id);
	} else if (chosen) {
		u32 engine = q->props.type == SG_QUEUE_SDMA ? q->props.engine :
							      q->props.engine - chip->sdma_engines;

		id = sg_sdma_of_engine(pool, total, reserved, engines, engine);
	} else {
		id = ida_alloc_range(pool, reserved, total - 1, GFP_KERNEL);
		if (id == -ENOSPC)
			id = -ENOMEM;
	}
	if (id < 0)
		return id;
	q->sdma_id = id;
	return 0;
}

/* The one doorbell that a slot of an engine has. */
static u32 sg_sdma_doorbell(const struct sg_queue *q)
{
	const struct sg_chip *chip = q->pdd->dev->chip;
	bool xgmi = q->props.type == SG_QUEUE_SDMA_XGMI;
	u32 engines = xgmi ? chip->sdma_xgmi_engines : chip->sdma_engines;
	u32 engine = q->sdma_id % engines + (xgmi ? chip->sdma_engines : 0);
	u32 slot = q->sdma_id / engines;
	u32 base = SG_DOORBELL_ENGINES + engine * SG_DOORBELL_PER_ENGINE;

	if (SG_MODERN && chip->xccs > 1)
		base = ALIGN(base, SG_DOORBELL_ALIGN);
	return base + (slot & 1) * SG_DOORBELL_MIRROR + (slot >> 1);
}

static unsigned long *sg_doorbell_bits(struct sg_queue *q)
{
	return q->process->queues->doorbells[q->pdd->dev->index];
}

static bool sg_doorbell_is_compute(u32 id)
{
	id %= SG_DOORBELL_MIRROR;
	return id < SG_DOORBELL_ENGINES || id >= SG_DOORBELL_OTHERS_END;
}

static int sg_compute_doorbell(struct sg_queue *q, const struct sg_queue_exact *exact)
{
	unsigned long *bits = sg_doorbell_bits(q);
	u32 id = exact ? exact->doorbell : 0;

	if (exact && (id >= SG_MAX_QUEUES || !sg_doorbell_is_compute(id) || test_bit(id, bits)))
		return -EINVAL;
	if (!exact)
		do
			id = find_next_zero_bit(bits, SG_MAX_QUEUES, id);
		while (id < SG_MAX_QUEUES && !sg_doorbell_is_compute(id) && ++id);
	if (id >= SG_MAX_QUEUES)
		return -EBUSY;
	__set_bit(id, bits);
	q->doorbell = id;
	return 0;
}

static void sg_sdma_unnumber(struct sg_queue *q)
{
	u32 engines;

	ida_free(sg_sdma_pool(q, &engines), q->sdma_id);
}

/* Under p->lock. */
int sg_queue_number(struct sg_queue *q, const struct sg_queue_exact *exact)
{
	int err;

	if (!sg_queue_is_sdma(q))
		return sg_compute_doorbell(q, exact);
	err = sg_sdma_number(q, exact);
	if (err)
		return err;
	q->doorbell = sg_sdma_doorbell(q);
	if (exact && exact->doorbell != q->doorbell) {
		sg_sdma_unnumber(q);
		return -EINVAL;
	}
	return 0;
}

void sg_queue_unnumber(struct sg_queue *q)
{
	if (sg_queue_is_sdma(q))
		sg_sdma_unnumber(q);
	else
		__clear_bit(q->doorbell, sg_doorbell_bits(q));
}
