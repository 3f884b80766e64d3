// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of the crate as its users see it.

mod amdgpu;
mod common;
mod corpus;
mod criu;
mod files;
mod memory;
mod plan;
mod properties;
mod rewake;
mod split;
