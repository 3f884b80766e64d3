// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where the programs find what they read.

/// The offsets of the kernel fields that the programs read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Offsets {
    /// `f_inode` in `struct file`.
    pub(crate) inode: i16,
    /// `private_data` in `struct file`.
    pub(crate) private: i16,
    /// `i_rdev` in `struct inode`.
    pub(crate) device: i16,
    /// `vm_file` in `struct vm_area_struct`.
    pub(crate) mapped: i16,
    /// `vm_flags` in `struct vm_area_struct`.
    pub(crate) flags: i16,
    /// `vm_end` in `struct vm_area_struct`.
    pub(crate) end: i16,
    /// `pending.signal` in `struct task_struct`.
    pub(crate) signals: i16,
}
