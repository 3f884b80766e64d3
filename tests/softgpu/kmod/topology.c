// SPDX-License-Identifier: GPL-2.0 OR MIT
/* /sys/class/kfd/kfd/topology: what libhsakmt and CRIU's plugin read. */
#include <drm/drm_device.h>
#include <linux/cpumask.h>
#include <linux/device.h>
#include <linux/kernel.h>
#include <linux/mm.h>
#include <linux/module.h>

#include "chip.h"
#include "sysfs_dir.h"
#include "topology.h"

#define SG_LINK_PCIE		2
#define SG_LINK_XGMI		11
#define SG_LINK_ENABLED		1
#define SG_HEAP_SYSTEM		0
#define SG_HEAP_VRAM_VISIBLE	1
#define SG_HEAP_VRAM_PRIVATE	2
#define SG_HIVE			0x5067c0de00000001ULL

static struct sg_dir *sg_topology;
static struct sg_dir *sg_driver;

struct sg_link {
	unsigned int type, from, to, weight, bandwidth_mbps;
};

static int sg_link_add(struct sg_dir *links, unsigned int number, const struct sg_link *link)
{
	char name[12];
	struct sg_dir *dir;

	snprintf(name, sizeof(name), "%u", number);
	dir = sg_dir_add(links, NULL, name);
	if (IS_ERR(dir))
		return PTR_ERR(dir);
	return sg_dir_file(dir, "properties",
			   "type %u\nversion_major 0\nversion_minor 0\nnode_from %u\nnode_to %u\nweight %u\n"
			   "min_latency 0\nmax_latency 0\nmin_bandwidth %u\nmax_bandwidth %u\n"
			   "recommended_transfer_size 0\nrecommended_sdma_engine_id_mask 0\nflags %u\n",
			   link->type, link->from, link->to, link->weight, link->bandwidth_mbps,
			   link->bandwidth_mbps, SG_LINK_ENABLED);
}

static unsigned int sg_link_count(unsigned int node)
{
	if (!node)
		return sg_device_count;
	return sg_params.xgmi ? sg_device_count : 1;
}

/* The CPU has a link to every GPU; GPUs have one to the CPU, and with XGMI to each other. */
static int sg_links_add(struct sg_dir *node_dir, unsigned int node)
{
	struct sg_dir *dir = sg_dir_add(node_dir, NULL, "io_links");
	unsigned int to, number = 0;
	int err = 0;

	if (IS_ERR(dir))
		return PTR_ERR(dir);
	for (to = 0; to <= sg_device_count && !err; to++) {
		struct sg_link link = { SG_LINK_PCIE, node, to, 20, 32000 };

		if (to == node || (node && to && !sg_params.xgmi))
			continue;
		if (node && to) {
			link.type = SG_LINK_XGMI;
			link.weight = 15;
			link.bandwidth_mbps = 50000;
		}
		err = sg_link_add(dir, number++, &link);
	}
	return err;
}

static int sg_bank_add(struct sg_dir *node_dir, unsigned int heap, u64 size, unsigned int width,
		       unsigned int clock)
{
	struct sg_dir *dir = sg_dir_add(node_dir, NULL, "mem_banks");

	if (IS_ERR(dir))
		return PTR_ERR(dir);
	dir = sg_dir_add(dir, NULL, "0");
	if (IS_ERR(dir))
		return PTR_ERR(dir);
	return sg_dir_file(dir, "properties", "heap_type %u\nsize_in_bytes %llu\nflags 0\nwidth %u\nmem_clk_max %u\n",
			   heap, size, width, clock);
}

static int sg_cache_add(struct sg_dir *caches, const char *name, unsigned int level, unsigned int kib,
			unsigned int line)
{
	struct sg_dir *dir = sg_dir_add(caches, NULL, name);

	if (IS_ERR(dir))
		return PTR_ERR(dir);
	/* Type 9: data, of a compute unit. */
	return sg_dir_file(dir, "properties",
			   "processor_id_low 2147487744\nlevel %u\nsize %u\ncache_line_size %u\n"
			   "cache_lines_per_tag 1\nassociation 16\nlatency 1\ntype 9\nsibling_map 1,0,0,0,0,0,0,0\n",
			   level, kib, line);
}

static int sg_caches_add(struct sg_dir *node_dir)
{
	struct sg_dir *dir = sg_dir_add(node_dir, NULL, "caches");
	int err;

	if (IS_ERR(dir))
		return PTR_ERR(dir);
	err = sg_cache_add(dir, "0", 1, 16, 64);
	return err ?: sg_cache_add(dir, "1", 2, 8192, 128);
}

static int sg_empty_add(struct sg_dir *node_dir, const char *name)
{
	return PTR_ERR_OR_ZERO(sg_dir_add(node_dir, NULL, name));
}

static struct sg_dir *sg_node_add(struct sg_dir *nodes, unsigned int node)
{
	char name[12];

	snprintf(name, sizeof(name), "%u", node);
	return sg_dir_add(nodes, NULL, name);
}

/* Up to max_engine_clk_ccompute both kinds of nodes have the same keys. */
static int sg_cpu_node(struct sg_dir *nodes)
{
	struct sg_dir *dir = sg_node_add(nodes, 0);
	int err;

	if (IS_ERR(dir))
		return PTR_ERR(dir);
	err = sg_dir_file(dir, "gpu_id", "0\n");
	err = err ?: sg_dir_file(dir, "name", "\n");
	err = err ?: sg_dir_file(dir, "properties",
		"cpu_cores_count %u\nsimd_count 0\nmem_banks_count 1\ncaches_count 0\nio_links_count %u\n"
		"p2p_links_count 0\ncpu_core_id_base 0\nsimd_id_base 0\nmax_waves_per_simd 0\nlds_size_in_kb 0\n"
		"gds_size_in_kb 0\nnum_gws 0\nwave_front_size 0\narray_count 0\nsimd_arrays_per_engine 0\n"
		"cu_per_simd_array 0\nsimd_per_cu 0\nmax_slots_scratch_cu 0\ngfx_target_version 0\nvendor_id 0\n"
		"device_id 0\nlocation_id 0\ndomain 0\ndrm_render_minor 0\nhive_id 0\nnum_sdma_engines 0\n"
		"num_sdma_xgmi_engines 0\nnum_sdma_queues_per_engine 0\nnum_cp_queues 0\ncwsr_size 0\n"
		"ctl_stack_size 0\nmax_engine_clk_ccompute 0\n",
		num_online_cpus(), sg_link_count(0));
	err = err ?: sg_bank_add(dir, SG_HEAP_SYSTEM, (u64)totalram_pages() << PAGE_SHIFT, 64, 0);
	err = err ?: sg_empty_add(dir, "caches");
	err = err ?: sg_links_add(dir, 0);
	return err ?: sg_empty_add(dir, "p2p_links");
}

#if SG_MODERN
#define SG_CAPABILITY2	"capability2 0\n"
#else
#define SG_CAPABILITY2	""
#endif

static int sg_gpu_properties(struct sg_dir *dir, struct sg_device *dev)
{
	const struct sg_chip *chip = dev->chip;

	return sg_dir_file(dir, "properties",
		"cpu_cores_count 0\nsimd_count %u\nmem_banks_count 1\ncaches_count 2\nio_links_count %u\n"
		"p2p_links_count 0\ncpu_core_id_base 0\nsimd_id_base 2147487744\nmax_waves_per_simd %u\n"
		"lds_size_in_kb %u\ngds_size_in_kb 0\nnum_gws %u\nwave_front_size %u\narray_count %u\n"
		"simd_arrays_per_engine %u\ncu_per_simd_array %u\nsimd_per_cu %u\nmax_slots_scratch_cu %u\n"
		"gfx_target_version %u\nvendor_id 4098\ndevice_id %u\nlocation_id %u\ndomain 0\n"
		"drm_render_minor %u\nhive_id %llu\nnum_sdma_engines %u\nnum_sdma_xgmi_engines %u\n"
		"num_sdma_queues_per_engine %u\nnum_cp_queues %u\ncwsr_size %u\nctl_stack_size %u\n"
		"max_engine_clk_fcompute %u\nlocal_mem_size 0\nfw_version %u\ncapability %u\n"
		SG_CAPABILITY2
		"debug_prop 1495\nsdma_fw_version %u\nunique_id %llu\nnum_xcc %u\nmax_engine_clk_ccompute 0\n",
		chip->simd_count, sg_link_count(dev->index + 1), chip->waves_per_simd, chip->lds_kib, chip->gws,
		chip->wave_size, chip->arrays, chip->arrays / chip->engines, chip->cu_per_array, chip->simd_per_cu,
		chip->scratch_slots, chip->gfx_target, chip->device_id, (dev->index + 1) << 8,
		dev->drm.render->index, sg_params.xgmi ? SG_HIVE : 0, chip->sdma_engines, chip->sdma_xgmi_engines,
		chip->sdma_queues_per_engine, chip->cp_queues, chip->cwsr_size, chip->ctl_stack_size,
		chip->engine_clock_mhz, chip->fw_version, chip->capability, chip->sdma_fw_version, dev->unique_id,
		chip->xccs);
}

static int sg_gpu_node(struct sg_dir *nodes, struct sg_device *dev)
{
	struct sg_dir *dir = sg_node_add(nodes, dev->index + 1);
	unsigned int heap = sg_params.small_bar ? SG_HEAP_VRAM_PRIVATE : SG_HEAP_VRAM_VISIBLE;
	int err;

	if (IS_ERR(dir))
		return PTR_ERR(dir);
	dir->dev = dev;
	err = sg_dir_file(dir, "gpu_id", "%u\n", dev->gpu_id);
	err = err ?: sg_dir_file(dir, "name", "%s\n", dev->chip->codename);
	err = err ?: sg_gpu_properties(dir, dev);
	err = err ?: sg_bank_add(dir, heap, dev->vram_bytes, dev->chip->memory_width, dev->chip->memory_clock_mhz);
	err = err ?: sg_caches_add(dir);
	err = err ?: sg_links_add(dir, dev->index + 1);
	return err ?: sg_empty_add(dir, "p2p_links");
}

static int sg_nodes_add(struct sg_dir *topology)
{
	struct sg_dir *nodes = sg_dir_add(topology, NULL, "nodes");
	unsigned int i;
	int err;

	if (IS_ERR(nodes))
		return PTR_ERR(nodes);
	err = sg_cpu_node(nodes);
	for (i = 0; i < sg_device_count && !err; i++)
		err = sg_gpu_node(nodes, sg_devices[i]);
	return err;
}

/* Tools read /sys/module to see whether the driver is loaded. */
static void sg_driver_add(void)
{
	struct kset *modules = THIS_MODULE->mkobj.kobj.kset;
	struct kobject *real = kset_find_obj(modules, "amdgpu");

	if (real) {
		kobject_put(real);
		return;
	}
	sg_driver = sg_dir_add(NULL, &modules->kobj, "amdgpu");
	if (!IS_ERR(sg_driver))
		sg_dir_file(sg_driver, "initstate", "live\n");
}

int sg_topology_init(struct device *kfd)
{
	int err;

	sg_topology = sg_dir_add(NULL, &kfd->kobj, "topology");
	if (IS_ERR(sg_topology))
		return PTR_ERR(sg_topology);
	err = sg_dir_file(sg_topology, "generation_id", "1\n");
	err = err ?: sg_dir_file(sg_topology, "system_properties",
				 "platform_oem 0\nplatform_id 0\nplatform_rev 0\n");
	err = err ?: sg_nodes_add(sg_topology);
	if (err)
		sg_dir_remove(sg_topology);
	else
		sg_driver_add();
	return err;
}

void sg_topology_exit(void)
{
	sg_dir_remove(sg_driver);
	sg_dir_remove(sg_topology);
}
