// SPDX-License-Identifier: MIT OR Apache-2.0
//! End to end tests with the real CRIU
