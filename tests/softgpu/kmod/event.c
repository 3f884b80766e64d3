// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * KFD events: made and destroyed by user space, set by user space or by the
 * GPU, waited for in WAIT_EVENTS (event_wait.c).
 *
 * A signal event's id is also its slot in the signal page: the GPU writes
 * there before it interrupts, so that an interrupt without a usable id finds
 * its events all the same.
 */
#include <linux/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "event.h"
#include "event_wait.h"
#include "judge.h"
#include "softgpu.h"

#define SG_SLOT_BYTES		(KFD_SIGNAL_EVENT_LIMIT * sizeof(u64))
#define SG_SLOT_PAGES		(SG_SLOT_BYTES / PAGE_SIZE)
#define SG_SLOT_EMPTY		U64_MAX
/* Ids of events that have no slot begin here. */
#define SG_FIRST_OTHER		((INT_MAX >> 1) + 1)
/* The slots that user space is assumed to see before it has mapped the page: 256. */
#define SG_FIRST_MAPPED		(256 * sizeof(u64))
/* Where the signal page is mapped from. */
#define SG_EVENTS_OFFSET	(2ULL << 62)

static bool sg_has_slot(u32 type)
{
	return type == KFD_IOC_EVENT_SIGNAL || type == KFD_IOC_EVENT_DEBUG_EVENT;
}

void sg_events_init(struct sg_events *events)
{
	memset(events, 0, sizeof(*events));
	mutex_init(&events->lock);
	spin_lock_init(&events->state);
	idr_init(&events->all);
	init_waitqueue_head(&events->waiters);
	/* Id 0 belongs to no event: an interrupt without an id has it. */
	events->signals = 1;
}

static void sg_event_drop(struct sg_events *events, struct sg_event *event)
{
	spin_lock(&events->state);
	sg_waiters_detach(event);
	spin_unlock(&events->state);
	wake_up_all(&events->waiters);
	if (sg_has_slot(event->type))
		events->signals--;
	idr_remove(&events->all, event->id);
	sg_died(SG_EVENTS);
	kfree_rcu(event, rcu);
}

/* No waiter is left and no queue runs. */
void sg_events_exit(struct sg_events *events)
{
	struct sg_event *event;
	int id;

	idr_for_each_entry(&events->all, event, id)
		sg_event_drop(events, event);
	idr_destroy(&events->all);
	if (events->page) {
		sg_bo_kunmap(events->page, events->slots);
		sg_bo_put(events->page);
	} else if (events->slots) {
		free_pages((unsigned long)events->slots, get_order(SG_SLOT_BYTES));
	}
	mutex_destroy(&events->lock);
}

/* The kernel's own signal page, for processes that provide none. */
static int sg_slots_alloc(struct sg_events *events)
{
	void *page;

	if (events->slots)
		return 0;
	page = (void *)__get_free_pages(GFP_KERNEL, get_order(SG_SLOT_BYTES));
	if (!page)
		return -ENOMEM;
	memset(page, 0xff, SG_SLOT_BYTES);
	events->mapped = SG_FIRST_MAPPED;
	smp_store_release(&events->slots, page);
	return 0;
}

/* User space's BO becomes the signal page; the process's lock is held. */
static int sg_slots_set(struct sg_process *p, u64 handle)
{
	struct sg_events *events = &p->events;
	struct sg_mem *mem = sg_mem_find(p, handle);
	void *slots;
	int err = 0;

	if (!mem || events->slots)
		return -EINVAL;
	if (mem->bo->domain != AMDGPU_GEM_DOMAIN_GTT || mem->bo->base.size < SG_SLOT_BYTES)
		return -EINVAL;
	slots = sg_bo_kmap(mem->bo, SG_SLOT_PAGES);
	if (!slots)
		return -ENOMEM;
	mutex_lock(&events->lock);
	if (events->slots) {
		err = -EBUSY;
	} else {
		memset(slots, 0xff, SG_SLOT_BYTES);
		sg_bo_get(mem->bo);
		events->page = mem->bo;
		events->page_handle = handle;
		events->mapped = SG_SLOT_BYTES;
		smp_store_release(&events->slots, slots);
	}
	mutex_unlock(&events->lock);
	if (err)
		sg_bo_kunmap(mem->bo, slots);
	return err;
}

/* An id: the next free one, or exactly `*want`. */
static int sg_event_number(struct sg_events *events, struct sg_event *event, const u32 *want)
{
	int low = SG_FIRST_OTHER, high = 0, id, err;

	if (sg_has_slot(event->type)) {
		if (events->mapped && events->signals == events->mapped / sizeof(u64))
			return -ENOSPC;
		err = sg_slots_alloc(events);
		if (err)
			return err;
		if (want && *want >= KFD_SIGNAL_EVENT_LIMIT)
			return -EINVAL;
		low = 1;
		high = events->mapped / sizeof(u64);
	}
	if (want) {
		low = *want;
		high = *want + 1;
	}
	if (want && !*want)
		return -ENOSPC;	/* belongs to no event */
	id = idr_alloc(&events->all, event, low, high, GFP_KERNEL);
	if (id < 0)
		return id;
	event->id = id;
	if (sg_has_slot(event->type)) {
		WRITE_ONCE(events->slots[id], SG_SLOT_EMPTY);
		events->signals++;
	}
	return 0;
}

static struct sg_event *sg_event_new(u32 type, bool auto_reset)
{
	struct sg_event *event = kzalloc(sizeof(*event), GFP_KERNEL_ACCOUNT);

	if (event) {
		INIT_LIST_HEAD(&event->waiters);
		event->type = type;
		event->auto_reset = auto_reset;
	}
	return event;
}

int sg_event_create(struct sg_process *p, struct kfd_ioctl_create_event_args *args)
{
	struct sg_events *events = &p->events;
	struct sg_event *event;
	int err;

	if (args->event_page_offset) {
		mutex_lock(&p->lock);
		err = sg_slots_set(p, args->event_page_offset);
		mutex_unlock(&p->lock);
		if (err)
			return err;
	}
	event = sg_event_new(args->event_type, args->auto_reset);
	if (!event)
		return -ENOMEM;
	event->age = 1;
	args->event_page_offset = 0;
	mutex_lock(&events->lock);
	err = sg_event_number(events, event, NULL);
	if (!err) {
		sg_born(SG_EVENTS);
		args->event_id = event->id;
		args->event_trigger_data = event->id;
		if (sg_has_slot(event->type)) {
			args->event_page_offset = SG_EVENTS_OFFSET;
			args->event_slot_index = event->id;
		}
	}
	mutex_unlock(&events->lock);
	if (err)
		kfree(event);
	return err;
}

int sg_event_destroy(struct sg_process *p, u32 id)
{
	struct sg_event *event;

	mutex_lock(&p->events.lock);
	event = idr_find(&p->events.all, id);
	if (event)
		sg_event_drop(&p->events, event);
	mutex_unlock(&p->events.lock);
	return event ? 0 : -EINVAL;
}

/* User space sets and resets signal events only. */
static int sg_event_put_state(struct sg_process *p, u32 id, bool set)
{
	struct sg_events *events = &p->events;
	struct sg_event *event;
	int err = -EINVAL;

	rcu_read_lock();
	event = idr_find(&events->all, id);
	if (event && event->type == KFD_IOC_EVENT_SIGNAL) {
		spin_lock(&events->state);
		if (set)
			sg_event_raise(event);
		else
			event->signaled = false;
		spin_unlock(&events->state);
		err = 0;
	}
	rcu_read_unlock();
	if (!err && set)
		wake_up_all(&events->waiters);
	return err;
}

int sg_event_set(struct sg_process *p, u32 id)
{
	return sg_event_put_state(p, id, true);
}

int sg_event_reset(struct sg_process *p, u32 id)
{
	return sg_event_put_state(p, id, false);
}

static void sg_event_from_gpu(struct sg_events *events, u64 *slots, struct sg_event *event)
{
	if (!sg_has_slot(event->type))
		return;
	WRITE_ONCE(slots[event->id], SG_SLOT_EMPTY);
	spin_lock(&events->state);
	sg_event_raise(event);
	spin_unlock(&events->state);
}

void sg_event_interrupt(struct sg_process *p, u32 id)
{
	struct sg_events *events = &p->events;
	u64 *slots = smp_load_acquire(&events->slots);
	struct sg_event *event;
	int other;

	if (!slots)
		return;
	rcu_read_lock();
	event = id && id < KFD_SIGNAL_EVENT_LIMIT ? idr_find(&events->all, id) : NULL;
	if (event) {
		sg_event_from_gpu(events, slots, event);
	} else {
		idr_for_each_entry(&events->all, event, other) {
			if (other >= KFD_SIGNAL_EVENT_LIMIT)
				break;
			if (READ_ONCE(slots[other]) != SG_SLOT_EMPTY)
				sg_event_from_gpu(events, slots, event);
		}
	}
	rcu_read_unlock();
	wake_up_all(&events->waiters);
}

/* Sets every event of this type, with the reason. */
static void sg_event_exception(struct sg_process *p, u32 type, const void *data, size_t len)
{
	struct sg_events *events = &p->events;
	int id = SG_FIRST_OTHER;
	struct sg_event *event;

	rcu_read_lock();
	idr_for_each_entry_continue(&events->all, event, id) {
		if (event->type != type)
			continue;
		spin_lock(&events->state);
		memcpy(&event->memory, data, len);
		sg_event_raise(event);
		spin_unlock(&events->state);
	}
	rcu_read_unlock();
	wake_up_all(&events->waiters);
}

void sg_event_memory_exception(struct sg_process *p, const struct kfd_hsa_memory_exception_data *data)
{
	sg_event_exception(p, KFD_IOC_EVENT_MEMORY, data, sizeof(*data));
}

void sg_event_hw_exception(struct sg_process *p, const struct kfd_hsa_hw_exception_data *data)
{
	sg_event_exception(p, KFD_IOC_EVENT_HW_EXCEPTION, data, sizeof(*data));
}

int sg_event_mmap(struct sg_process *p, struct vm_area_struct *vma)
{
	struct sg_events *events = &p->events;
	size_t size = vma->vm_end - vma->vm_start;
	int err = -EINVAL;

	mutex_lock(&events->lock);
	if (events->slots && !events->page && size <= SG_SLOT_BYTES) {
		vm_flags_set(vma, VM_IO | VM_DONTCOPY | VM_DONTEXPAND | VM_NORESERVE |
				  VM_DONTDUMP | VM_PFNMAP);
		err = remap_pfn_range(vma, vma->vm_start, __pa(events->slots) >> PAGE_SHIFT, size,
				      vma->vm_page_prot);
		if (!err)
			events->mapped = size;
	}
	mutex_unlock(&events->lock);
	return err;
}

unsigned int sg_events_count(struct sg_process *p)
{
	struct sg_event *event;
	unsigned int count = 0;
	int id;

	mutex_lock(&p->events.lock);
	idr_for_each_entry(&p->events.all, event, id)
		count++;
	mutex_unlock(&p->events.lock);
	return count;
}

/* How many were written: never more than `count`. */
int sg_events_dump(struct sg_process *p, struct sg_criu_event *to, unsigned int count)
{
	struct sg_events *events = &p->events;
	struct sg_event *event;
	unsigned int n = 0;
	int id;

	mutex_lock(&events->lock);
	idr_for_each_entry(&events->all, event, id) {
		if (n == count)
			break;
		memset(&to[n], 0, sizeof(to[n]));
		to[n].object_type = SG_CRIU_OBJECT_EVENT;
		to[n].user_handle = n ? 0 : events->page_handle;
		to[n].event_id = event->id;
		to[n].auto_reset = event->auto_reset;
		to[n].type = event->type;
		spin_lock(&events->state);
		to[n].signaled = event->signaled;
		if (event->type == KFD_IOC_EVENT_MEMORY)
			to[n].memory = event->memory;
		else if (event->type == KFD_IOC_EVENT_HW_EXCEPTION)
			to[n].hw = event->hw;
		spin_unlock(&events->state);
		n++;
	}
	mutex_unlock(&events->lock);
	return n;
}

/* The caller holds the process's lock. */
int sg_event_restore(struct sg_process *p, const struct sg_criu_event *from)
{
	struct sg_events *events = &p->events;
	struct sg_event *event;
	int err;

	if (from->event_id > INT_MAX)
		return -EINVAL;
	if (from->user_handle) {
		err = sg_slots_set(p, from->user_handle);
		if (err)
			return err;
	}
	if (!sg_has_slot(from->type) && from->type != KFD_IOC_EVENT_MEMORY &&
	    from->type != KFD_IOC_EVENT_HW_EXCEPTION)
		return -EINVAL;
	event = sg_event_new(from->type, from->auto_reset);
	if (!event)
		return -ENOMEM;
	event->signaled = from->signaled;
	if (from->type == KFD_IOC_EVENT_MEMORY)
		event->memory = from->memory;
	else if (from->type == KFD_IOC_EVENT_HW_EXCEPTION)
		event->hw = from->hw;
	mutex_lock(&events->lock);
	err = sg_event_number(events, event, &from->event_id);
	if (!err)
		sg_born(SG_EVENTS);
	mutex_unlock(&events->lock);
	if (err)
		kfree(event);
	return err;
}
