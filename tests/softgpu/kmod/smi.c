// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * SMI events. A client reads lines, "<event in hex> <text of the event>"; it
 * subscribes by writing a mask. A client without CAP_SYS_ADMIN gets the events
 * of its own process only.
 */
#include <linux/anon_inodes.h>
#include <linux/capability.h>
#include <linux/file.h>
#include <linux/kfifo.h>
#include <linux/ktime.h>
#include <linux/module.h>
#include <linux/pid_namespace.h>
#include <linux/poll.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <uapi/linux/kfd_ioctl.h>

#include "exec_device.h"
#include "smi.h"
#include "softgpu.h"

/* Lines that a client has not read yet; lines without space are lost. */
#define SG_SMI_FIFO	8192

struct sg_smi_client {
	struct list_head list;
	struct sg_smi *smi;
	struct kfifo fifo;		/* under `lock` */
	spinlock_t lock;
	wait_queue_head_t readers;
	u64 mask;
	pid_t pid;			/* as its own namespace numbers it */
	bool all;			/* sees every process */
};

void sg_smi_init(struct sg_smi *smi)
{
	spin_lock_init(&smi->lock);
	INIT_LIST_HEAD(&smi->clients);
}

/* A process's pid in its own namespace, which clients get. */
static pid_t sg_own_pid(pid_t global)
{
	pid_t own = 0;
	struct pid *pid;

	rcu_read_lock();
	pid = find_pid_ns(global, &init_pid_ns);
	if (pid)
		own = pid->numbers[pid->level].nr;
	rcu_read_unlock();
	return own;
}

/* `pid` 0: an event that belongs to no process. */
__printf(4, 5)
static void sg_smi_tell(struct sg_device *dev, pid_t pid, u32 event, const char *format, ...)
{
	struct sg_smi *smi = &dev->exec->smi;
	char line[KFD_SMI_EVENT_MSG_SIZE];
	struct sg_smi_client *client;
	va_list args;
	int len;

	len = scnprintf(line, sizeof(line), "%x ", event);
	va_start(args, format);
	len += vscnprintf(line + len, sizeof(line) - len, format, args);
	va_end(args);

	spin_lock(&smi->lock);
	list_for_each_entry(client, &smi->clients, list) {
		if (pid && pid != client->pid && !client->all)
			continue;
		if (!(READ_ONCE(client->mask) & KFD_SMI_EVENT_MASK_FROM_INDEX(event)))
			continue;
		spin_lock(&client->lock);
		if (kfifo_avail(&client->fifo) >= len) {
			kfifo_in(&client->fifo, line, len);
			wake_up_all(&client->readers);
		}
		spin_unlock(&client->lock);
	}
	spin_unlock(&smi->lock);
}

void sg_smi_queue_eviction(struct sg_device *dev, pid_t pid, u32 trigger)
{
	pid = sg_own_pid(pid);
	sg_smi_tell(dev, pid, KFD_SMI_EVENT_QUEUE_EVICTION,
		    KFD_EVENT_FMT_QUEUE_EVICTION(ktime_get_boottime_ns(), pid, dev->gpu_id, trigger));
}

static void sg_smi_restored(struct sg_device *dev, pid_t pid, char how)
{
	pid = sg_own_pid(pid);
	sg_smi_tell(dev, pid, KFD_SMI_EVENT_QUEUE_RESTORE,
		    KFD_EVENT_FMT_QUEUE_RESTORE(ktime_get_boottime_ns(), pid, dev->gpu_id, how));
}

void sg_smi_queue_restore(struct sg_device *dev, pid_t pid)
{
	sg_smi_restored(dev, pid, '0');
}

void sg_smi_queue_restore_rescheduled(struct mm_struct *mm)
{
	struct sg_process *p = sg_process_by_mm(mm);
	unsigned int i;

	if (!p)
		return;
	for (i = 0; i < sg_device_count; i++)
		sg_smi_restored(sg_devices[i], sg_process_pid(p), 'R');
	sg_process_put(p);
}

void sg_smi_vm_fault(struct sg_device *dev, struct sg_process *p)
{
	char comm[TASK_COMM_LEN];

	sg_smi_tell(dev, 0, KFD_SMI_EVENT_VMFAULT,
		    KFD_EVENT_FMT_VMFAULT(sg_process_pid(p), get_task_comm(comm, p->lead)));
}

/* An event that kernels before 7.x do not have. */
void sg_smi_process_end(struct sg_process *p)
{
#if SG_MODERN
	char comm[TASK_COMM_LEN];
	unsigned int i;

	get_task_comm(comm, p->lead);
	for (i = 0; i < p->n_pdds; i++)
		if (p->pdds[i]->vm)
			sg_smi_tell(p->pdds[i]->dev, 0, KFD_SMI_EVENT_PROCESS_END,
				    KFD_EVENT_FMT_PROCESS(sg_process_pid(p), comm));
#endif
}

static __poll_t sg_smi_poll(struct file *file, struct poll_table_struct *wait)
{
	struct sg_smi_client *client = file->private_data;
	bool ready;

	poll_wait(file, &client->readers, wait);
	spin_lock(&client->lock);
	ready = !kfifo_is_empty(&client->fifo);
	spin_unlock(&client->lock);
	return ready ? EPOLLIN | EPOLLRDNORM : 0;
}

static ssize_t sg_smi_read(struct file *file, char __user *to, size_t size, loff_t *pos)
{
	struct sg_smi_client *client = file->private_data;
	unsigned int len;
	ssize_t result;
	char *lines;

	size = min_t(size_t, size, SG_SMI_FIFO);
	lines = kmalloc(size, GFP_KERNEL);
	if (!lines)
		return -ENOMEM;
	spin_lock(&client->lock);
	len = kfifo_out(&client->fifo, lines, size);
	spin_unlock(&client->lock);
	if (!len)
		result = -EAGAIN;
	else
		result = copy_to_user(to, lines, len) ? -EFAULT : len;
	kfree(lines);
	return result;
}

static ssize_t sg_smi_write(struct file *file, const char __user *from, size_t size, loff_t *pos)
{
	struct sg_smi_client *client = file->private_data;
	u64 mask;

	if (size < sizeof(mask) || copy_from_user(&mask, from, sizeof(mask)))
		return -EFAULT;
	WRITE_ONCE(client->mask, mask);
	return sizeof(mask);
}

static void sg_smi_forget(struct sg_smi_client *client)
{
	kfifo_free(&client->fifo);
	kfree(client);
	sg_died(SG_SMI_CLIENTS);
}

static int sg_smi_release(struct inode *inode, struct file *file)
{
	struct sg_smi_client *client = file->private_data;

	spin_lock(&client->smi->lock);
	list_del(&client->list);
	spin_unlock(&client->smi->lock);
	sg_smi_forget(client);
	return 0;
}

static const struct file_operations sg_smi_fops = {
	.owner = THIS_MODULE,
	.poll = sg_smi_poll,
	.read = sg_smi_read,
	.write = sg_smi_write,
	.release = sg_smi_release,
};

int sg_smi_open(struct sg_process *p, struct kfd_ioctl_smi_events_args *args)
{
	struct sg_smi_client *client;
	struct sg_pdd *pdd;
	struct file *file;
	int number;

	mutex_lock(&p->lock);
	pdd = sg_pdd_by_user_id(p, args->gpuid);
	mutex_unlock(&p->lock);
	if (!pdd)
		return -EINVAL;
	client = kzalloc(sizeof(*client), GFP_KERNEL_ACCOUNT);
	if (!client)
		return -ENOMEM;
	if (kfifo_alloc(&client->fifo, SG_SMI_FIFO, GFP_KERNEL)) {
		kfree(client);
		return -ENOMEM;
	}
	sg_born(SG_SMI_CLIENTS);
	spin_lock_init(&client->lock);
	init_waitqueue_head(&client->readers);
	client->smi = &pdd->dev->exec->smi;
	client->pid = task_tgid_nr_ns(current, task_active_pid_ns(current));
	client->all = capable(CAP_SYS_ADMIN);
	number = get_unused_fd_flags(0);
	if (number < 0) {
		sg_smi_forget(client);
		return number;
	}
	file = anon_inode_getfile("kfd_smi_ev", &sg_smi_fops, client, O_RDWR);
	if (IS_ERR(file)) {
		put_unused_fd(number);
		sg_smi_forget(client);
		return PTR_ERR(file);
	}
	/* From here on the file owns the client. */
	spin_lock(&client->smi->lock);
	list_add(&client->list, &client->smi->clients);
	spin_unlock(&client->smi->lock);
	fd_install(number, file);
	args->anon_fd = number;
	return 0;
}
