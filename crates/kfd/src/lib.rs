// SPDX-License-Identifier: MIT OR Apache-2.0
//! AMD's compute driver.
