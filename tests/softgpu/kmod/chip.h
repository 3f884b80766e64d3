/* SPDX-License-Identifier: GPL-2.0 OR MIT */
#ifndef SOFTGPU_CHIP_H
#define SOFTGPU_CHIP_H

#include "softgpu.h"

const struct sg_chip *sg_chip_find(const char *name);
/* The chip in a mode in which each GPU has this number of its XCCs. Called once. */
const struct sg_chip *sg_chip_partition(const struct sg_chip *chip, u32 xccs);

#endif
