/* SPDX-License-Identifier: GPL-2.0 OR MIT */
#ifndef SOFTGPU_TOPOLOGY_H
#define SOFTGPU_TOPOLOGY_H

struct device;

/* "topology" under the device: one CPU node and a node for every GPU. */
int sg_topology_init(struct device *kfd);
void sg_topology_exit(void);

#endif
