/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* The packet processor of AQL queues. */
#ifndef SOFTGPU_AQL_H
#define SOFTGPU_AQL_H

struct sg_agent;
struct sg_queue;

#define SG_AQL_PACKET	64

int sg_aql_step(struct sg_queue *q, struct sg_agent *agent);

#endif
