// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of the bench, with short runs.

mod common;
mod lazy;
mod programs;
mod remote;
