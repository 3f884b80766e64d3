/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* Doorbells: a page that user space stores to, and how the GPU notices. */
#ifndef SOFTGPU_DOORBELL_H
#define SOFTGPU_DOORBELL_H

#include <linux/types.h>

struct sg_pdd;
struct sg_queue;
struct vm_area_struct;

/* Allocates the page. */
int sg_doorbells_alloc(struct sg_pdd *pdd);
void sg_doorbells_free(struct sg_pdd *pdd);
/* kfd mmap of the doorbell type. */
int sg_doorbells_mmap(struct sg_pdd *pdd, struct vm_area_struct *vma);

/* Was it rung since the last call? */
bool sg_doorbell_rung(struct sg_queue *q);
/* The same, without resetting it. */
bool sg_doorbell_waiting(const struct sg_queue *q);
/* From now on a store kicks the GPU's queues. False: it cannot, so they have to poll. */
bool sg_doorbells_cool(struct sg_pdd *pdd);

#endif
