// SPDX-License-Identifier: MIT OR Apache-2.0
//! One file a command.

pub mod doctor;
pub mod inspect;
pub mod lazy_pages;
mod print;
