// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Injected faults, in debugfs beside the judge's files. `faults` takes one
 * line:
 *
 *   off
 *   count [comm=NAME] [call=CALL]
 *   nth=N errno=E [comm=NAME] [call=CALL]
 *   nth=N kill=before|after [comm=NAME] [call=CALL]
 *
 * From then on, calls of processes of that name (of their first thread) and of
 * that kind are counted from 1. The Nth returns -E and does nothing, or its
 * caller is killed before or after it is done; later ones are not affected.
 * CALL is kfd/NAME, kfd/CRIU_OP/OPERATION, amdgpu/NAME or drm/NAME.
 *
 * Reading `faults` gives "seen N" and "hit 0" or "hit 1". Reading `calls` gives
 * the counted calls, one "number pid comm call result" a line. The result is
 * "?" while a call has none, and "fault" follows the one that was hit.
 */
#include <linux/debugfs.h>
#include <linux/module.h>
#include <linux/sched/signal.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/uaccess.h>

#include "faults.h"

/* The list's bound; counting continues. */
#define SG_CALLS_KEPT	8192
#define SG_FAULT_LINE	160
/* No result yet: no errno, and no ioctl here returns it. */
#define SG_UNDER_WAY	LONG_MIN

enum sg_fate {
	SG_GOES_ON,
	SG_FAILS,
	SG_KILLED_BEFORE,
	SG_KILLED_AFTER,
};

/* Which calls are counted, and the fault of the Nth. Without a fault, `nth` is 0. */
struct sg_plan {
	u64 nth;
	enum sg_fate fate;
	int error;
	char comm[TASK_COMM_LEN];	/* empty: any */
	char call[SG_CALL_NAME];	/* empty: any */
};

struct sg_seen {
	pid_t pid;
	char comm[TASK_COMM_LEN];
	char call[SG_CALL_NAME];
	long result;
	bool hit;
};

static struct {
	spinlock_t lock;	/* a leaf */
	bool on;
	struct sg_plan plan;
	u64 round;		/* plans so far: results of calls counted by an older one are dropped */
	u64 seen;
	bool hit;
	struct sg_seen kept[SG_CALLS_KEPT];
} sg_faults = { .lock = __SPIN_LOCK_UNLOCKED(sg_faults.lock) };

/* "kfd/CRIU_OP" stands for all its operations. */
static bool sg_call_matches(const char *wanted, const char *name)
{
	size_t len = strlen(wanted);

	return !strncmp(wanted, name, len) && (!name[len] || name[len] == '/');
}

/* The fault of this call; `number` and `round` are its place in the list,
 * number 0 if it is not counted. */
static enum sg_fate sg_faults_count(const char *name, u64 *number, u64 *round, int *error)
{
	const struct sg_plan *plan = &sg_faults.plan;
	enum sg_fate fate = SG_GOES_ON;
	char comm[TASK_COMM_LEN];
	struct sg_seen *seen;
	unsigned long flags;

	get_task_comm(comm, current->group_leader);
	*number = 0;
	spin_lock_irqsave(&sg_faults.lock, flags);
	if (!sg_faults.on || (*plan->comm && strcmp(plan->comm, comm)) ||
	    (*plan->call && !sg_call_matches(plan->call, name)))
		goto unlock;
	*number = ++sg_faults.seen;
	*round = sg_faults.round;
	if (*number == plan->nth) {
		fate = plan->fate;
		*error = plan->error;
		sg_faults.hit = true;
	}
	if (*number <= SG_CALLS_KEPT) {
		seen = &sg_faults.kept[*number - 1];
		seen->pid = task_tgid_nr(current);
		strscpy(seen->comm, comm);
		strscpy(seen->call, name, sizeof(seen->call));
		seen->result = SG_UNDER_WAY;
		seen->hit = fate != SG_GOES_ON;
	}
unlock:
	spin_unlock_irqrestore(&sg_faults.lock, flags);
	return fate;
}

static void sg_faults_result(u64 number, u64 round, long result)
{
	unsigned long flags;

	if (!number || number > SG_CALLS_KEPT)
		return;
	spin_lock_irqsave(&sg_faults.lock, flags);
	if (round == sg_faults.round)
		sg_faults.kept[number - 1].result = result;
	spin_unlock_irqrestore(&sg_faults.lock, flags);
}

long sg_faults_around(struct file *filp, unsigned int cmd, unsigned long arg, sg_call_fn call,
		      sg_call_name_fn name)
{
	char text[SG_CALL_NAME];
	u64 number, round;
	enum sg_fate fate;
	long result;
	int error = 0;

	if (!READ_ONCE(sg_faults.on))
		return call(filp, cmd, arg);
	name(text, cmd, arg);
	fate = sg_faults_count(text, &number, &round, &error);
	if (fate == SG_KILLED_BEFORE) {
		send_sig(SIGKILL, current, 1);
		return -EINTR;
	}
	result = fate == SG_FAILS ? -error : call(filp, cmd, arg);
	sg_faults_result(number, round, result);
	if (fate == SG_KILLED_AFTER)
		send_sig(SIGKILL, current, 1);
	return result;
}

static int sg_plan_text(char *to, size_t size, const char *value)
{
	return *to || !*value || strscpy(to, value, size) < 0 ? -EINVAL : 0;
}

static int sg_plan_word(struct sg_plan *plan, char *word)
{
	char *value = strchr(word, '=');
	unsigned int error;

	if (!value)
		return -EINVAL;
	*value++ = '\0';
	if (!strcmp(word, "comm"))
		return sg_plan_text(plan->comm, sizeof(plan->comm), value);
	if (!strcmp(word, "call"))
		return sg_plan_text(plan->call, sizeof(plan->call), value);
	if (!strcmp(word, "nth"))
		return plan->nth || kstrtou64(value, 10, &plan->nth) || !plan->nth ? -EINVAL : 0;
	if (plan->fate != SG_GOES_ON)
		return -EINVAL;
	if (!strcmp(word, "errno")) {
		if (kstrtouint(value, 10, &error) || !error || error > MAX_ERRNO)
			return -EINVAL;
		plan->error = error;
		plan->fate = SG_FAILS;
		return 0;
	}
	if (strcmp(word, "kill"))
		return -EINVAL;
	if (!strcmp(value, "before"))
		plan->fate = SG_KILLED_BEFORE;
	else if (!strcmp(value, "after"))
		plan->fate = SG_KILLED_AFTER;
	else
		return -EINVAL;
	return 0;
}

/* The first word says whether calls are counted. */
static int sg_plan_parse(struct sg_plan *plan, char *line, bool *on)
{
	bool counts = false;
	char *word;
	int err;

	*on = false;
	while ((word = strsep(&line, " "))) {
		if (!*on && !strcmp(word, "off"))
			return line ? -EINVAL : 0;
		if (!*on && !strcmp(word, "count")) {
			counts = true;
		} else {
			err = sg_plan_word(plan, word);
			if (err)
				return err;
		}
		*on = true;
	}
	if (counts != !plan->nth || counts != (plan->fate == SG_GOES_ON))
		return -EINVAL;
	if (*plan->call && !sg_kfd_call_known(plan->call) && !sg_drm_call_known(plan->call))
		return -ENOENT;
	return 0;
}

static ssize_t sg_faults_write(struct file *file, const char __user *from, size_t len, loff_t *pos)
{
	struct sg_plan plan = { .nth = 0 };
	char line[SG_FAULT_LINE];
	bool on;
	int err;

	if (len >= sizeof(line))
		return -EINVAL;
	if (copy_from_user(line, from, len))
		return -EFAULT;
	line[len] = '\0';
	err = sg_plan_parse(&plan, strim(line), &on);
	if (err)
		return err;
	spin_lock_irq(&sg_faults.lock);
	sg_faults.on = on;
	/* Counted calls can be read until the next plan is made. */
	if (on) {
		sg_faults.plan = plan;
		sg_faults.round++;
		sg_faults.seen = 0;
		sg_faults.hit = false;
	}
	spin_unlock_irq(&sg_faults.lock);
	return len;
}

static int sg_faults_show(struct seq_file *seq, void *data)
{
	u64 seen;
	bool hit;

	spin_lock_irq(&sg_faults.lock);
	seen = sg_faults.seen;
	hit = sg_faults.hit;
	spin_unlock_irq(&sg_faults.lock);
	seq_printf(seq, "seen %llu\nhit %d\n", seen, hit);
	return 0;
}

static int sg_faults_open(struct inode *inode, struct file *file)
{
	return single_open(file, sg_faults_show, NULL);
}

static const struct file_operations sg_faults_fops = {
	.owner = THIS_MODULE,
	.open = sg_faults_open,
	.read = seq_read,
	.write = sg_faults_write,
	.llseek = seq_lseek,
	.release = single_release,
};

static void sg_seen_show(struct seq_file *seq, u64 number, const struct sg_seen *seen)
{
	seq_printf(seq, "%llu %d %s %s ", number, seen->pid, seen->comm, seen->call);
	if (seen->result == SG_UNDER_WAY)
		seq_puts(seq, "?");
	else
		seq_printf(seq, "%ld", seen->result);
	seq_puts(seq, seen->hit ? " fault\n" : "\n");
}

static int calls_show(struct seq_file *seq, void *data)
{
	struct sg_seen *copy = kvmalloc_array(SG_CALLS_KEPT, sizeof(*copy), GFP_KERNEL);
	u64 i, kept;

	if (!copy)
		return -ENOMEM;
	spin_lock_irq(&sg_faults.lock);
	kept = min_t(u64, sg_faults.seen, SG_CALLS_KEPT);
	memcpy(copy, sg_faults.kept, kept * sizeof(*copy));
	spin_unlock_irq(&sg_faults.lock);
	for (i = 0; i < kept; i++)
		sg_seen_show(seq, i + 1, &copy[i]);
	kvfree(copy);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(calls);

void sg_faults_init(struct dentry *folder)
{
	debugfs_create_file("faults", 0600, folder, NULL, &sg_faults_fops);
	debugfs_create_file("calls", 0400, folder, NULL, &calls_fops);
}
