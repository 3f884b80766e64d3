// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The compute kernels that are built in.
 *
 * Each is a step function: it does at most SG_STEP bytes of work, then returns
 * 0 (more to do), 1 (done) or an error of the memory access. All its state
 * between two steps is in the wave, so one step can be the last before a dump
 * and the next the first after a restore.
 */
#include <linux/bitops.h>
#include <linux/delay.h>
#include <linux/ktime.h>
#include <linux/math64.h>
#include <linux/sizes.h>
#include <linux/minmax.h>
#include <linux/overflow.h>
#include <linux/string.h>

#include "exec.h"
#include "kernels.h"

/* Bytes of work in one step: well under a millisecond, also under emulation. */
#define SG_STEP		SZ_64K
/* Pointers that one step follows. */
#define SG_STEP_CHASE	256

static const struct {
	const char *name;
	int args;
} sg_kernels[] = {
	[SG_KERNEL_FILL32] = { "fill32", 3 },
	[SG_KERNEL_COPY] = { "copy", 3 },
	[SG_KERNEL_AXPY32] = { "axpy32", 4 },
	[SG_KERNEL_MATVEC] = { "matvec", 5 },
	[SG_KERNEL_HASH] = { "hash", 4 },
	[SG_KERNEL_CHASE] = { "chase", 3 },
	[SG_KERNEL_SPIN] = { "spin", 1 },
};

/* How many arguments a kernel has; 0 for an unknown kernel. */
int sg_kernel_args(u64 kernel)
{
	return kernel < ARRAY_SIZE(sg_kernels) ? sg_kernels[kernel].args : 0;
}

const char *sg_kernel_name(u64 kernel)
{
	return sg_kernel_args(kernel) ? sg_kernels[kernel].name : "unknown";
}

static u64 sg_wave_sum(const struct sg_wave *wave)
{
	const u64 *word = (const u64 *)wave;
	u64 sum = SG_WAVE_MAGIC;
	size_t i;

	for (i = 0; i < offsetof(struct sg_wave, check) / sizeof(u64); i++)
		sum = rol64(sum ^ word[i], 29) * 0x9E3779B97F4A7C15ULL;
	return sum;
}

void sg_wave_seal(struct sg_wave *wave)
{
	wave->magic = SG_WAVE_MAGIC;
	wave->check = sg_wave_sum(wave);
}

bool sg_wave_intact(const struct sg_wave *wave)
{
	return wave->magic == SG_WAVE_MAGIC && wave->check == sg_wave_sum(wave);
}

/* {dst, words, value}; at: words done. */
static int sg_fill32(struct sg_agent *agent, struct sg_wave *wave)
{
	u64 dst = wave->args[0], words = wave->args[1];
	size_t budget = SG_STEP / sizeof(u32);
	struct sg_span to;
	int err;

	if (dst % sizeof(u32))
		return sg_agent_refuse(agent, dst, true);
	while (wave->at < words && budget) {
		size_t n = min_t(u64, words - wave->at, budget);

		err = sg_span_get(agent, dst + wave->at * sizeof(u32), n * sizeof(u32), true, &to);
		if (err)
			return err;
		n = to.len / sizeof(u32);
		memset32((u32 *)to.at, (u32)wave->args[2], n);
		sg_span_put(agent, &to);
		wave->at += n;
		budget -= n;
	}
	return wave->at >= words;
}

/* {dst, src, bytes}; at: bytes done. */
static int sg_copy(struct sg_agent *agent, struct sg_wave *wave)
{
	u64 dst = wave->args[0], src = wave->args[1], bytes = wave->args[2];
	size_t budget = SG_STEP;
	int err;

	while (wave->at < bytes && budget) {
		size_t n = min_t(u64, bytes - wave->at, budget);

		err = sg_span_copy(agent, dst + wave->at, src + wave->at, &n);
		if (err)
			return err;
		wave->at += n;
		budget -= n;
	}
	return wave->at >= bytes;
}

/* y[i] += a * x[i] for {y, x, words, a}; at: words done. */
static int sg_axpy32(struct sg_agent *agent, struct sg_wave *wave)
{
	u64 y = wave->args[0], x = wave->args[1], words = wave->args[2];
	size_t budget = SG_STEP / sizeof(u32), i, n;
	struct sg_span from, to;
	int err;

	if (y % sizeof(u32))
		return sg_agent_refuse(agent, y, true);
	if (x % sizeof(u32))
		return sg_agent_refuse(agent, x, false);
	for (; wave->at < words && budget; wave->at += n, budget -= n) {
		n = min_t(u64, words - wave->at, budget) * sizeof(u32);
		err = sg_span_get(agent, x + wave->at * sizeof(u32), n, false, &from);
		if (err)
			return err;
		err = sg_span_get_rw(agent, y + wave->at * sizeof(u32), from.len, &to);
		if (err) {
			sg_span_put(agent, &from);
			return err;
		}
		n = to.len / sizeof(u32);
		for (i = 0; i < n; i++)
			((u32 *)to.at)[i] += (u32)wave->args[3] * ((u32 *)from.at)[i];
		sg_span_put(agent, &to);
		sg_span_put(agent, &from);
	}
	return wave->at >= words;
}

/* Adds up to `most` products of the current row; how many, or an error. */
static int sg_dot(struct sg_agent *agent, struct sg_wave *wave, u64 col, size_t most)
{
	struct sg_span weights, in;
	size_t i, n;
	u32 sum = (u32)wave->value;
	int err;

	err = sg_span_get(agent, wave->args[1] + wave->at * sizeof(u32), most * sizeof(u32),
			  false, &weights);
	if (err)
		return err;
	err = sg_span_get(agent, wave->args[2] + col * sizeof(u32), weights.len, false, &in);
	if (err) {
		sg_span_put(agent, &weights);
		return err;
	}
	n = in.len / sizeof(u32);
	for (i = 0; i < n; i++)
		sum += ((u32 *)weights.at)[i] * (((u32 *)in.at)[i] | 1);
	wave->value = sum;
	sg_span_put(agent, &in);
	sg_span_put(agent, &weights);
	return n;
}

/*
 * out[r] = sum over c of w[r * cols + c] * (in[c] | 1) for
 * {out, w, in, rows, cols}; at: weights done, value: sum of the row at hand.
 */
static int sg_matvec(struct sg_agent *agent, struct sg_wave *wave)
{
	u64 rows = wave->args[3], cols = wave->args[4], total;
	size_t budget = SG_STEP / sizeof(u32);
	int i, n, err;
	u32 sum;

	for (i = 0; i < 3; i++)
		if (wave->args[i] % sizeof(u32))
			return sg_agent_refuse(agent, wave->args[i], i == 0);
	if (check_mul_overflow(rows, cols, &total))
		return sg_agent_refuse(agent, wave->args[1], false);
	while (wave->at < total && budget) {
		u64 row = div64_u64(wave->at, cols), col = wave->at - row * cols;

		n = sg_dot(agent, wave, col, min_t(u64, cols - col, budget));
		if (n < 0)
			return n;
		if (col + n == cols) {
			sum = (u32)wave->value;
			err = sg_vm_access(agent, wave->args[0] + row * sizeof(u32), &sum,
					   sizeof(sum), true);
			if (err) {
				/* Repeats the row: restores the sum so far. */
				wave->value = 0;
				wave->at = row * cols;
				return err;
			}
			wave->value = 0;
		}
		wave->at += n;
		budget -= n;
	}
	return wave->at >= total;
}

/* {out, src, bytes, seed}; at: bytes done, value: the hash so far. */
static int sg_hash(struct sg_agent *agent, struct sg_wave *wave)
{
	u64 src = wave->args[1], bytes = wave->args[2];
	size_t budget = SG_STEP, i;
	struct sg_span from;
	int err;

	if (src % sizeof(u64) || bytes % sizeof(u64))
		return sg_agent_refuse(agent, src, false);
	if (!wave->at)
		wave->value = wave->args[3];
	while (wave->at < bytes && budget) {
		err = sg_span_get(agent, src + wave->at, min_t(u64, bytes - wave->at, budget), false,
				  &from);
		if (err)
			return err;
		for (i = 0; i < from.len / sizeof(u64); i++)
			wave->value = rol64(wave->value ^ ((u64 *)from.at)[i], 29) *
				      0x9E3779B97F4A7C15ULL;
		wave->at += from.len;
		budget -= from.len;
		sg_span_put(agent, &from);
	}
	if (wave->at < bytes)
		return 0;
	err = sg_vm_access(agent, wave->args[0], &wave->value, sizeof(u64), true);
	return err ?: 1;
}

/* {out, start, steps}; at: steps done, value: the pointer at hand. */
static int sg_chase(struct sg_agent *agent, struct sg_wave *wave)
{
	size_t budget = SG_STEP_CHASE;
	u64 next;
	int err;

	if (!wave->at)
		wave->value = wave->args[1];
	for (; wave->at < wave->args[2] && budget; wave->at++, budget--) {
		if (wave->value % sizeof(u64))
			return sg_agent_refuse(agent, wave->value, false);
		err = sg_vm_access(agent, wave->value, &next, sizeof(next), false);
		if (err)
			return err;
		wave->value = next;
	}
	if (wave->at < wave->args[2])
		return 0;
	err = sg_vm_access(agent, wave->args[0], &wave->value, sizeof(u64), true);
	return err ?: 1;
}

/* {microseconds} of running time; at: microseconds done. */
static int sg_spin(struct sg_agent *agent, struct sg_wave *wave)
{
	u64 left = wave->args[0] > wave->at ? wave->args[0] - wave->at : 0;
	u64 now = min_t(u64, left, USEC_PER_MSEC);
	ktime_t begin = ktime_get();

	/* A busy GPU costs this machine nothing: it sleeps. */
	if (now)
		usleep_range(now, now + 50);
	wave->at += min_t(u64, left, ktime_us_delta(ktime_get(), begin));
	return wave->at >= wave->args[0];
}

/* One step of a dispatch. */
int sg_kernel_step(struct sg_agent *agent, struct sg_wave *wave)
{
	switch (wave->kernel) {
	case SG_KERNEL_FILL32:
		return sg_fill32(agent, wave);
	case SG_KERNEL_COPY:
		return sg_copy(agent, wave);
	case SG_KERNEL_AXPY32:
		return sg_axpy32(agent, wave);
	case SG_KERNEL_MATVEC:
		return sg_matvec(agent, wave);
	case SG_KERNEL_HASH:
		return sg_hash(agent, wave);
	case SG_KERNEL_CHASE:
		return sg_chase(agent, wave);
	case SG_KERNEL_SPIN:
		return sg_spin(agent, wave);
	default:
		return -ENOEXEC;
	}
}
