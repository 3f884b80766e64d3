// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The judge's files, in debugfs:
 *
 *   violations        one line each: kind pid gpu va packet detail
 *   violations_count  all of them, also those that the list has no room for
 *   clear             any write empties both
 *   state             what is alive, one "name count" a line
 *
 * The rest is for the test harness: harness.c, faults.c and hold.c.
 */
#include <linux/debugfs.h>
#include <linux/module.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/spinlock.h>

#include "faults.h"
#include "harness.h"
#include "hold.h"
#include "judge.h"
#include "softgpu.h"

/* The list's bound; counting continues. The first ones are kept: they are the cause. */
#define SG_VIOLATIONS_KEPT	512
#define SG_DETAIL		160

struct sg_entry {
	enum sg_violation kind;
	pid_t pid;
	u32 gpu;
	u64 va;
	char packet[SG_PACKET_NAME];
	char detail[SG_DETAIL];
};

static const char * const sg_violation_names[SG_VIOLATIONS] = {
	[SG_GPU_READ_NOT_RESTORED] = "gpu-read-not-restored",
	[SG_CPU_READ_NOT_RESTORED] = "cpu-read-not-restored",
	[SG_QUEUE_RAN_GATED] = "queue-ran-gated",
	[SG_STALE_USERPTR] = "stale-userptr",
	[SG_RESUME_REPEATED] = "resume-repeated",
	[SG_UNPAUSE_OUT_OF_TURN] = "unpause-out-of-turn",
	[SG_LEAK] = "leak",
	[SG_SDMA_OVERRUN] = "sdma-overrun",
	[SG_SAVE_AREA_STALE] = "save-area-stale",
};

static const char * const sg_thing_names[SG_THINGS] = {
	[SG_PROCESSES] = "processes",
	[SG_BOS] = "bos",
	[SG_PAGES] = "pages",
	[SG_QUEUES] = "queues",
	[SG_PARTIAL_QUEUES] = "partial_queues",
	[SG_EVENTS] = "events",
	[SG_SMI_CLIENTS] = "smi_clients",
	[SG_DRM_FILES] = "drm_files",
	[SG_CONTEXTS] = "contexts",
	[SG_BO_LISTS] = "bo_lists",
	[SG_JOBS] = "jobs",
};

atomic_long_t sg_alive[SG_THINGS];

static struct {
	spinlock_t lock;	/* for the list; a leaf */
	u64 count;
	struct sg_entry kept[SG_VIOLATIONS_KEPT];
} sg_book = { .lock = __SPIN_LOCK_UNLOCKED(sg_book.lock) };

static struct dentry *sg_folder;

void sg_violate(enum sg_violation kind, pid_t pid, struct sg_device *dev, u64 va,
		const char *packet, const char *format, ...)
{
	struct sg_entry *entry;
	unsigned long flags;
	va_list args;

	spin_lock_irqsave(&sg_book.lock, flags);
	if (sg_book.count < SG_VIOLATIONS_KEPT) {
		entry = &sg_book.kept[sg_book.count];
		entry->kind = kind;
		entry->pid = pid;
		entry->gpu = dev ? dev->gpu_id : 0;
		entry->va = va;
		strscpy(entry->packet, packet && *packet ? packet : "-");
		va_start(args, format);
		vsnprintf(entry->detail, sizeof(entry->detail), format, args);
		va_end(args);
	}
	sg_book.count++;
	spin_unlock_irqrestore(&sg_book.lock, flags);
}

static int violations_show(struct seq_file *seq, void *data)
{
	struct sg_entry *copy;
	u64 i, kept;

	copy = kvmalloc_array(SG_VIOLATIONS_KEPT, sizeof(*copy), GFP_KERNEL);
	if (!copy)
		return -ENOMEM;
	spin_lock_irq(&sg_book.lock);
	kept = min_t(u64, sg_book.count, SG_VIOLATIONS_KEPT);
	memcpy(copy, sg_book.kept, kept * sizeof(*copy));
	spin_unlock_irq(&sg_book.lock);
	for (i = 0; i < kept; i++)
		seq_printf(seq, "%s %d %u 0x%llx %s %s\n", sg_violation_names[copy[i].kind],
			   copy[i].pid, copy[i].gpu, copy[i].va, copy[i].packet, copy[i].detail);
	kvfree(copy);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(violations);

static int violations_count_show(struct seq_file *seq, void *data)
{
	u64 count;

	spin_lock_irq(&sg_book.lock);
	count = sg_book.count;
	spin_unlock_irq(&sg_book.lock);
	seq_printf(seq, "%llu\n", count);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(violations_count);

static int state_show(struct seq_file *seq, void *data)
{
	int i;

	for (i = 0; i < SG_THINGS; i++)
		seq_printf(seq, "%s %ld\n", sg_thing_names[i], atomic_long_read(&sg_alive[i]));
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(state);

static ssize_t sg_clear_write(struct file *file, const char __user *from, size_t len, loff_t *pos)
{
	spin_lock_irq(&sg_book.lock);
	sg_book.count = 0;
	spin_unlock_irq(&sg_book.lock);
	return len;
}

static const struct file_operations sg_clear_fops = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.write = sg_clear_write,
};

void sg_judge_init(void)
{
	sg_folder = debugfs_create_dir("softgpu", NULL);
	debugfs_create_file("violations", 0444, sg_folder, NULL, &violations_fops);
	debugfs_create_file("violations_count", 0444, sg_folder, NULL, &violations_count_fops);
	debugfs_create_file("state", 0444, sg_folder, NULL, &state_fops);
	debugfs_create_file("clear", 0200, sg_folder, NULL, &sg_clear_fops);
	sg_harness_init(sg_folder);
	sg_faults_init(sg_folder);
	sg_hold_init(sg_folder);
}

void sg_judge_exit(void)
{
	debugfs_remove(sg_folder);
	sg_folder = NULL;
}
