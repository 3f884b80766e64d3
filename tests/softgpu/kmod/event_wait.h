/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* An event, and its waiters. */
#ifndef SOFTGPU_EVENT_WAIT_H
#define SOFTGPU_EVENT_WAIT_H

#include <linux/list.h>
#include <linux/rcupdate.h>
#include <uapi/linux/kfd_ioctl.h>

struct sg_event {
	u32 id;
	u32 type;
	bool auto_reset;
	bool signaled;
	u64 age;			/* one more every time that it is set; never 0 */
	struct list_head waiters;	/* struct sg_waiter */
	union {
		struct kfd_hsa_memory_exception_data memory;
		struct kfd_hsa_hw_exception_data hw;
	};
	struct rcu_head rcu;
};

/* Both are called with the events' state lock held; the caller then wakes. */
void sg_event_raise(struct sg_event *event);
void sg_waiters_detach(struct sg_event *event);

#endif
