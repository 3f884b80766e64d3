// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Eviction: a GPU's queues of a process run while no eviction is in effect. */
#include <linux/ktime.h>

#include "softgpu.h"

/* With p->queue_lock held. */
static void sg_pdd_evict(struct sg_pdd *pdd, enum sg_evict_trigger trigger)
{
	sg_smi_queue_eviction(pdd->dev, sg_process_pid(pdd->process), trigger);
	if (pdd->evicted++)
		return;
	pdd->evicted_at = ktime_get_ns();
	sg_queues_stop(pdd);
}

static void sg_pdd_restore(struct sg_pdd *pdd)
{
	sg_smi_queue_restore(pdd->dev, sg_process_pid(pdd->process));
	/* A RESUME without an eviction; the driver warns and continues. */
	if (!pdd->evicted)
		return;
	if (--pdd->evicted)
		return;
	pdd->evicted_ns += ktime_get_ns() - pdd->evicted_at;
	sg_queues_start(pdd);
}

int sg_process_evict_queues(struct sg_process *p, enum sg_evict_trigger trigger)
{
	unsigned int i;

	mutex_lock(&p->queue_lock);
	for (i = 0; i < p->n_pdds; i++)
		sg_pdd_evict(p->pdds[i], trigger);
	mutex_unlock(&p->queue_lock);
	return 0;
}

int sg_process_restore_queues(struct sg_process *p)
{
	unsigned int i;

	mutex_lock(&p->queue_lock);
	for (i = 0; i < p->n_pdds; i++)
		sg_pdd_restore(p->pdds[i]);
	mutex_unlock(&p->queue_lock);
	return 0;
}

void sg_pdd_evict_queues(struct sg_pdd *pdd, enum sg_evict_trigger trigger)
{
	mutex_lock(&pdd->process->queue_lock);
	sg_pdd_evict(pdd, trigger);
	mutex_unlock(&pdd->process->queue_lock);
}
