/* SPDX-License-Identifier: GPL-2.0 OR MIT */
#ifndef SOFTGPU_CHIP_H
#define SOFTGPU_CHIP_H

#include "softgpu.h"

const struct sg_chip *sg_chip_find(const char *name);

#endif
