// SPDX-License-Identifier: GPL-2.0 OR MIT
/* The numbers of the supported chips, as their drivers report them. */
#include <linux/string.h>

#include "chip.h"

/* Doorbells of 8 bytes, 4 watch points, memory exceptions are reported. */
#define SG_CAP_USUAL	(2 << 12 | 0x80 | 2 << 8)
#define SG_CAP_SVM	(SG_HAS_SVM ? 0x08000000 : 0)

/*
 * Sizes of the context save area, for one XCC, in pages. It has the control
 * stack of all waves (8 bytes each and a header of 48, 12 on gfx11), then
 * registers and LDS of all CUs (0x95000 bytes each, 0x75000 on gfx11).
 */
static const struct sg_chip sg_chips[] = {
	{
		.name = "90a", .marketing = "AMD Instinct MI210", .codename = "aldebaran",
		.gfx_target = 90010, .gc_version = 0x090402, .sdma_version = 0x040400,
		.family = AMDGPU_FAMILY_AI, .device_id = 0x740f,
		.capability = SG_CAP_USUAL | SG_CAP_SVM,
		.simd_count = 416, .simd_per_cu = 4, .cu_per_array = 16, .arrays = 8, .engines = 8,
		.waves_per_simd = 8, .lds_kib = 64, .wave_size = 64, .scratch_slots = 32, .xccs = 1,
		.sdma_engines = 2, .sdma_xgmi_engines = 3, .sdma_queues_per_engine = 8,
		.cp_queues = 24, .gws = 64,
		.engine_clock_mhz = 1700, .memory_clock_mhz = 1600, .memory_width = 4096,
		.cwsr_size = 63508480, .ctl_stack_size = 36864, .eop_size = 4096, .debug_size = 131072,
		.mqd_size = 2048, .fw_version = 78, .sdma_fw_version = 8, .sdma_copy_max = 1 << 30, .xnack = true,
	},
	{
		.name = "942", .marketing = "AMD Instinct MI300X", .codename = "ip discovery",
		.gfx_target = 90402, .gc_version = 0x090403, .sdma_version = 0x040402,
		.family = AMDGPU_FAMILY_AI, .device_id = 0x74a1,
		.capability = SG_CAP_USUAL | SG_CAP_SVM,
		.simd_count = 1216, .simd_per_cu = 4, .cu_per_array = 10, .arrays = 32, .engines = 32,
		.waves_per_simd = 8, .lds_kib = 64, .wave_size = 64, .scratch_slots = 32, .xccs = 8,
		.sdma_engines = 2, .sdma_xgmi_engines = 14, .sdma_queues_per_engine = 8,
		.cp_queues = 24, .gws = 64,
		.engine_clock_mhz = 2100, .memory_clock_mhz = 1300, .memory_width = 8192,
		.cwsr_size = 23203840, .ctl_stack_size = 12288, .eop_size = 4096, .debug_size = 48640,
		.mqd_size = 2048, .fw_version = 177, .sdma_fw_version = 23, .sdma_copy_max = 1 << 30, .xnack = true,
	},
	{
		.name = "1100", .marketing = "AMD Radeon RX 7900 XTX", .codename = "ip discovery",
		.gfx_target = 110000, .gc_version = 0x0b0000, .sdma_version = 0x060000,
		.family = AMDGPU_FAMILY_GC_11_0_0, .device_id = 0x744c,
		.capability = SG_CAP_USUAL | SG_CAP_SVM,
		.simd_count = 192, .simd_per_cu = 2, .cu_per_array = 8, .arrays = 12, .engines = 6,
		.waves_per_simd = 16, .lds_kib = 64, .wave_size = 32, .scratch_slots = 32, .xccs = 1,
		.sdma_engines = 2, .sdma_xgmi_engines = 0, .sdma_queues_per_engine = 6,
		.cp_queues = 8, .gws = 64,
		.engine_clock_mhz = 2482, .memory_clock_mhz = 1249, .memory_width = 384,
		.cwsr_size = 46047232, .ctl_stack_size = 40960, .eop_size = 4096, .debug_size = 98304,
		.mqd_size = 2048, .fw_version = 550, .sdma_fw_version = 19, .sdma_copy_max = 1 << 30, .mes = true,
	},
};

const struct sg_chip *sg_chip_find(const char *name)
{
	size_t i;

	for (i = 0; i < ARRAY_SIZE(sg_chips); i++)
		if (!strcmp(sg_chips[i].name, name))
			return &sg_chips[i];
	return NULL;
}

const struct sg_chip *sg_chip_partition(const struct sg_chip *chip, u32 xccs)
{
	static struct sg_chip partition;
	u32 parts = chip->xccs / xccs;

	partition = *chip;
	partition.xccs = xccs;
	partition.simd_count /= parts;
	partition.arrays /= parts;
	partition.engines /= parts;
	/* Without partitions KFD calls the first two copy engines PCIe's, and the others XGMI's. */
	partition.sdma_xgmi_engines = (chip->sdma_engines + chip->sdma_xgmi_engines) / parts - partition.sdma_engines;
	return &partition;
}
