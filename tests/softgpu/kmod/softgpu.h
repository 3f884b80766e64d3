/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * The software GPU: declarations that its parts share.
 *
 * Order of locks, outermost first. Locks that an MMU notifier may take are
 * marked N: a holder may not wait for reclaim (GFP_KERNEL), for the mmap lock,
 * or for user space.
 *
 *	sg_processes_lock	the list of processes
 *	p->lock			ioctls, handles, CRIU state
 *	p->events.lock		creation and destruction of events
 *	p->mem_lock		allocations of all GPUs, revalidation of host pages
 *	p->svm.lock		SVM ranges and their attributes
 *	dma_resv of BOs		by DRM core
 *	mmap lock		of the process
 *	N p->notify_lock	evicted_bos, invalid counts, blocked notifications
 *	N p->queue_lock		queue lists, eviction counts
 *	N run lock of a queue	one slice of its work
 *	N vm->lock > svm.tree_lock > host->lock; bo->lock; events' state: spinlocks
 *
 * The GPU's work runs in slices under a run lock, which look pages up with
 * sg_vm_page() and put them before the slice ends. Unmapping waits for
 * referenced pages: after an unmap returns, no GPU accesses them.
 */
#ifndef SOFTGPU_H
#define SOFTGPU_H

#include <drm/drm_device.h>
#include <drm/drm_file.h>
#include <drm/drm_gem.h>
#include <linux/idr.h>
#include <linux/interval_tree.h>
#include <linux/kobject.h>
#include <linux/mmu_notifier.h>
#include <linux/mutex.h>
#include <linux/refcount.h>
#include <linux/spinlock.h>
#include <linux/types.h>
#include <linux/version.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>
#include <uapi/drm/amdgpu_drm.h>
#include <uapi/linux/kfd_ioctl.h>

#include "event.h"
#include "judge.h"

#define SG_MAX_GPUS		16
#define SG_DOORBELL_BYTES	SZ_8K	/* of one process on one GPU: 1024 of 8 bytes */
#define SG_POISON		0xb5	/* every byte of fresh VRAM with fresh=poison */

/* Kernels from 7.x on have multi-XCC queue images and newer calls (KFD ABI 1.23). */
#define SG_MODERN		(LINUX_VERSION_CODE >= KERNEL_VERSION(7, 0, 0))
/* As in the running kernel: Debian's 6.12 has no SVM and with it no choice of XNACK. */
#define SG_HAS_SVM		IS_ENABLED(CONFIG_HSA_AMD_SVM)

struct sg_exec_device;		/* exec's: rings of a GPU */
struct sg_exec_file;		/* exec's: contexts and BO lists of a DRM file */
struct sg_queues;		/* exec's: user queues of a process */
struct sg_process;

/* ---- parameters and the numbers of a chip ---- */

struct sg_params {
	unsigned int gpus;
	unsigned int vram_mib;
	bool xgmi;
	bool small_bar;
	bool xnack;
	bool fresh_poison;
	unsigned int copy_mbps;		/* 0: as fast as the CPU is */
	unsigned int copy_latency_us;
	unsigned int sdma_rings;	/* kernel rings, what HW_IP_INFO reports */
	unsigned int seed;
	bool reverse;			/* gpu ids in the other order */
	bool strict;
};

extern struct sg_params sg_params;

struct sg_chip {
	const char *name;		/* "90a": the parameter's value */
	const char *marketing;
	const char *codename;		/* `name` in the topology */
	u32 gfx_target;			/* 90010 */
	u32 gc_version;			/* IP_VERSION(9, 4, 2) as 0x090402 */
	u32 sdma_version;		/* 0x040400 */
	u32 family;			/* AMDGPU_FAMILY_* */
	u32 device_id;
	u32 capability;
	u32 simd_count, simd_per_cu, cu_per_array, arrays, engines;
	u32 waves_per_simd, lds_kib, wave_size, scratch_slots;
	u32 xccs;
	u32 sdma_engines, sdma_xgmi_engines, sdma_queues_per_engine;
	u32 cp_queues, gws;
	u32 engine_clock_mhz, memory_clock_mhz, memory_width;
	u32 cwsr_size, ctl_stack_size, eop_size, debug_size;	/* that a compute queue must have, for one XCC */
	u32 mqd_size;			/* of one XCC */
	u32 fw_version, sdma_fw_version;
	u32 sdma_copy_max;		/* bytes of one linear copy */
	bool xnack;			/* has retry faults, per process */
	bool mes;			/* queues are scheduled by MES: no CRIU of queues */
};

/* ---- devices ---- */

struct sg_device {
	struct drm_device drm;
	unsigned int index;		/* 0.. : order of nodes */
	u32 gpu_id;			/* KFD's */
	const struct sg_chip *chip;
	u64 vram_bytes, visible_bytes;	/* visible: through the BAR */
	u64 gtt_bytes;
	atomic64_t vram_used, visible_used, gtt_used;
	u64 unique_id;
	struct page *mmio;		/* what MMIO_REMAP maps */
	struct page *sink;		/* where writes to PRT mappings go */
	struct device *parent;
	struct sg_exec_device *exec;
};

extern struct sg_device *sg_devices[SG_MAX_GPUS];
extern unsigned int sg_device_count;

static inline struct sg_device *sg_device_of(struct drm_device *drm)
{
	return container_of(drm, struct sg_device, drm);
}

struct sg_device *sg_device_by_id(u32 gpu_id);

/* ---- host memory of a process: userptr BOs and SVM ranges ---- */

/*
 * Pages of a range of the process' address space. References to pages are held
 * only while the range is valid: a notification drops them, so that migration
 * and reclaim work as with the real driver, which does not pin.
 */
struct sg_host {
	struct mmu_interval_notifier notifier;
	void *owner;			/* notified: a BO, an allocation, an SVM range */
	struct mm_struct *mm;
	unsigned long start, npages;
	bool readonly;
	bool registered;		/* notifications come */
	spinlock_t lock;		/* N */
	struct page **pages;		/* of `npages`; filled in while valid or stale */
	bool valid;
	bool stale;			/* notified, but its GPU's queues were not stopped */
	unsigned int spans;		/* pages that a slice references */
	wait_queue_head_t idle;
};

/* ---- buffer objects ---- */

enum sg_store {
	SG_STORE_OWN,			/* pages of our own, allocated on first write */
	SG_STORE_HOST,			/* userptr */
	SG_STORE_ALIAS,			/* imported from another software GPU */
	SG_STORE_FOREIGN,		/* imported from another driver */
	SG_STORE_FIXED,			/* doorbells, MMIO: pages of the device */
};

/* One page of a BO that has a state of its own. */
struct sg_bo_page {
	struct page *page;
	/*
	 * Dwords that were not restored yet, one bit each; NULL: the page's
	 * bit in bo->missing says it for all.
	 */
	unsigned long *dwords;
};

#define SG_PAGE_DWORDS	(PAGE_SIZE / sizeof(u32))

struct sg_bo {
	struct drm_gem_object base;
	struct sg_device *dev;
	enum sg_store store;
	u32 domain;			/* AMDGPU_GEM_DOMAIN_* */
	u32 preferred;			/* all domains that it was made with */
	u64 flags;			/* AMDGPU_GEM_CREATE_* */
	u64 alignment;
	struct mutex metadata_lock;
	u64 tiling, metadata_flags;	/* GEM_METADATA */
	u32 metadata_size;
	u8 metadata[256];
	bool kfd;			/* made by KFD */
	atomic_t allocations;		/* of KFD processes that have it; aliases' count here */
	atomic_t exports;		/* dma-bufs of it; aliases' count here */
	pid_t pid;			/* of the process that made it, for the judge */
	atomic_t queues;		/* that have it as a buffer: KFD does not unmap it then */

	spinlock_t lock;		/* N */
	struct xarray pages;		/* struct sg_bo_page, by index; under `lock` */
	unsigned long *missing;		/* one bit a page: between RESTORE and its load; NULL: no page */

	struct sg_host *host;		/* SG_STORE_HOST */
	struct sg_bo *origin;		/* SG_STORE_ALIAS: whose pages these are */
	struct dma_buf *foreign;	/* SG_STORE_FOREIGN */
	void *vmap;			/* its memory */
	struct page *fixed;		/* SG_STORE_FIXED: the first, the others follow */
};

static inline struct sg_bo *sg_bo_of(struct drm_gem_object *obj)
{
	return container_of(obj, struct sg_bo, base);
}

static inline u64 sg_bo_npages(const struct sg_bo *bo)
{
	return bo->base.size >> PAGE_SHIFT;
}

static inline void sg_bo_get(struct sg_bo *bo)
{
	drm_gem_object_get(&bo->base);
}

static inline void sg_bo_put(struct sg_bo *bo)
{
	drm_gem_object_put(&bo->base);
}

/* The byte that never written memory holds. */
u8 sg_bo_fresh(const struct sg_bo *bo);

/*
 * A reference to a page of a BO. `page` is NULL where nothing was ever written
 * and no allocation was requested: it reads as sg_bo_fresh().
 */
struct sg_page_ref {
	struct page *page;
	struct sg_bo *bo;		/* that has the page (never an alias); NULL: an SVM range's */
	unsigned long index;		/* of the page in `bo` */
	bool stale;			/* a host page that the process has unmapped */
	struct sg_host *host;		/* released by sg_page_put() */
	struct sg_mapping *mapping;	/* likewise */
};

/*
 * The page with that index; `alloc`: allocate it if it is missing. Errors:
 * -EFAULT host page that is not valid, -EAGAIN no memory with these `gfp`
 * flags. The caller keeps the BO alive. Release with sg_page_put().
 */
int sg_bo_page(struct sg_bo *bo, unsigned long index, bool alloc, gfp_t gfp, struct sg_page_ref *ref);
void sg_page_put(struct sg_page_ref *ref);

/*
 * What the judge needs to know of missing memory. Bytes `at`..`at + len` of one
 * page. A dword counts as restored when it was written as a whole.
 */
bool sg_page_missing(const struct sg_page_ref *ref, size_t at, size_t len);
void sg_page_written(struct sg_page_ref *ref, size_t at, size_t len);
/* The harness: these pages are zero by intent. */
void sg_bo_declare(struct sg_bo *bo, u64 offset, u64 len);

/* For the kernel's own use of a BO's first `npages` pages: event page, fences. NULL: no memory. */
void *sg_bo_kmap(struct sg_bo *bo, unsigned long npages);
void sg_bo_kunmap(struct sg_bo *bo, void *at);

struct sg_bo *sg_bo_create(struct sg_device *dev, u64 size, u64 alignment, u32 domain, u64 flags);
/* From RESTORE: all of its pages are missing. */
int sg_bo_mark_missing(struct sg_bo *bo);

/* ---- GPU page tables: one for every DRM file ---- */

#define SG_MAP_READ	AMDGPU_VM_PAGE_READABLE
#define SG_MAP_WRITE	AMDGPU_VM_PAGE_WRITEABLE
#define SG_MAP_EXEC	AMDGPU_VM_PAGE_EXECUTABLE
#define SG_MAP_PRT	AMDGPU_VM_PAGE_PRT

struct sg_mapping {
	struct interval_tree_node node;	/* pages: start and last address >> 12 */
	struct sg_vm *vm;
	struct sg_bo *bo;		/* NULL: PRT */
	u64 offset;			/* bytes into the BO */
	u32 flags;
	bool gem;			/* made by GEM_VA: goes with the handle */
	bool gone;			/* removed; waits for its users */
	unsigned int users;
};

struct sg_vm {
	struct sg_device *dev;
	struct mutex change;		/* mapping and unmapping; inside of p->mem_lock and dma_resv */
	spinlock_t lock;		/* N; the tree and its users */
	struct rb_root_cached tree;
	wait_queue_head_t unused;	/* a removed mapping has no users left */
	struct sg_process *process;	/* the owner of this compute VM; NULL: graphics */
};

/*
 * The page behind a GPU address, for reading or writing; usable inside of a
 * slice with gfp = GFP_NOWAIT | __GFP_NOWARN. A page for writing is allocated.
 *  0		ref is filled in; give back with sg_page_put()
 *  -EFAULT	not mapped, not permitted, or a host page that is missing
 *  -EAGAIN	not now: memory would have to be reclaimed, or host pages are being
 *		looked up again
 * A compute VM's SVM ranges are looked up as well. On -EFAULT of a compute VM
 * the caller leaves the slice and asks sg_svm_fault().
 */
int sg_vm_page(struct sg_vm *vm, u64 va, bool write, gfp_t gfp, struct sg_page_ref *ref);
/* Reserves memory for a page of this address: outside of slices, may sleep. */
int sg_vm_populate(struct sg_vm *vm, u64 va);
/* Is all of [va, va + size) one BO's, at this start? For queue rings. NULL: no. */
struct sg_bo *sg_vm_lookup_bo(struct sg_vm *vm, u64 va, u64 size);
/* Does any mapping hold va? */
bool sg_vm_mapped(struct sg_vm *vm, u64 va);

void sg_vm_init(struct sg_vm *vm, struct sg_device *dev);
void sg_vm_fini(struct sg_vm *vm);
int sg_vm_map(struct sg_vm *vm, struct sg_bo *bo, u64 va, u64 offset, u64 size, u32 flags,
	      struct sg_mapping **out);
void sg_vm_unmap(struct sg_mapping *mapping);

/* ---- DRM files ---- */

struct sg_file {
	struct drm_file *drm;
	struct sg_device *dev;
	struct sg_vm vm;
	struct sg_exec_file *exec;
};

static inline struct sg_file *sg_file_of(struct drm_file *drm)
{
	return drm->driver_priv;
}

/* ---- KFD processes ---- */

/* One KFD allocation: what an idr handle of a GPU names. */
struct sg_mem {
	struct sg_bo *bo;
	struct sg_pdd *pdd;		/* of the GPU that it was allocated on */
	int handle;
	u64 va, size;
	u32 alloc_flags;		/* KFD_IOC_ALLOC_MEM_FLAGS_* */
	bool imported;
	/* By GPU index; the second is the same memory again, behind the first (AQL_QUEUE_MEM). */
	struct sg_mapping *maps[SG_MAX_GPUS][2];
	struct dma_buf *dmabuf;		/* exported as or imported from; NULL: neither yet */
	/* userptr */
	u64 user_addr;
	u32 invalid;			/* N notify_lock: notifications since it was valid */
	struct list_head host_link;	/* p->hosts */
};

/* A GPU as one process sees it. */
struct sg_pdd {
	struct sg_process *process;
	struct sg_device *dev;
	u32 user_gpu_id;		/* as the process knows it */
	struct file *drm_file;		/* keeps vm; NULL before ACQUIRE_VM */
	struct sg_vm *vm;
	struct idr handles;		/* struct sg_mem; under p->lock */
	struct page *doorbell_page;	/* SG_DOORBELL_BYTES; NULL before first use */
	u64 *doorbells;
	unsigned int evicted;		/* under p->queue_lock: runs at 0 */
	u64 evicted_at, evicted_ns;	/* for stats_<gpu>/evicted_ms */
	atomic64_t vram;		/* bytes, for sysfs */
	struct kobject *stats;
	struct kobj_attribute vram_attr, evict_attr;
	char vram_name[24];
	u64 tba, tma;			/* SET_TRAP_HANDLER */
	u64 scratch;			/* SET_SCRATCH_BACKING_VA */
};

enum sg_evict_trigger {			/* as in SMI events */
	SG_EVICT_SVM = KFD_QUEUE_EVICTION_TRIGGER_SVM,
	SG_EVICT_USERPTR = KFD_QUEUE_EVICTION_TRIGGER_USERPTR,
	SG_EVICT_TTM = KFD_QUEUE_EVICTION_TRIGGER_TTM,
	SG_EVICT_SUSPEND = KFD_QUEUE_EVICTION_TRIGGER_SUSPEND,
	SG_EVICT_CHECKPOINT = KFD_QUEUE_EVICTION_CRIU_CHECKPOINT,
	SG_EVICT_RESTORE = KFD_QUEUE_EVICTION_CRIU_RESTORE,
};

struct sg_svm {
	struct mutex lock;
	spinlock_t tree_lock;		/* N; tree and page arrays, for lookups by slices */
	struct rb_root_cached tree;	/* struct sg_svm_range */
	struct list_head restored;	/* attributes that RESUME will set */
	atomic_t evicted;		/* ranges that wait for the worker */
	struct delayed_work restore;
};

struct sg_process {
	struct kref ref;
	struct list_head link;		/* sg_processes */
	struct mm_struct *mm;		/* identity only, unless `mn` is alive */
	struct mmu_notifier mn;
	struct task_struct *lead;	/* thread group leader of the opener */
	bool mm_gone;			/* the address space has ended */
	struct mutex lock;
	unsigned int n_pdds;
	struct sg_pdd *pdds[SG_MAX_GPUS];	/* of the GPUs that it may use, in order */
	struct sg_events events;
	struct sg_queues *queues;

	struct mutex mem_lock;
	struct list_head hosts;		/* userptr allocations; under mem_lock and notify_lock */
	struct delayed_work host_restore;

	struct mutex notify_lock;	/* N */
	bool block_notifications;	/* from RESTORE to RESUME */
	unsigned int evicted_bos;
	bool host_evicted;		/* queues are evicted for host pages */
	bool resume_repeated;		/* the damage of a second RESUME was done */

	struct mutex queue_lock;	/* N */

	struct sg_svm svm;
	bool xnack;

	bool queues_paused;		/* by PROCESS_INFO; under lock */
	struct kobject *kobj;		/* sysfs proc/<pid>; NULL: none */
	struct kobject *kobj_queues;
	struct work_struct free_work;
	u64 runtime_debug;		/* RUNTIME_ENABLE: address of the runtime's debug record */
	bool runtime_enabled;
};

struct sg_pdd *sg_pdd_by_user_id(struct sg_process *p, u32 user_gpu_id);

/* NULL: the GPU is hidden from the process. */
static inline struct sg_pdd *sg_pdd_of(struct sg_process *p, struct sg_device *dev)
{
	unsigned int i;

	for (i = 0; i < p->n_pdds; i++)
		if (p->pdds[i]->dev == dev)
			return p->pdds[i];
	return NULL;
}

static inline pid_t sg_process_pid(const struct sg_process *p)
{
	return p->lead->pid;
}

struct sg_process *sg_process_by_mm(struct mm_struct *mm);	/* with a reference */
void sg_process_put(struct sg_process *p);
void sg_process_get(struct sg_process *p);

/* The allocation behind a handle ((gpu_id << 32) | idr); under p->lock. */
struct sg_mem *sg_mem_find(struct sg_process *p, u64 handle);

/*
 * Eviction counts, per GPU. Queues of a GPU stop when its count leaves 0 and
 * start when it is 0 again. Both are safe inside MMU notifiers. Evicting
 * returns when nothing of the process runs.
 */
int sg_process_evict_queues(struct sg_process *p, enum sg_evict_trigger trigger);
int sg_process_restore_queues(struct sg_process *p);
/* One GPU: after a VM fault, as kfd_evict_process_device. */
void sg_pdd_evict_queues(struct sg_pdd *pdd, enum sg_evict_trigger trigger);

/*
 * After sg_vm_page() returned -EFAULT for a compute VM: with XNACK on, looks up
 * the pages of an SVM range now. Sleeps; never inside a slice. 0: try again;
 * otherwise the fault is fatal.
 */
int sg_svm_fault(struct sg_vm *vm, u64 va, bool write);

/* For GEM_USERPTR: looks the pages up (again). Sleeps. -EFAULT: a page is missing. */
int sg_bo_validate(struct sg_bo *bo);

/* ---- declarations of exec for core ---- */

int sg_exec_device_init(struct sg_device *dev);
void sg_exec_device_exit(struct sg_device *dev);
int sg_exec_file_open(struct sg_file *file);
void sg_exec_file_close(struct sg_file *file);	/* jobs end or are killed; nothing runs after */

int sg_queues_init(struct sg_process *p);
void sg_queues_exit(struct sg_process *p);
/* The address space ended: queues are destroyed, waiters woken. Called once, may sleep. */
void sg_queues_kill(struct sg_process *p);
/* Under p->queue_lock, pdd->evicted left 0 or is 0 again. Stopping waits for slices. */
void sg_queues_stop(struct sg_pdd *pdd);
void sg_queues_start(struct sg_pdd *pdd);
/* Does it have a queue? SET_XNACK_MODE refuses then. */
bool sg_queues_any(struct sg_process *p);

int sg_queue_create(struct sg_process *p, struct kfd_ioctl_create_queue_args *args);
int sg_queue_update(struct sg_process *p, struct kfd_ioctl_update_queue_args *args);
int sg_queue_destroy(struct sg_process *p, u32 id);
int sg_queue_set_cu_mask(struct sg_process *p, struct kfd_ioctl_set_cu_mask_args *args);
int sg_queue_wave_state(struct sg_process *p, struct kfd_ioctl_get_queue_wave_state_args *args);
int sg_queue_alloc_gws(struct sg_process *p, struct kfd_ioctl_alloc_queue_gws_args *args);

/* CRIU, all under p->lock with queues evicted. Sizes include the fixed record. */
void sg_queues_criu_info(struct sg_process *p, u32 *count, u64 *bytes);
/* Writes all queue records to user memory at *offset and moves it. */
int sg_queues_criu_dump(struct sg_process *p, u8 __user *priv, u64 *offset);
/* Reads one queue record (type field included) at *offset, of `size` bytes in all, and moves it. */
int sg_queue_criu_restore(struct sg_process *p, u8 __user *priv, u64 *offset, u64 size);

/* SMI events; gpu-wide. exec translates `pid` to the reader's namespace. */
int sg_smi_open(struct sg_process *p, struct kfd_ioctl_smi_events_args *args);
void sg_smi_queue_eviction(struct sg_device *dev, pid_t pid, u32 trigger);
void sg_smi_queue_restore(struct sg_device *dev, pid_t pid);
void sg_smi_queue_restore_rescheduled(struct mm_struct *mm);
void sg_smi_process_end(struct sg_process *p);

/* DRM ioctls */
int sg_ctx_ioctl(struct drm_device *drm, void *data, struct drm_file *file);
int sg_bo_list_ioctl(struct drm_device *drm, void *data, struct drm_file *file);
int sg_cs_ioctl(struct drm_device *drm, void *data, struct drm_file *file);
int sg_wait_cs_ioctl(struct drm_device *drm, void *data, struct drm_file *file);
int sg_wait_fences_ioctl(struct drm_device *drm, void *data, struct drm_file *file);
int sg_fence_to_handle_ioctl(struct drm_device *drm, void *data, struct drm_file *file);

#endif
