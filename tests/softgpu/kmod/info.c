// SPDX-License-Identifier: GPL-2.0 OR MIT
/* AMDGPU_INFO: what libdrm reads when it opens a GPU, and what tools read later. */
#include <drm/drm_device.h>
#include <linux/uaccess.h>

#include "device.h"
#include "gem.h"

#define SG_VA_MAX	((1ULL << 48) - SZ_64K - SZ_2M - SZ_2M)
#define SG_HOLE_START	0x0000800000000000ULL
#define SG_HOLE_END	0xffff800000000000ULL
#define SG_GB_ADDR_CONFIG	0x142a4

static int sg_info_out(const struct drm_amdgpu_info *info, const void *from, size_t size)
{
	return copy_to_user(u64_to_user_ptr(info->return_pointer), from, min_t(size_t, info->return_size, size)) ?
	       -EFAULT : 0;
}

static int sg_info_u32(const struct drm_amdgpu_info *info, u32 value)
{
	return sg_info_out(info, &value, sizeof(value));
}

static int sg_info_u64(const struct drm_amdgpu_info *info, u64 value)
{
	return sg_info_out(info, &value, sizeof(value));
}

static int sg_info_hw_ip(struct sg_device *dev, const struct drm_amdgpu_info *info)
{
	struct drm_amdgpu_info_hw_ip ip = {};
	u32 gc = dev->chip->gc_version, sdma = dev->chip->sdma_version;

	if (info->query_hw_ip.ip_instance >= AMDGPU_HW_IP_INSTANCE_MAX_COUNT)
		return -EINVAL;
	switch (info->query_hw_ip.type) {
	case AMDGPU_HW_IP_GFX:
	case AMDGPU_HW_IP_COMPUTE:
		/* Only SDMA has rings for command submission here. */
		ip.hw_ip_version_major = gc >> 16;
		ip.hw_ip_version_minor = gc >> 8 & 0xff;
		ip.ib_start_alignment = 32;
		ip.ib_size_alignment = 32;
		ip.ip_discovery_version = gc;
		break;
	case AMDGPU_HW_IP_DMA:
		ip.hw_ip_version_major = sdma >> 16;
		ip.hw_ip_version_minor = sdma >> 8 & 0xff;
		ip.ib_start_alignment = 256;
		ip.ib_size_alignment = 4;
		/* However many rings exist, contexts reach two. */
		ip.available_rings = GENMASK(1, 0) & ((1U << sg_params.sdma_rings) - 1);
		ip.ip_discovery_version = sdma;
		break;
	case AMDGPU_HW_IP_VCN_DEC:
		ip.hw_ip_version_major = 2;
		ip.ib_start_alignment = 256;
		ip.ib_size_alignment = 4;
		ip.available_rings = sg_params.sdma_rings ? 1 : 0;
		break;
	case AMDGPU_HW_IP_UVD:
	case AMDGPU_HW_IP_VCE:
	case AMDGPU_HW_IP_UVD_ENC:
	case AMDGPU_HW_IP_VCN_ENC:
	case AMDGPU_HW_IP_VCN_JPEG:
#ifdef AMDGPU_HW_IP_VPE
	case AMDGPU_HW_IP_VPE:
#endif
		break;	/* absent: all zero */
	default:
		return -EINVAL;
	}
	return sg_info_out(info, &ip, sizeof(ip));
}

static int sg_info_hw_ip_count(const struct drm_amdgpu_info *info)
{
	switch (info->query_hw_ip.type) {
	case AMDGPU_HW_IP_GFX:
	case AMDGPU_HW_IP_COMPUTE:
		return sg_info_u32(info, 1);
	case AMDGPU_HW_IP_DMA:
		return sg_info_u32(info, sg_params.sdma_rings);
	default:
		return -EINVAL;
	}
}

static int sg_info_firmware(struct sg_device *dev, const struct drm_amdgpu_info *info)
{
	struct drm_amdgpu_info_firmware fw = {};

	if (info->query_fw.ip_instance)
		return -EINVAL;
	switch (info->query_fw.fw_type) {
	case AMDGPU_INFO_FW_SDMA:
		if (info->query_fw.index >= sg_params.sdma_rings)
			return -EINVAL;
		fw.ver = dev->chip->sdma_fw_version;
		break;
	case AMDGPU_INFO_FW_GFX_MEC:
		if (info->query_fw.index > 1)
			return -EINVAL;
		fw.ver = dev->chip->fw_version;
		break;
	default:
		if (info->query_fw.fw_type < AMDGPU_INFO_FW_VCE || info->query_fw.fw_type > AMDGPU_INFO_FW_IMU)
			return -EINVAL;
	}
	return sg_info_out(info, &fw, sizeof(fw));
}

static int sg_info_memory(struct sg_device *dev, const struct drm_amdgpu_info *info)
{
	u64 vram = atomic64_read(&dev->vram_used), gtt = atomic64_read(&dev->gtt_used);
	u64 visible = atomic64_read(&dev->visible_used);
	struct drm_amdgpu_memory_info memory = {
		.vram = { dev->vram_bytes, dev->vram_bytes, vram, dev->vram_bytes * 3 / 4 },
		.cpu_accessible_vram = { dev->visible_bytes, dev->visible_bytes, visible,
					 dev->visible_bytes * 3 / 4 },
		.gtt = { dev->gtt_bytes, dev->gtt_bytes, gtt, dev->gtt_bytes * 3 / 4 },
	};
	struct drm_amdgpu_info_vram_gtt sizes = {
		.vram_size = dev->vram_bytes,
		.vram_cpu_accessible_size = dev->visible_bytes,
		.gtt_size = dev->gtt_bytes,
	};

	return info->query == AMDGPU_INFO_MEMORY ? sg_info_out(info, &memory, sizeof(memory)) :
						   sg_info_out(info, &sizes, sizeof(sizes));
}

static int sg_info_registers(const struct drm_amdgpu_info *info)
{
	u32 value = info->read_mmr_reg.dword_offset == 0x263e ? SG_GB_ADDR_CONFIG : 0;
	u32 i;

	if (info->read_mmr_reg.count > 128)
		return -EINVAL;
	if ((u64)info->read_mmr_reg.count * sizeof(u32) > info->return_size)
		return -EINVAL;
	for (i = 0; i < info->read_mmr_reg.count; i++)
		if (copy_to_user(u64_to_user_ptr(info->return_pointer + i * sizeof(u32)), &value, sizeof(value)))
			return -EFAULT;
	return 0;
}

static int sg_info_device(struct sg_device *dev, const struct drm_amdgpu_info *info)
{
	const struct sg_chip *chip = dev->chip;
	struct drm_amdgpu_info_device out = {
		.device_id = chip->device_id,
		.family = chip->family,
		.num_shader_engines = chip->engines,
		.num_shader_arrays_per_engine = chip->arrays / chip->engines,
		.gpu_counter_freq = 100000,
		.max_engine_clock = (u64)chip->engine_clock_mhz * 1000,
		.max_memory_clock = (u64)chip->memory_clock_mhz * 1000,
		.cu_active_number = chip->simd_count / chip->simd_per_cu,
		.num_rb_pipes = 8,
		.num_hw_gfx_contexts = 8,
		.virtual_address_offset = SZ_64K,
		.virtual_address_max = SG_HOLE_START,
		.high_va_offset = SG_HOLE_END,
		.high_va_max = SG_HOLE_END | SG_VA_MAX,
		.virtual_address_alignment = PAGE_SIZE,
		.pte_fragment_size = SZ_2M,
		.gart_page_size = PAGE_SIZE,
		.vram_type = AMDGPU_VRAM_TYPE_HBM,
		.vram_bit_width = chip->memory_width,
		.wave_front_size = chip->wave_size,
		.num_shader_visible_vgprs = 256,
		.num_cu_per_sh = chip->cu_per_array,
		.num_tcc_blocks = 32,
	};

	return sg_info_out(info, &out, sizeof(out));
}

static int sg_info_simple(struct sg_device *dev, const struct drm_amdgpu_info *info)
{
	struct drm_amdgpu_info_gds gds = {};

	switch (info->query) {
	case AMDGPU_INFO_ACCEL_WORKING:
		return sg_info_u32(info, 1);
	case AMDGPU_INFO_TIMESTAMP:
		return sg_info_u64(info, sg_device_clock());
	case AMDGPU_INFO_NUM_BYTES_MOVED:
	case AMDGPU_INFO_NUM_EVICTIONS:
	case AMDGPU_INFO_NUM_VRAM_CPU_PAGE_FAULTS:
	case AMDGPU_INFO_RAS_ENABLED_FEATURES:
		return sg_info_u64(info, 0);
	case AMDGPU_INFO_VRAM_LOST_COUNTER:
		return sg_info_u32(info, 0);
	case AMDGPU_INFO_VRAM_USAGE:
		return sg_info_u64(info, atomic64_read(&dev->vram_used));
	case AMDGPU_INFO_VIS_VRAM_USAGE:
		return sg_info_u64(info, atomic64_read(&dev->visible_used));
	case AMDGPU_INFO_GTT_USAGE:
		return sg_info_u64(info, atomic64_read(&dev->gtt_used));
	case AMDGPU_INFO_GDS_CONFIG:
		return sg_info_out(info, &gds, sizeof(gds));
	default:
		return -EINVAL;
	}
}

int sg_info_ioctl(struct drm_device *drm, void *data, struct drm_file *file)
{
	struct sg_device *dev = sg_device_of(drm);
	struct drm_amdgpu_info *info = data;

	if (!info->return_size || !info->return_pointer)
		return -EINVAL;
	switch (info->query) {
	case AMDGPU_INFO_HW_IP_INFO:
		return sg_info_hw_ip(dev, info);
	case AMDGPU_INFO_HW_IP_COUNT:
		return sg_info_hw_ip_count(info);
	case AMDGPU_INFO_FW_VERSION:
		return sg_info_firmware(dev, info);
	case AMDGPU_INFO_MEMORY:
	case AMDGPU_INFO_VRAM_GTT:
		return sg_info_memory(dev, info);
	case AMDGPU_INFO_READ_MMR_REG:
		return sg_info_registers(info);
	case AMDGPU_INFO_DEV_INFO:
		return sg_info_device(dev, info);
	default:
		return sg_info_simple(dev, info);
	}
}
