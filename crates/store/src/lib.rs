// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where bytes come from: pages files read once, into a bounded pool, by io_uring, plain reads or a simulation
