// SPDX-License-Identifier: GPL-2.0 OR MIT
/* The module: parameters, and the order of initialisation. */
#include <linux/module.h>

#include "chardev.h"
#include "chip.h"
#include "device.h"
#include "process.h"
#include "topology.h"

struct sg_params sg_params = {
	.gpus = 1,
	.vram_mib = 4096,
	.sdma_rings = 2,
	.strict = true,
};

static char *gfx = "90a";
static char *fresh = "zero";
static unsigned int xccs;

module_param_named(gpus, sg_params.gpus, uint, 0444);
MODULE_PARM_DESC(gpus, "number of GPUs, 1 to 16");
module_param_named(vram_mib, sg_params.vram_mib, uint, 0444);
MODULE_PARM_DESC(vram_mib, "VRAM of each GPU; host memory is allocated at the first write");
module_param(gfx, charp, 0444);
MODULE_PARM_DESC(gfx, "chip: 90a, 942 or 1100");
module_param(xccs, uint, 0444);
MODULE_PARM_DESC(xccs, "XCCs of each GPU, 0: all of the chip's (942 has 8; 1 is CPX mode)");
module_param_named(xgmi, sg_params.xgmi, bool, 0444);
MODULE_PARM_DESC(xgmi, "GPUs are linked by XGMI instead of PCIe");
module_param_named(small_bar, sg_params.small_bar, bool, 0444);
MODULE_PARM_DESC(small_bar, "the CPU sees 256 MiB of VRAM only");
module_param_named(xnack, sg_params.xnack, bool, 0444);
MODULE_PARM_DESC(xnack, "processes start with retry faults, where the chip has them");
module_param(fresh, charp, 0444);
MODULE_PARM_DESC(fresh, "VRAM that was never written: poison or zero");
module_param_named(copy_mbps, sg_params.copy_mbps, uint, 0444);
MODULE_PARM_DESC(copy_mbps, "bandwidth of an SDMA ring in MB/s, 0: what the CPU can do");
module_param_named(copy_latency_us, sg_params.copy_latency_us, uint, 0444);
MODULE_PARM_DESC(copy_latency_us, "latency of a submission to an SDMA ring");
module_param_named(sdma_rings, sg_params.sdma_rings, uint, 0444);
MODULE_PARM_DESC(sdma_rings, "SDMA rings of a render node, 0 to 8");
module_param_named(seed, sg_params.seed, uint, 0444);
MODULE_PARM_DESC(seed, "what gpu ids are made of");
module_param_named(reverse, sg_params.reverse, bool, 0444);
MODULE_PARM_DESC(reverse, "the same gpu ids, in the other order of nodes and render nodes");
module_param_named(strict, sg_params.strict, bool, 0444);
MODULE_PARM_DESC(strict, "queue buffers must be exactly mapped BOs, as newer kernels demand");

static const struct sg_chip *sg_check_params(void)
{
	const struct sg_chip *chip = sg_chip_find(gfx);

	if (!chip)
		pr_err("softgpu: gfx=%s: expected 90a, 942 or 1100\n", gfx);
	else if (xccs && chip->xccs % xccs)
		pr_err("softgpu: xccs=%u: expected a part of the chip's %u\n", xccs, chip->xccs);
	else if (!sg_params.gpus || sg_params.gpus > SG_MAX_GPUS)
		pr_err("softgpu: gpus=%u: expected 1 to %u\n", sg_params.gpus, SG_MAX_GPUS);
	else if (!sg_params.vram_mib || sg_params.vram_mib > 1 << 20)
		pr_err("softgpu: vram_mib=%u: expected 1 to %u\n", sg_params.vram_mib, 1 << 20);
	else if (strcmp(fresh, "poison") && strcmp(fresh, "zero"))
		pr_err("softgpu: fresh=%s: expected poison or zero\n", fresh);
	else if (sg_params.sdma_rings > 8)
		pr_err("softgpu: sdma_rings=%u: expected 0 to 8\n", sg_params.sdma_rings);
	else
		return sg_chip_partition(chip, xccs ?: chip->xccs);
	return NULL;
}

static int __init sg_init(void)
{
	const struct sg_chip *chip = sg_check_params();
	int err;

	if (!chip)
		return -EINVAL;
	sg_params.fresh_poison = !strcmp(fresh, "poison");
	sg_judge_init();
	err = sg_processes_init();
	if (err)
		goto judge;
	err = sg_devices_create(chip);
	if (err)
		goto processes;
	err = sg_chardev_init();
	if (err)
		goto devices;
	err = sg_topology_init(sg_chardev_device());
	if (err)
		goto chardev;
	return 0;
chardev:
	sg_chardev_exit();
devices:
	sg_devices_destroy();
processes:
	sg_processes_exit();
judge:
	sg_judge_exit();
	return err;
}

static void __exit sg_exit(void)
{
	sg_topology_exit();
	sg_chardev_exit();
	sg_processes_exit();
	sg_devices_destroy();
	sg_judge_exit();
}

module_init(sg_init);
module_exit(sg_exit);
MODULE_DESCRIPTION("AMD GPUs in software: KFD, render nodes, SDMA, and a judge of their use");
MODULE_LICENSE("Dual MIT/GPL");
