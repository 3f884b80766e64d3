// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * WAIT_EVENTS. A waiter that an event has activated stays active, whatever
 * happens to the event afterwards. A wait fails when one of its events is
 * destroyed.
 */
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "event.h"
#include "event_wait.h"
#include "softgpu.h"

struct sg_waiter {
	struct list_head on;		/* of the event, until the wait is over */
	struct sg_event *event;		/* NULL: destroyed */
	bool activated;
	bool wants_age;
};

void sg_event_raise(struct sg_event *event)
{
	struct sg_waiter *waiter;
	bool waking = false;

	list_for_each_entry(waiter, &event->waiters, on) {
		waking |= !waiter->activated;
		waiter->activated = true;
	}
	event->signaled = !event->auto_reset || !waking;
	if (!++event->age)
		event->age = 2;		/* 0 and 1 have meanings */
}

void sg_waiters_detach(struct sg_event *event)
{
	struct sg_waiter *waiter, *next;

	list_for_each_entry_safe(waiter, next, &event->waiters, on) {
		waiter->event = NULL;
		list_del_init(&waiter->on);
	}
}

/* Takes the event's state into the waiter, or queues the waiter. */
static int sg_waiter_init(struct sg_events *events, struct sg_waiter *waiter,
			  const struct kfd_event_data *data)
{
	struct sg_event *event = idr_find(&events->all, data->event_id);
	u64 seen = data->signal_event_data.last_event_age;

	if (!event)
		return -EINVAL;
	spin_lock(&events->state);
	waiter->event = event;
	waiter->activated = event->signaled;
	if (event->auto_reset)
		event->signaled = false;
	if (event->type == KFD_IOC_EVENT_SIGNAL && seen) {
		waiter->wants_age = true;
		if (event->age != seen)
			waiter->activated = true;
	}
	list_add_tail(&waiter->on, &event->waiters);
	spin_unlock(&events->state);
	return 0;
}

static u32 sg_waiters_result(struct sg_events *events, struct sg_waiter *waiters, u32 count, bool all)
{
	u32 result = KFD_IOC_WAIT_RESULT_TIMEOUT, i, activated = 0;

	spin_lock(&events->state);
	for (i = 0; i < count; i++) {
		if (!waiters[i].event) {
			result = KFD_IOC_WAIT_RESULT_FAIL;
			break;
		}
		activated += waiters[i].activated;
		if (activated && !all)
			break;
	}
	if (result != KFD_IOC_WAIT_RESULT_FAIL && (all ? activated == count : activated || !count))
		result = KFD_IOC_WAIT_RESULT_COMPLETE;
	spin_unlock(&events->state);
	return result;
}

static long sg_timeout(u32 ms)
{
	if (ms == 0)
		return 0;
	if (ms == U32_MAX)
		return MAX_SCHEDULE_TIMEOUT;
	return msecs_to_jiffies(min_t(u32, ms, INT_MAX)) + 1;
}

/* The data of an activated event; the events' lock is held. */
static int sg_waiter_tell(struct sg_events *events, const struct sg_waiter *waiter,
			  struct kfd_event_data __user *to)
{
	const struct sg_event *event = waiter->event;
	union {
		struct kfd_hsa_memory_exception_data memory;
		struct kfd_hsa_hw_exception_data hw;
		u64 age;
	} data;
	size_t len = 0;

	if (!event)
		return -EINVAL;
	if (!waiter->activated)
		return 0;
	spin_lock(&events->state);
	if (event->type == KFD_IOC_EVENT_MEMORY) {
		data.memory = event->memory;
		len = sizeof(data.memory);
	} else if (event->type == KFD_IOC_EVENT_HW_EXCEPTION) {
		data.hw = event->hw;
		len = sizeof(data.hw);
	} else if (event->type == KFD_IOC_EVENT_SIGNAL && waiter->wants_age) {
		data.age = event->age;
		len = sizeof(data.age);
	}
	spin_unlock(&events->state);
	/* All three are at the start of the union in user space. */
	return len && copy_to_user(to, &data, len) ? -EFAULT : 0;
}

/* Leaves every event; restores what an interrupted wait has consumed. */
static void sg_waiters_leave(struct sg_events *events, struct sg_waiter *waiters, u32 count,
			     bool give_back)
{
	u32 i;

	spin_lock(&events->state);
	for (i = 0; i < count; i++) {
		struct sg_waiter *waiter = &waiters[i];

		if (!waiter->event)
			continue;
		list_del_init(&waiter->on);
		if (give_back && waiter->activated && waiter->event->auto_reset)
			sg_event_raise(waiter->event);
	}
	spin_unlock(&events->state);
	if (give_back)
		wake_up_all(&events->waiters);
}

static int sg_wait_sleep(struct sg_events *events, struct sg_waiter *waiters,
			 struct kfd_ioctl_wait_events_args *args)
{
	bool all = args->wait_for_all;
	long left = sg_timeout(args->timeout);

	if (left)
		left = wait_event_interruptible_timeout(events->waiters,
				sg_waiters_result(events, waiters, args->num_events, all) !=
				KFD_IOC_WAIT_RESULT_TIMEOUT, left);
	args->wait_result = sg_waiters_result(events, waiters, args->num_events, all);
	if (args->wait_result == KFD_IOC_WAIT_RESULT_TIMEOUT && left < 0)
		return fatal_signal_pending(current) ? -EINTR : -ERESTARTSYS;
	return 0;
}

static int sg_waiters_init(struct sg_events *events, struct sg_waiter *waiters,
			   const struct kfd_event_data __user *from, u32 count)
{
	struct kfd_event_data data;
	u32 i;
	int err = 0;

	for (i = 0; i < count && !err; i++) {
		if (copy_from_user(&data, &from[i], sizeof(data)))
			return -EFAULT;
		err = sg_waiter_init(events, &waiters[i], &data);
	}
	return err;
}

int sg_event_wait(struct sg_process *p, struct kfd_ioctl_wait_events_args *args)
{
	struct kfd_event_data __user *user = u64_to_user_ptr(args->events_ptr);
	struct sg_events *events = &p->events;
	u32 count = args->num_events, i;
	struct sg_waiter *waiters;
	u64 end;
	int err;

	args->wait_result = KFD_IOC_WAIT_RESULT_FAIL;
	if (count > KFD_SIGNAL_EVENT_LIMIT)
		return -ENOMEM;
	waiters = kvcalloc(count ?: 1, sizeof(*waiters), GFP_KERNEL_ACCOUNT);
	if (!waiters)
		return -ENOMEM;
	for (i = 0; i < count; i++)
		INIT_LIST_HEAD(&waiters[i].on);
	end = ktime_get_ns() + (u64)args->timeout * NSEC_PER_MSEC;

	mutex_lock(&events->lock);
	err = sg_waiters_init(events, waiters, user, count);
	mutex_unlock(&events->lock);
	if (!err)
		err = sg_wait_sleep(events, waiters, args);
	if (err == -ERESTARTSYS && args->timeout && args->timeout != U32_MAX) {
		u64 now = ktime_get_ns();

		/* The call is restarted with the rest of the timeout. */
		args->timeout = now < end ? div_u64(end - now, NSEC_PER_MSEC) : 0;
	}

	mutex_lock(&events->lock);
	for (i = 0; i < count && !err && args->wait_result == KFD_IOC_WAIT_RESULT_COMPLETE; i++)
		err = sg_waiter_tell(events, &waiters[i], &user[i]);
	sg_waiters_leave(events, waiters, count, err == -ERESTARTSYS);
	mutex_unlock(&events->lock);
	kvfree(waiters);
	if (!err && args->wait_result == KFD_IOC_WAIT_RESULT_FAIL)
		err = -EIO;
	if (err)
		args->wait_result = KFD_IOC_WAIT_RESULT_FAIL;
	return err;
}
