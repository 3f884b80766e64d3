// SPDX-License-Identifier: MIT OR Apache-2.0
//! The commands of `cargo xtask` after the machine's set-up.

pub(crate) mod bench;
pub(crate) mod codegen;
pub(crate) mod demo;
mod everyday;
pub(crate) mod figures;
pub(crate) mod package;
pub(crate) mod plugin;
pub(crate) mod stress;
pub(crate) mod test;
pub(crate) mod zdtm;
