// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of a fetcher in a process of its own.

mod clients;
mod peers;
mod support;
