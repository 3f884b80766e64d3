// SPDX-License-Identifier: GPL-2.0 OR MIT
/* KFD processes: one for every address space that opened /dev/kfd, as long as it or a descriptor lives. */
#include <linux/file.h>
#include <linux/pid.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>

#include "doorbell.h"
#include "mem.h"
#include "process.h"
#include "svm.h"
#include "userptr.h"
#include "vm.h"

static DEFINE_MUTEX(sg_processes_lock);
static LIST_HEAD(sg_processes);
static struct workqueue_struct *sg_process_wq;

static const struct mmu_notifier_ops sg_process_mn_ops;

int sg_processes_init(void)
{
	sg_process_wq = alloc_workqueue("softgpu_process", WQ_UNBOUND, 0);
	return sg_process_wq ? 0 : -ENOMEM;
}


void sg_process_get(struct sg_process *p)
{
	kref_get(&p->ref);
}

static void sg_process_release(struct kref *ref)
{
	struct sg_process *p = container_of(ref, struct sg_process, ref);

	queue_work(sg_process_wq, &p->free_work);
}

void sg_process_put(struct sg_process *p)
{
	kref_put(&p->ref, sg_process_release);
}

static struct sg_process *sg_process_find_locked(struct mm_struct *mm)
{
	struct sg_process *p;

	list_for_each_entry(p, &sg_processes, link)
		if (p->mm == mm)
			return p;
	return NULL;
}

struct sg_process *sg_process_by_mm(struct mm_struct *mm)
{
	struct sg_process *p;

	mutex_lock(&sg_processes_lock);
	p = sg_process_find_locked(mm);
	if (p)
		sg_process_get(p);
	mutex_unlock(&sg_processes_lock);
	return p;
}

struct sg_process *sg_process_by_pid(pid_t pid)
{
	struct pid *struct_pid = find_get_pid(pid);
	struct task_struct *task = struct_pid ? get_pid_task(struct_pid, PIDTYPE_PID) : NULL;
	struct mm_struct *mm = task ? get_task_mm(task) : NULL;
	struct sg_process *p = mm ? sg_process_by_mm(mm) : NULL;

	if (mm)
		mmput(mm);
	if (task)
		put_task_struct(task);
	put_pid(struct_pid);
	return p;
}

void sg_processes_each(void (*act)(struct sg_process *p, void *data), void *data)
{
	struct sg_process *p;

	mutex_lock(&sg_processes_lock);
	list_for_each_entry(p, &sg_processes, link)
		act(p, data);
	mutex_unlock(&sg_processes_lock);
}

struct sg_pdd *sg_pdd_by_user_id(struct sg_process *p, u32 user_gpu_id)
{
	unsigned int i;

	for (i = 0; i < p->n_pdds; i++)
		if (p->pdds[i]->user_gpu_id == user_gpu_id)
			return p->pdds[i];
	return NULL;
}

static void sg_pdds_free(struct sg_process *p)
{
	unsigned int i;

	for (i = 0; i < p->n_pdds; i++) {
		struct sg_pdd *pdd = p->pdds[i];

		sg_pdd_free_mems(pdd);
	}
	/* Memory of one GPU is mapped on others: files are closed when all of it is freed. */
	for (i = 0; i < p->n_pdds; i++) {
		struct sg_pdd *pdd = p->pdds[i];

		if (pdd->drm_file) {
			sg_vm_release(pdd->vm);
			fput(pdd->drm_file);
		}
		idr_destroy(&pdd->handles);
		sg_doorbells_free(pdd);
		kfree(pdd);
	}
}

static void sg_process_free(struct sg_process *p)
{
	sg_smi_process_end(p);
	sg_userptr_stop(p);
	sg_svm_exit(p);
	sg_queues_exit(p);
	sg_events_exit(&p->events);
	sg_pdds_free(p);
	put_task_struct(p->lead);
	mmdrop(p->mm);
	mutex_destroy(&p->lock);
	kfree(p);
	sg_died(SG_PROCESSES);
}

static void sg_process_free_work(struct work_struct *work)
{
	sg_process_free(container_of(work, struct sg_process, free_work));
}

static int sg_pdds_create(struct sg_process *p)
{
	unsigned int i;

	for (i = 0; i < sg_device_count; i++) {
		struct sg_pdd *pdd;

		if (sg_device_hidden(sg_devices[i]))
			continue;
		pdd = kzalloc(sizeof(*pdd), GFP_KERNEL);
		if (!pdd)
			return -ENOMEM;
		pdd->process = p;
		pdd->dev = sg_devices[i];
		pdd->user_gpu_id = pdd->dev->gpu_id;
		idr_init(&pdd->handles);
		p->pdds[p->n_pdds++] = pdd;
	}
	return 0;
}

static struct sg_process *sg_process_alloc(void)
{
	struct sg_process *p = kzalloc(sizeof(*p), GFP_KERNEL);
	int err;

	if (!p)
		return ERR_PTR(-ENOMEM);
	sg_born(SG_PROCESSES);
	kref_init(&p->ref);
	INIT_LIST_HEAD(&p->link);
	INIT_WORK(&p->free_work, sg_process_free_work);
	mutex_init(&p->lock);
	mutex_init(&p->mem_lock);
	mutex_init(&p->notify_lock);
	mutex_init(&p->queue_lock);
	sg_userptr_init(p);
	sg_svm_init(p);
	sg_events_init(&p->events);
	p->mm = current->mm;
	mmgrab(p->mm);
	p->lead = get_task_struct(current->group_leader);
	p->xnack = sg_xnack_default();
	err = sg_queues_init(p);
	if (!err)
		err = sg_pdds_create(p);
	if (err) {
		sg_process_put(p);
		return ERR_PTR(err);
	}
	return p;
}

/* With sg_processes_lock held; the result has a reference for the caller, and the address space one. */
static struct sg_process *sg_process_create(void)
{
	struct sg_process *p = sg_process_alloc();
	struct mmu_notifier *mn;

	if (IS_ERR(p))
		return p;
	list_add_tail(&p->link, &sg_processes);
	mn = mmu_notifier_get(&sg_process_mn_ops, p->mm);
	if (IS_ERR(mn)) {
		list_del_init(&p->link);
		sg_process_put(p);
		return ERR_CAST(mn);
	}
	sg_process_sysfs_add(p);
	return p;
}

struct sg_process *sg_process_open(void)
{
	struct sg_process *p;

	if (!current->mm)
		return ERR_PTR(-EINVAL);
	/* As the driver does: first frees what an exec or an exit left. */
	flush_workqueue(sg_process_wq);
	mutex_lock(&sg_processes_lock);
	p = sg_process_find_locked(current->mm);
	if (p)
		sg_process_get(p);
	else
		p = sg_process_create();
	mutex_unlock(&sg_processes_lock);
	return p;
}

/* Called within mmu_notifier_get() with sg_processes_lock held: the process was just put on the list. */
static struct mmu_notifier *sg_process_mn_alloc(struct mm_struct *mm)
{
	struct sg_process *p = sg_process_find_locked(mm);

	sg_process_get(p);
	return &p->mn;
}

static void sg_process_mn_free(struct mmu_notifier *mn)
{
	sg_process_put(container_of(mn, struct sg_process, mn));
}

/* Nothing of this process may run when this returns. */
static void sg_process_end(struct sg_process *p)
{
	WRITE_ONCE(p->mm_gone, true);
	sg_queues_kill(p);
	sg_userptr_stop(p);
	sg_svm_stop(p);
	sg_process_sysfs_del(p);
	mmu_notifier_put(&p->mn);
}

static void sg_process_mn_release(struct mmu_notifier *mn, struct mm_struct *mm)
{
	struct sg_process *p = container_of(mn, struct sg_process, mn);
	bool ours;

	mutex_lock(&sg_processes_lock);
	ours = !list_empty(&p->link);
	list_del_init(&p->link);
	mutex_unlock(&sg_processes_lock);
	if (ours)
		sg_process_end(p);
}

static const struct mmu_notifier_ops sg_process_mn_ops = {
	.alloc_notifier = sg_process_mn_alloc,
	.free_notifier = sg_process_mn_free,
	.release = sg_process_mn_release,
};

int sg_pdd_acquire(struct sg_pdd *pdd, struct file *drm_file)
{
	struct sg_file *file = sg_file_from(drm_file);

	if (pdd->drm_file)
		return -EBUSY;
	if (!file || file->dev != pdd->dev)
		return -EINVAL;
	if (cmpxchg(&file->vm.process, NULL, pdd->process))
		return -EINVAL;
	pdd->vm = &file->vm;
	pdd->drm_file = drm_file;
	return 0;
}

/* No descriptor is open any more, but programs that once had one may live. */
void sg_processes_exit(void)
{
	struct sg_process *p;

	mutex_lock(&sg_processes_lock);
	while ((p = list_first_entry_or_null(&sg_processes, struct sg_process, link))) {
		list_del_init(&p->link);
		mutex_unlock(&sg_processes_lock);
		sg_process_end(p);
		mutex_lock(&sg_processes_lock);
	}
	mutex_unlock(&sg_processes_lock);
	mmu_notifier_synchronize();
	destroy_workqueue(sg_process_wq);
}
