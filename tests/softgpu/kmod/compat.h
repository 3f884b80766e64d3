/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* Differences between the supported kernels. */
#ifndef SOFTGPU_COMPAT_H
#define SOFTGPU_COMPAT_H

#include <linux/stringify.h>
#include <linux/version.h>

/* From 6.13 on, symbol namespaces are strings. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 13, 0)
#define SG_NAMESPACE(name)	__stringify(name)
#else
#define SG_NAMESPACE(name)	name
#endif

#endif
