// SPDX-License-Identifier: MIT OR Apache-2.0
//! Residency of one address space: which page is missing, where its bytes are, what to fill next
