// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The AQL packet processor of a compute queue.
 *
 * One packet at a time, so every packet's barrier bit is kept. A dispatch is a
 * wave (kernels.h) that is stepped until it is done. Then follow the completion
 * signal, the packet's header (INVALID again) and the read pointer, in this
 * order and within one slice.
 */
#include <linux/string.h>

#include "aql.h"
#include "event.h"
#include "exec.h"
#include "kernels.h"
#include "queue.h"

enum {
	SG_AQL_VENDOR = 0,
	SG_AQL_INVALID = 1,
	SG_AQL_DISPATCH = 2,
	SG_AQL_BARRIER_AND = 3,
	SG_AQL_AGENT = 4,
	SG_AQL_BARRIER_OR = 5,
};

#define SG_AQL_TYPE_MASK	0xff
#define SG_BARRIER_SIGNALS	5

struct sg_aql_dispatch {
	u16 header;
	u16 setup;
	u16 workgroup[3];
	u16 reserved0;
	u32 grid[3];
	u32 private_segment;
	u32 group_segment;
	u64 kernel_object;
	u64 kernarg_address;
	u64 reserved2;
	u64 completion_signal;
};

struct sg_aql_barrier {
	u16 header;
	u16 reserved0;
	u32 reserved1;
	u64 dep_signal[SG_BARRIER_SIGNALS];
	u64 reserved2;
	u64 completion_signal;
};

union sg_aql_packet {
	u16 header;
	struct sg_aql_dispatch dispatch;
	struct sg_aql_barrier barrier;
};

static_assert(sizeof(union sg_aql_packet) == SG_AQL_PACKET);
static_assert(sizeof(struct sg_aql_dispatch) == SG_AQL_PACKET);
static_assert(sizeof(struct sg_aql_barrier) == SG_AQL_PACKET);

/* A signal in memory, as the runtime lays it out. */
#define SG_SIGNAL_VALUE		8
#define SG_SIGNAL_MAILBOX	16
#define SG_SIGNAL_EVENT		24

static u64 sg_aql_slot(const struct sg_queue *q)
{
	u64 packets = q->props.size / SG_AQL_PACKET;

	return q->props.address + (q->run.rptr & (packets - 1)) * SG_AQL_PACKET;
}

/* Decrements the signal; its event, if it has one, is raised. */
static int sg_aql_complete(struct sg_queue *q, struct sg_agent *agent, u64 signal)
{
	u64 mailbox;
	u32 event;
	int err;

	if (!signal)
		return 0;
	err = sg_vm_access(agent, signal + SG_SIGNAL_MAILBOX, &mailbox, sizeof(mailbox), false);
	if (!err)
		err = sg_vm_access(agent, signal + SG_SIGNAL_EVENT, &event, sizeof(event), false);
	if (!err && mailbox) {
		u64 id = event;

		err = sg_vm_access(agent, mailbox, &id, sizeof(id), true);
	}
	/* The last step that can fail: done twice, it would count twice. */
	if (!err)
		err = sg_vm_add64(agent, signal + SG_SIGNAL_VALUE, -1);
	if (!err && mailbox)
		sg_event_interrupt(q->process, event);
	return err;
}

/*
 * Ends the packet. The next slice repeats from the start what fails with
 * -EAGAIN, so the signal is the last step that can fail. A GPU's own order
 * cannot be observed from outside its slice.
 */
static int sg_aql_retire(struct sg_queue *q, struct sg_agent *agent, u64 signal)
{
	u16 invalid = SG_AQL_INVALID;
	u64 next = q->run.rptr + 1;
	int err;

	err = sg_vm_access(agent, sg_aql_slot(q), &invalid, sizeof(invalid), true);
	if (!err)
		err = sg_vm_access(agent, q->props.read_ptr, &next, sizeof(next), true);
	if (!err)
		err = sg_aql_complete(q, agent, signal);
	if (err)
		return err;
	q->run.rptr = next;
	q->run.in_flight = false;
	return SG_RUN_MORE;
}

static void sg_aql_name(const struct sg_queue *q, struct sg_agent *agent, const char *what)
{
	snprintf(agent->packet, SG_PACKET_NAME, "aql:%llu:%s", q->run.rptr, what);
}

/* Reads the code object's head and the arguments into the queue's wave. */
static int sg_aql_launch(struct sg_queue *q, struct sg_agent *agent,
			 const struct sg_aql_dispatch *packet)
{
	struct sg_wave *wave = &q->run.wave;
	struct {
		u64 magic;
		u32 kernel;
		u32 zero;
	} code;
	int err, args;

	err = sg_vm_access(agent, packet->kernel_object, &code, sizeof(code), false);
	if (err)
		return err;
	args = code.magic == SG_CODE_MAGIC && !code.zero ? sg_kernel_args(code.kernel) : 0;
	if (!args) {
		agent->fault_va = packet->kernel_object;
		return -ENOEXEC;
	}
	memset(wave, 0, sizeof(*wave));
	wave->kernel = code.kernel;
	wave->packet = q->run.rptr;
	sg_aql_name(q, agent, sg_kernel_name(code.kernel));
	err = sg_vm_access(agent, packet->kernarg_address, wave->args, args * sizeof(u64), false);
	if (!err)
		err = sg_save_area_reserve(q, agent);
	if (!err)
		q->run.in_flight = true;
	return err;
}

static int sg_aql_run_dispatch(struct sg_queue *q, struct sg_agent *agent,
			       const struct sg_aql_dispatch *packet)
{
	int err;

	if (!q->run.in_flight) {
		err = sg_aql_launch(q, agent, packet);
		if (err)
			return err;
	}
	sg_aql_name(q, agent, sg_kernel_name(q->run.wave.kernel));
	err = sg_kernel_step(agent, &q->run.wave);
	if (err <= 0)
		return err ?: SG_RUN_MORE;
	return sg_aql_retire(q, agent, packet->completion_signal);
}

static int sg_aql_barrier(struct sg_queue *q, struct sg_agent *agent,
			  const struct sg_aql_barrier *packet, bool all)
{
	int i, err, signals = 0, met = 0;
	u64 value;

	for (i = 0; i < SG_BARRIER_SIGNALS; i++) {
		if (!packet->dep_signal[i])
			continue;
		err = sg_vm_access(agent, packet->dep_signal[i] + SG_SIGNAL_VALUE, &value,
				   sizeof(value), false);
		if (err)
			return err;
		signals++;
		met += !value;
	}
	if (all ? met < signals : signals && !met)
		return SG_RUN_WAIT;
	return sg_aql_retire(q, agent, packet->completion_signal);
}

/* One packet, or one step of a dispatch: SG_RUN_* or an error of a memory access. */
int sg_aql_step(struct sg_queue *q, struct sg_agent *agent)
{
	union sg_aql_packet packet;
	int err;

	if (q->run.rptr >= q->run.wptr)
		return SG_RUN_IDLE;
	sg_aql_name(q, agent, "packet");
	err = sg_vm_access(agent, sg_aql_slot(q), &packet, sizeof(packet), false);
	if (err)
		return err;
	switch (packet.header & SG_AQL_TYPE_MASK) {
	case SG_AQL_INVALID:
		return SG_RUN_WAIT;	/* claimed, and not yet written */
	case SG_AQL_DISPATCH:
		return sg_aql_run_dispatch(q, agent, &packet.dispatch);
	case SG_AQL_BARRIER_AND:
		sg_aql_name(q, agent, "barrier-and");
		return sg_aql_barrier(q, agent, &packet.barrier, true);
	case SG_AQL_BARRIER_OR:
		sg_aql_name(q, agent, "barrier-or");
		return sg_aql_barrier(q, agent, &packet.barrier, false);
	default:
		agent->fault_va = sg_aql_slot(q);
		return -ENOEXEC;
	}
}
