// SPDX-License-Identifier: MIT OR Apache-2.0
//! What memory of files must be like.

use std::ptr::NonNull;

/// Memory that files are read into and written from.
///
/// # Safety
/// The bytes stay mapped, readable and writable while the value lives, also when it is moved. While an engine
/// has the value, no references to the bytes exist: the kernel and devices change them at any time. It is
/// not another device's memory, which disks must not write to.
pub unsafe trait Memory: Send + 'static {
    /// The first byte, page-aligned.
    fn start(&self) -> NonNull<u8>;
    /// The length in bytes.
    fn bytes(&self) -> usize;
}
