/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* KFD events of one process. */
#ifndef SOFTGPU_EVENT_H
#define SOFTGPU_EVENT_H

#include <linux/idr.h>
#include <linux/mutex.h>
#include <linux/spinlock.h>
#include <linux/build_bug.h>
#include <linux/wait.h>
#include <uapi/linux/kfd_ioctl.h>

struct sg_bo;
struct sg_device;
struct sg_process;
struct vm_area_struct;

/* All events of a process; embedded in it. */
struct sg_events {
	struct mutex lock;		/* creation and destruction; may sleep in reclaim */
	spinlock_t state;		/* state of events and waiters; inside of the run lock */
	struct idr all;			/* found under RCU */
	wait_queue_head_t waiters;
	u64 *slots;			/* the signal page, KFD_SIGNAL_EVENT_LIMIT words */
	struct sg_bo *page;		/* it is this BO's memory, or NULL: the kernel's own */
	u64 page_handle;		/* as user space gave it */
	size_t mapped;			/* bytes of slots that user space has */
	unsigned int signals;		/* events that have a slot, and the reserved one */
};

/* The key of an event's record in CRIU's private data. */
#define SG_CRIU_OBJECT_EVENT	1

/* One event in CRIU's private data. */
struct sg_criu_event {
	u32 object_type;
	u64 user_handle;
	u32 event_id;
	u32 auto_reset;
	u32 type;
	u32 signaled;
	union {
		struct kfd_hsa_memory_exception_data memory;
		struct kfd_hsa_hw_exception_data hw;
	};
};

static_assert(sizeof(struct sg_criu_event) == 64);
static_assert(offsetof(struct sg_criu_event, memory) == 32);

void sg_events_init(struct sg_events *events);
void sg_events_exit(struct sg_events *events);

/* ioctls */
int sg_event_create(struct sg_process *p, struct kfd_ioctl_create_event_args *args);
int sg_event_destroy(struct sg_process *p, u32 id);
int sg_event_set(struct sg_process *p, u32 id);
int sg_event_reset(struct sg_process *p, u32 id);
int sg_event_wait(struct sg_process *p, struct kfd_ioctl_wait_events_args *args);
int sg_event_mmap(struct sg_process *p, struct vm_area_struct *vma);

/* From the GPU: callable inside a slice. */
void sg_event_interrupt(struct sg_process *p, u32 id);
void sg_event_memory_exception(struct sg_process *p, const struct kfd_hsa_memory_exception_data *data);
void sg_event_hw_exception(struct sg_process *p, const struct kfd_hsa_hw_exception_data *data);

/* CRIU; the caller has checked the restored `object_type`. */
unsigned int sg_events_count(struct sg_process *p);
int sg_events_dump(struct sg_process *p, struct sg_criu_event *to, unsigned int count);
int sg_event_restore(struct sg_process *p, const struct sg_criu_event *from);

#endif
