// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * SDMA packets of the engines 4.4.0 (gfx90a), 4.4.2 (gfx942) and 6.0 (gfx1100),
 * which agree in the packets implemented here: a count field holds bytes - 1.
 *
 * A step executes one packet, or at most SG_SDMA_STEP bytes of one; `done` has
 * the progress, so that the queue can be evicted in between.
 */
#include <linux/bits.h>
#include <linux/ktime.h>
#include <linux/minmax.h>
#include <linux/sizes.h>
#include <linux/string.h>

#include "event.h"
#include "exec.h"
#include "sdma.h"

#define SG_SDMA_STEP		SZ_256K
/* Dwords of the longest packet without data: ATOMIC. */
#define SG_SDMA_HEADER_DW	8

enum {
	SG_SDMA_OP_NOP = 0,
	SG_SDMA_OP_COPY = 1,
	SG_SDMA_OP_WRITE = 2,
	SG_SDMA_OP_FENCE = 5,
	SG_SDMA_OP_TRAP = 6,
	SG_SDMA_OP_POLL = 8,
	SG_SDMA_OP_ATOMIC = 10,
	SG_SDMA_OP_FILL = 11,
	SG_SDMA_OP_TIMESTAMP = 13,
};

#define SG_SDMA_COUNT_MASK	0x3fffffff
#define SG_SDMA_WRITE_MASK	0xfffff
#define SG_SDMA_COPY_FLAGS	(BIT(25) | BIT(27))	/* backwards, broadcast: not made */
#define SG_SDMA_POLL_MEMORY	BIT(31)
#define SG_SDMA_ATOMIC_ADD64	0x2f
#define SG_SDMA_TIMESTAMP_GET	1
#define SG_SDMA_TIMESTAMP_GLOBAL 2

static u64 sg_address(const u32 *dword)
{
	return dword[0] | (u64)dword[1] << 32;
}

/* Reads `count` dwords of the stream, `skip` dwords after its position. */
static int sg_sdma_fetch(struct sg_sdma *sdma, u64 skip, u32 *dwords, u64 count)
{
	u64 at = sdma->at + skip * sizeof(u32), left = count * sizeof(u32), n;
	u8 *to = (u8 *)dwords;
	int err;

	if (at + left > sdma->end)
		return -ENODATA;
	for (; left; left -= n, at += n, to += n) {
		u64 offset = sdma->ring ? at & (sdma->ring - 1) : at;

		n = sdma->ring ? min(left, sdma->ring - offset) : left;
		err = sg_vm_access(sdma->agent, sdma->base + offset, to, n, false);
		if (err)
			return err;
	}
	return 0;
}

static int sg_sdma_packet_end(struct sg_sdma *sdma, u64 dwords)
{
	sdma->at += dwords * sizeof(u32);
	sdma->done = 0;
	if (sdma->at > sdma->end)
		return SG_SDMA_HANG;	/* it counts dwords that were never written */
	return sdma->at == sdma->end ? SG_SDMA_IDLE : SG_SDMA_MORE;
}

/*
 * Whether a packet's last byte is the first of a dword, in its source or its
 * target. Only then can it be outside the mapping of the others, and only then
 * is it copied by itself: a dword that is written in two parts does not count
 * as restored.
 */
static bool sg_sdma_byte_alone(u64 dst, u64 src, u64 bytes)
{
	u64 last = bytes - 1;

	return last && (IS_ALIGNED(dst + last, sizeof(u32)) || IS_ALIGNED(src + last, sizeof(u32)));
}

/*
 * The last byte of a packet where all others are inside a mapping and it is
 * not, or where it alone reads missing memory: the sign of a count that is
 * bytes instead of bytes - 1.
 */
static int sg_sdma_last_byte(struct sg_sdma *sdma, u64 dst, u64 src)
{
	struct sg_agent *agent = sdma->agent;
	size_t one = 1;
	int err;

	agent->last_byte = true;
	err = sg_span_copy(agent, dst, src, &one);
	agent->last_byte = false;
	if (err != -EFAULT)
		return err;
	sg_violate(SG_SDMA_OVERRUN, agent->pid, agent->vm->dev, agent->fault_va, agent->packet,
		   "the packet's last byte, %s, is outside of the mapping: a count of bytes instead of bytes - 1?",
		   agent->fault_write ? "written" : "read");
	return 0;
}

static int sg_sdma_copy(struct sg_sdma *sdma, const u32 *p)
{
	u64 bytes = (p[1] & SG_SDMA_COUNT_MASK) + 1ULL;
	u64 src = sg_address(p + 3), dst = sg_address(p + 5);
	u64 stop = min(bytes, sdma->done + SG_SDMA_STEP);
	bool alone = sg_sdma_byte_alone(dst, src, bytes);
	int err;

	while (sdma->done < stop) {
		size_t n = min(stop, alone ? bytes - 1 : bytes) - sdma->done;

		if (alone && sdma->done == bytes - 1) {
			err = sg_sdma_last_byte(sdma, dst + sdma->done, src + sdma->done);
			n = 1;
		} else {
			err = sg_span_copy(sdma->agent, dst + sdma->done, src + sdma->done, &n);
		}
		if (err)
			return err;
		sdma->done += n;
		sdma->moved += n;
	}
	return sdma->done < bytes ? SG_SDMA_MORE : sg_sdma_packet_end(sdma, 7);
}

/* Bytes of the value that a fill repeats: fillsize 0, 1 or 2. */
static u32 sg_fill_pattern(u32 value, u32 size)
{
	switch (size) {
	case 0:
		return (value & 0xff) * 0x01010101;
	case 1:
		return (value & 0xffff) * 0x00010001;
	default:
		return value;
	}
}

static int sg_sdma_fill(struct sg_sdma *sdma, const u32 *p)
{
	u32 size = p[0] >> 30, value = sg_fill_pattern(p[3], size);
	u64 bytes = (p[4] & SG_SDMA_COUNT_MASK) + 1ULL, dst = sg_address(p + 1), stop;
	struct sg_span to;
	size_t i;
	int err;

	if (size > 2)
		return SG_SDMA_HANG;
	/* A fill of dwords ignores the count's two low bits. */
	if (size == 2)
		bytes = ((bytes - 1) & ~3ULL) + 4;
	stop = min(bytes, sdma->done + SG_SDMA_STEP);
	while (sdma->done < stop) {
		err = sg_span_get(sdma->agent, dst + sdma->done, stop - sdma->done, true, &to);
		if (err)
			return err;
		for (i = 0; i < to.len; i++)
			to.at[i] = value >> ((sdma->done + i) % sizeof(u32) * 8);
		sdma->done += to.len;
		sdma->moved += to.len;
		sg_span_put(sdma->agent, &to);
	}
	return sdma->done < bytes ? SG_SDMA_MORE : sg_sdma_packet_end(sdma, 5);
}

/* WRITE: the stream has the data. */
static int sg_sdma_write(struct sg_sdma *sdma, const u32 *p)
{
	u64 dwords = (p[3] & SG_SDMA_WRITE_MASK) + 1ULL, dst = sg_address(p + 1);
	u64 done = sdma->done / sizeof(u32), stop = min(dwords, done + SZ_1K);
	u32 data[16];
	int err;

	for (; done < stop; sdma->done = done * sizeof(u32)) {
		u64 n = min_t(u64, stop - done, ARRAY_SIZE(data));

		err = sg_sdma_fetch(sdma, 4 + done, data, n);
		if (!err)
			err = sg_vm_access(sdma->agent, dst + done * sizeof(u32), data,
					   n * sizeof(u32), true);
		if (err)
			return err;
		done += n;
	}
	return done < dwords ? SG_SDMA_MORE : sg_sdma_packet_end(sdma, 4 + dwords);
}

static int sg_sdma_fence(struct sg_sdma *sdma, u32 *p)
{
	int err = sg_vm_access(sdma->agent, sg_address(p + 1), &p[3], sizeof(u32), true);

	return err ?: sg_sdma_packet_end(sdma, 4);
}

static int sg_sdma_trap(struct sg_sdma *sdma, const u32 *p)
{
	if (sdma->process)
		sg_event_interrupt(sdma->process, p[1] & 0xfffffff);
	return sg_sdma_packet_end(sdma, 2);
}

static bool sg_poll_met(u32 func, u32 value, u32 reference)
{
	switch (func) {
	case 0:
		return true;
	case 1:
		return value < reference;
	case 2:
		return value <= reference;
	case 3:
		return value == reference;
	case 4:
		return value != reference;
	case 5:
		return value >= reference;
	case 6:
		return value > reference;
	default:
		return false;
	}
}

static int sg_sdma_poll(struct sg_sdma *sdma, const u32 *p)
{
	u32 value;
	int err;

	if (!(p[0] & SG_SDMA_POLL_MEMORY))
		return sg_sdma_packet_end(sdma, 6);	/* registers: always equal */
	err = sg_vm_access(sdma->agent, sg_address(p + 1), &value, sizeof(value), false);
	if (err)
		return err;
	if (!sg_poll_met(p[0] >> 28 & 7, value & p[4], p[3]))
		return SG_SDMA_WAIT;
	return sg_sdma_packet_end(sdma, 6);
}

static int sg_sdma_atomic(struct sg_sdma *sdma, const u32 *p)
{
	int err;

	if ((p[0] >> 25 & 0x7f) != SG_SDMA_ATOMIC_ADD64)
		return SG_SDMA_HANG;
	err = sg_vm_add64(sdma->agent, sg_address(p + 1), sg_address(p + 3));
	return err ?: sg_sdma_packet_end(sdma, 8);
}

static int sg_sdma_timestamp(struct sg_sdma *sdma, const u32 *p)
{
	u32 kind = p[0] >> 8 & 0xff;
	u64 now = ktime_get_boottime_ns();
	int err;

	if (kind != SG_SDMA_TIMESTAMP_GET && kind != SG_SDMA_TIMESTAMP_GLOBAL)
		return SG_SDMA_HANG;
	err = sg_vm_access(sdma->agent, sg_address(p + 1) & ~7ULL, &now, sizeof(now), true);
	return err ?: sg_sdma_packet_end(sdma, 3);
}

static const char * const sg_sdma_names[] = {
	[SG_SDMA_OP_NOP] = "nop",
	[SG_SDMA_OP_COPY] = "copy",
	[SG_SDMA_OP_WRITE] = "write",
	[SG_SDMA_OP_FENCE] = "fence",
	[SG_SDMA_OP_TRAP] = "trap",
	[SG_SDMA_OP_POLL] = "poll",
	[SG_SDMA_OP_ATOMIC] = "atomic",
	[SG_SDMA_OP_FILL] = "fill",
	[SG_SDMA_OP_TIMESTAMP] = "timestamp",
};

/* Dwords of a packet's fixed part; 0 for an unknown opcode. */
static const u8 sg_sdma_fixed[] = {
	[SG_SDMA_OP_NOP] = 1,
	[SG_SDMA_OP_COPY] = 7,
	[SG_SDMA_OP_WRITE] = 4,
	[SG_SDMA_OP_FENCE] = 4,
	[SG_SDMA_OP_TRAP] = 2,
	[SG_SDMA_OP_POLL] = 6,
	[SG_SDMA_OP_ATOMIC] = 8,
	[SG_SDMA_OP_FILL] = 5,
	[SG_SDMA_OP_TIMESTAMP] = 3,
};

static int sg_sdma_execute(struct sg_sdma *sdma, u32 *p)
{
	u8 sub = p[0] >> 8 & 0xff;

	switch (p[0] & 0xff) {
	case SG_SDMA_OP_NOP:
		return sg_sdma_packet_end(sdma, 1 + (p[0] >> 16 & 0x3fff));
	case SG_SDMA_OP_COPY:
		return sub || p[0] & SG_SDMA_COPY_FLAGS ? SG_SDMA_HANG : sg_sdma_copy(sdma, p);
	case SG_SDMA_OP_WRITE:
		return sub ? SG_SDMA_HANG : sg_sdma_write(sdma, p);
	case SG_SDMA_OP_FENCE:
		return sg_sdma_fence(sdma, p);
	case SG_SDMA_OP_TRAP:
		return sg_sdma_trap(sdma, p);
	case SG_SDMA_OP_POLL:
		return sub ? SG_SDMA_HANG : sg_sdma_poll(sdma, p);
	case SG_SDMA_OP_ATOMIC:
		return sg_sdma_atomic(sdma, p);
	case SG_SDMA_OP_FILL:
		return sub ? SG_SDMA_HANG : sg_sdma_fill(sdma, p);
	default:
		return sg_sdma_timestamp(sdma, p);
	}
}

/* One step: an sg_sdma_result, or an error of a memory access. */
int sg_sdma_step(struct sg_sdma *sdma)
{
	u32 p[SG_SDMA_HEADER_DW];
	u8 op;
	int err;

	if (sdma->at >= sdma->end)
		return SG_SDMA_IDLE;
	err = sg_sdma_fetch(sdma, 0, p, 1);
	if (err)
		return err == -ENODATA ? SG_SDMA_HANG : err;
	op = p[0] & 0xff;
	if (op >= ARRAY_SIZE(sg_sdma_fixed) || !sg_sdma_fixed[op]) {
		snprintf(sdma->agent->packet, SG_PACKET_NAME, "sdma:%llu:opcode-%u", sdma->at, op);
		return SG_SDMA_HANG;
	}
	snprintf(sdma->agent->packet, SG_PACKET_NAME, "sdma:%llu:%s", sdma->at, sg_sdma_names[op]);
	err = sg_sdma_fetch(sdma, 1, p + 1, sg_sdma_fixed[op] - 1);
	if (!err)
		err = sg_sdma_execute(sdma, p);
	return err == -ENODATA ? SG_SDMA_HANG : err;
}
