// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Held copies, in debugfs beside the judge's files. `hold` takes one line:
 *
 *   off
 *   NAME [N]
 *
 * Jobs in SDMA engines do not begin from then on if processes of that name (of
 * their first thread) have submitted them. The first N of them do. The next
 * write replaces this. Jobs of a closed file end all the same. Reading gives
 * the name and how many of N are left, or "off".
 */
#include <linux/debugfs.h>
#include <linux/module.h>
#include <linux/sched.h>
#include <linux/seq_file.h>
#include <linux/spinlock.h>
#include <linux/string.h>
#include <linux/uaccess.h>

#include "device.h"
#include "exec_device.h"
#include "hold.h"

/* One line. */
#define SG_HOLD_LINE	64

static struct {
	spinlock_t lock;		/* a leaf */
	char comm[TASK_COMM_LEN];	/* empty: none */
	unsigned int left;		/* that may begin all the same */
} sg_hold = { .lock = __SPIN_LOCK_UNLOCKED(sg_hold.lock) };

bool sg_hold_lets_go(const char *comm)
{
	unsigned long flags;
	bool held;

	spin_lock_irqsave(&sg_hold.lock, flags);
	held = *sg_hold.comm && !strcmp(sg_hold.comm, comm);
	if (held && sg_hold.left) {
		sg_hold.left--;
		held = false;
	}
	spin_unlock_irqrestore(&sg_hold.lock, flags);
	return !held;
}

/* Devices stay meanwhile: an open file pins the module. */
static void sg_hold_changed(void)
{
	unsigned int i, ring;

	for (i = 0; i < sg_device_count; i++) {
		struct sg_exec_device *exec = READ_ONCE(sg_devices[i]->exec);

		for (ring = 0; exec && ring < exec->ring_count; ring++)
			wake_up_all(&exec->rings[ring].wake);
	}
}

static ssize_t sg_hold_write(struct file *file, const char __user *from, size_t len, loff_t *pos)
{
	char line[SG_HOLD_LINE], *rest, *comm;
	unsigned int left = 0;

	if (len >= sizeof(line))
		return -EINVAL;
	if (copy_from_user(line, from, len))
		return -EFAULT;
	line[len] = '\0';
	rest = strim(line);
	comm = strsep(&rest, " ");
	if (!*comm || strlen(comm) >= TASK_COMM_LEN || (rest && kstrtouint(rest, 10, &left)))
		return -EINVAL;
	spin_lock_irq(&sg_hold.lock);
	strscpy(sg_hold.comm, strcmp(comm, "off") ? comm : "");
	sg_hold.left = left;
	spin_unlock_irq(&sg_hold.lock);
	sg_hold_changed();
	return len;
}

static int sg_hold_show(struct seq_file *seq, void *data)
{
	char comm[TASK_COMM_LEN];
	unsigned int left;

	spin_lock_irq(&sg_hold.lock);
	strscpy(comm, sg_hold.comm);
	left = sg_hold.left;
	spin_unlock_irq(&sg_hold.lock);
	if (*comm)
		seq_printf(seq, "%s %u\n", comm, left);
	else
		seq_puts(seq, "off\n");
	return 0;
}

static int sg_hold_open(struct inode *inode, struct file *file)
{
	return single_open(file, sg_hold_show, NULL);
}

static const struct file_operations sg_hold_fops = {
	.owner = THIS_MODULE,
	.open = sg_hold_open,
	.read = seq_read,
	.write = sg_hold_write,
	.llseek = seq_lseek,
	.release = single_release,
};

void sg_hold_init(struct dentry *folder)
{
	debugfs_create_file("hold", 0600, folder, NULL, &sg_hold_fops);
}
