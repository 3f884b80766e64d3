// SPDX-License-Identifier: GPL-2.0 OR MIT
/* How the GPU accesses memory. */
#include <linux/delay.h>
#include <linux/mm.h>
#include <linux/string.h>

#include "exec.h"
#include "queue.h"

/* A slice must not wait for reclaim, and a lack of pages is not worth a warning. */
#define SG_SLICE_GFP	(GFP_NOWAIT | __GFP_NOWARN)

/* The content of memory that was never written: a page of SG_POISON. One for all GPUs. */
static void *sg_poison_page;
static unsigned int sg_poison_users;

int sg_access_init(void)
{
	if (sg_poison_users++)
		return 0;
	sg_poison_page = (void *)__get_free_page(GFP_KERNEL);
	if (!sg_poison_page) {
		sg_poison_users--;
		return -ENOMEM;
	}
	memset(sg_poison_page, SG_POISON, PAGE_SIZE);
	return 0;
}

void sg_access_exit(void)
{
	if (--sg_poison_users)
		return;
	free_page((unsigned long)sg_poison_page);
	sg_poison_page = NULL;
}

int sg_agent_refuse(struct sg_agent *agent, u64 va, bool write)
{
	agent->fault_va = va;
	agent->fault_write = write;
	return -EFAULT;
}

int sg_agent_help(struct sg_agent *agent, int err)
{
	if (err == -EAGAIN) {
		err = sg_vm_populate(agent->vm, agent->fault_va);
		if (err == -ENOMEM)
			msleep(20);	/* reclaim is at work; the GPU waits */
		else
			usleep_range(100, 200);
		return 0;
	}
	if (err == -EFAULT)
		return sg_svm_fault(agent->vm, agent->fault_va, agent->fault_write);
	return err;
}

/* Reports to the judge what this access violates. */
static void sg_span_judge(struct sg_agent *agent, u64 va, const struct sg_span *span, bool read)
{
	struct sg_device *dev = agent->vm->dev;

	if (agent->queue && !sg_queue_may_run(agent->queue))
		sg_violate(SG_QUEUE_RAN_GATED, agent->pid, dev, va, agent->packet,
			   "queue %u accessed memory while gated", agent->queue->id);
	if (span->ref.stale)
		sg_violate(SG_STALE_USERPTR, agent->pid, dev, va, agent->packet,
			   "%s a host page that the process has unmapped",
			   span->write ? "wrote" : "read");
	if (read && sg_page_missing(&span->ref, span->offset, span->len))
		sg_violate(agent->last_byte ? SG_SDMA_OVERRUN : SG_GPU_READ_NOT_RESTORED,
			   agent->pid, dev, va, agent->packet,
			   "read %zu bytes that were not loaded yet", span->len);
}

static int sg_span_open(struct sg_agent *agent, u64 va, size_t len, bool read, bool write,
			struct sg_span *span)
{
	int err = sg_vm_page(agent->vm, va, write, SG_SLICE_GFP, &span->ref);

	if (err) {
		agent->fault_va = va;
		agent->fault_write = write;
		return err;
	}
	span->offset = offset_in_page(va);
	span->len = min(len, PAGE_SIZE - span->offset);
	span->write = write;
	/* 64 bit only: every page is mapped. */
	if (span->ref.page)
		span->at = page_address(span->ref.page);
	else if (span->ref.bo && sg_bo_fresh(span->ref.bo))
		span->at = sg_poison_page;
	else
		span->at = page_address(ZERO_PAGE(0));
	span->at += span->offset;
	sg_span_judge(agent, va, span, read);
	return 0;
}

int sg_span_get(struct sg_agent *agent, u64 va, size_t len, bool write, struct sg_span *span)
{
	return sg_span_open(agent, va, len, !write, write, span);
}

int sg_span_get_rw(struct sg_agent *agent, u64 va, size_t len, struct sg_span *span)
{
	return sg_span_open(agent, va, len, true, true, span);
}

void sg_span_put(struct sg_agent *agent, struct sg_span *span)
{
	if (span->write)
		sg_page_written(&span->ref, span->offset, span->len);
	sg_page_put(&span->ref);
}

int sg_span_copy(struct sg_agent *agent, u64 dst, u64 src, size_t *len)
{
	struct sg_span from, to;
	int err;

	err = sg_span_get(agent, src, *len, false, &from);
	if (err)
		return err;
	err = sg_span_get(agent, dst, from.len, true, &to);
	if (!err) {
		memmove(to.at, from.at, to.len);
		*len = to.len;
		sg_span_put(agent, &to);
	}
	sg_span_put(agent, &from);
	return err;
}

int sg_vm_access(struct sg_agent *agent, u64 va, void *buf, size_t len, bool write)
{
	struct sg_span span;
	int err;

	for (; len; len -= span.len, va += span.len, buf += span.len) {
		err = sg_span_get(agent, va, len, write, &span);
		if (err)
			return err;
		memcpy(write ? span.at : buf, write ? buf : span.at, span.len);
		sg_span_put(agent, &span);
	}
	return 0;
}

int sg_vm_add64(struct sg_agent *agent, u64 va, s64 value)
{
	struct sg_span span;
	int err;

	if (va % sizeof(u64))
		return sg_agent_refuse(agent, va, true);
	err = sg_span_get_rw(agent, va, sizeof(u64), &span);
	if (err)
		return err;
	atomic64_add(value, (atomic64_t *)span.at);
	sg_span_put(agent, &span);
	return 0;
}
