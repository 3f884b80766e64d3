// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of the crate with tracees of their own.

mod give;
mod measure;
mod placeholder;
mod refuse;
mod stop;
mod support;
mod swap;
mod tracee;
