// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * For the test harness, in debugfs beside the judge's files:
 *
 *   declare_zero  "pid gpu_id va size": these pages are zero in the image too
 *   break_gate    "pid queue": this queue runs whatever the gate says, so that
 *                 a test can see the judge notice
 *   paused        read: "waves N" and "packets N": dispatches that PROCESS_INFO
 *                 found in their middle, and packets that it found waiting
 *   gates         read: "pid paused evicted..." for each process, paused 1 from
 *                 PROCESS_INFO to UNPAUSE, then the eviction count of each GPU
 */
#include <linux/debugfs.h>
#include <linux/module.h>
#include <linux/sched/signal.h>
#include <linux/seq_file.h>
#include <linux/uaccess.h>

#include "harness.h"
#include "process.h"
#include "queue.h"

/* One line. */
#define SG_HARNESS_LINE	128

static int sg_declare(struct sg_vm *vm, u64 va, u64 size)
{
	struct sg_page_ref ref;
	u64 at;
	int err;

	if ((va | size) & ~PAGE_MASK || va + size < va)
		return -EINVAL;
	for (at = va; at < va + size; at += PAGE_SIZE) {
		err = sg_vm_page(vm, at, false, GFP_KERNEL, &ref);
		if (err)
			return err;
		if (ref.bo)
			sg_bo_declare(ref.bo, (u64)ref.index << PAGE_SHIFT, PAGE_SIZE);
		sg_page_put(&ref);
		if (fatal_signal_pending(current))
			return -EINTR;
		cond_resched();
	}
	return 0;
}

static int sg_declare_zero(const char *line)
{
	struct sg_process *p;
	struct sg_pdd *pdd;
	u64 va, size;
	u32 gpu_id;
	pid_t pid;
	int err = -EINVAL;

	if (sscanf(line, "%d %u %lli %lli", &pid, &gpu_id, &va, &size) != 4)
		return -EINVAL;
	p = sg_process_by_pid(pid);
	if (!p)
		return -ESRCH;
	mutex_lock(&p->lock);
	pdd = sg_pdd_by_user_id(p, gpu_id);
	if (pdd && pdd->vm)
		err = sg_declare(pdd->vm, va, size);
	mutex_unlock(&p->lock);
	sg_process_put(p);
	return err;
}

static int sg_break_gate(const char *line)
{
	struct sg_process *p;
	struct sg_queue *q;
	int err = -EINVAL;
	pid_t pid;
	u32 id;

	if (sscanf(line, "%d %u", &pid, &id) != 2 || id >= SG_MAX_QUEUES)
		return -EINVAL;
	p = sg_process_by_pid(pid);
	if (!p)
		return -ESRCH;
	mutex_lock(&p->lock);
	q = idr_find(&p->queues->ids, id);
	if (q) {
		WRITE_ONCE(q->run.ungated, true);
		sg_run_kick(q);
		err = 0;
	}
	mutex_unlock(&p->lock);
	sg_process_put(p);
	return err;
}

static ssize_t sg_harness_write(const char __user *from, size_t len, int (*act)(const char *line))
{
	char line[SG_HARNESS_LINE];
	int err;

	if (len >= sizeof(line))
		return -EINVAL;
	if (copy_from_user(line, from, len))
		return -EFAULT;
	line[len] = '\0';
	err = act(line);
	return err ?: len;
}

static ssize_t sg_declare_zero_write(struct file *file, const char __user *from, size_t len, loff_t *pos)
{
	return sg_harness_write(from, len, sg_declare_zero);
}

static ssize_t sg_break_gate_write(struct file *file, const char __user *from, size_t len, loff_t *pos)
{
	return sg_harness_write(from, len, sg_break_gate);
}

static const struct file_operations sg_declare_zero_fops = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.write = sg_declare_zero_write,
};

static const struct file_operations sg_break_gate_fops = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.write = sg_break_gate_write,
};

static atomic64_t sg_paused_waves, sg_paused_packets;

void sg_harness_paused(struct sg_process *p)
{
	struct sg_queue *q;

	list_for_each_entry(q, &p->queues->all, link) {
		if (sg_queue_is_sdma(q))
			continue;
		atomic64_add(q->run.in_flight, &sg_paused_waves);
		atomic64_add(q->run.wptr - q->run.rptr, &sg_paused_packets);
	}
}

static int paused_show(struct seq_file *seq, void *data)
{
	seq_printf(seq, "waves %lld\npackets %lld\n", atomic64_read(&sg_paused_waves),
		   atomic64_read(&sg_paused_packets));
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(paused);

/* A glance: counts change at any time. */
static void sg_gate_show(struct sg_process *p, void *data)
{
	struct seq_file *seq = data;
	unsigned int i;

	seq_printf(seq, "%d %d", sg_process_pid(p), READ_ONCE(p->queues_paused));
	for (i = 0; i < p->n_pdds; i++)
		seq_printf(seq, " %u", READ_ONCE(p->pdds[i]->evicted));
	seq_putc(seq, '\n');
}

static int gates_show(struct seq_file *seq, void *data)
{
	sg_processes_each(sg_gate_show, seq);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(gates);

void sg_harness_init(struct dentry *folder)
{
	debugfs_create_file("paused", 0400, folder, NULL, &paused_fops);
	debugfs_create_file("gates", 0400, folder, NULL, &gates_fops);
	debugfs_create_file("declare_zero", 0200, folder, NULL, &sg_declare_zero_fops);
	debugfs_create_file("break_gate", 0200, folder, NULL, &sg_break_gate_fops);
}
