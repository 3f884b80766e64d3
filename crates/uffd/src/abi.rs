// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel's numbers and structs (`include/uapi/linux/userfaultfd.h`), checked at compile time.

/// `UFFD_API`: the only version that exists.
pub const UFFD_API: u64 = 0xaa;
const TYPE: u32 = 0xaa;

/// `_IOC(dir, 0xaa, nr, size)` of `asm-generic/ioctl.h`; dir: 1 write, 2 read, 3 both.
const fn ioc(dir: u32, nr: u32, size: usize) -> libc::c_ulong {
    assert!(size < 1 << 14);
    #[expect(clippy::cast_possible_truncation, reason = "asserted to fit 14 bits")]
    let size = size as u32;
    ((dir << 30) | (size << 16) | (TYPE << 8) | nr) as libc::c_ulong
}

/// Negotiates features (`UFFDIO_API`).
pub const UFFDIO_API: libc::c_ulong = ioc(3, 0x3f, size_of::<Api>());
/// Registers a range (`UFFDIO_REGISTER`).
pub const UFFDIO_REGISTER: libc::c_ulong = ioc(3, 0x00, size_of::<Register>());
/// Wakes threads that wait in a range (`UFFDIO_WAKE`).
pub const UFFDIO_WAKE: libc::c_ulong = ioc(2, 0x02, size_of::<Range>());
/// Fills missing pages from this process's memory (`UFFDIO_COPY`).
pub const UFFDIO_COPY: libc::c_ulong = ioc(3, 0x03, size_of::<Copy>());
/// Maps the zero page (`UFFDIO_ZEROPAGE`).
pub const UFFDIO_ZEROPAGE: libc::c_ulong = ioc(3, 0x04, size_of::<Fill>());
/// Maps pages that a shared-memory file has (`UFFDIO_CONTINUE`, Linux 5.13).
pub const UFFDIO_CONTINUE: libc::c_ulong = ioc(3, 0x07, size_of::<Fill>());
/// Makes an access raise SIGBUS (`UFFDIO_POISON`, Linux 6.6).
pub const UFFDIO_POISON: libc::c_ulong = ioc(3, 0x08, size_of::<Fill>());

/// `UFFDIO_REGISTER_MODE_MISSING`
pub const REGISTER_MODE_MISSING: u64 = 1;
/// UFFD_FEATURE_EVENT_FORK: the kernel queues an event when a child inherits a registered mapping.
pub const FEATURE_FORK: u64 = 0x2;
/// UFFD_FEATURE_EVENT_REMAP: the kernel queues an event for `mremap`, and moved memory stays registered.
pub const FEATURE_REMAP: u64 = 0x4;
/// `UFFD_FEATURE_INITIALIZED`: the kernel's own mark of a negotiated userfaultfd (`fs/userfaultfd.c`).
pub const FEATURE_INITIALIZED: u64 = 1 << 31;
/// Feature bits that CRIU sets: FORK, REMAP, REMOVE, UNMAP events.
pub const FEATURES_CRIU: u64 = 0x2 | 0x4 | 0x8 | 0x40;

/// `UFFD_EVENT_PAGEFAULT`
pub const EVENT_PAGEFAULT: u8 = 0x12;
/// `UFFD_EVENT_FORK`
pub const EVENT_FORK: u8 = 0x13;
/// `UFFD_EVENT_REMAP`
pub const EVENT_REMAP: u8 = 0x14;
/// `UFFD_EVENT_REMOVE`
pub const EVENT_REMOVE: u8 = 0x15;
/// `UFFD_EVENT_UNMAP`
pub const EVENT_UNMAP: u8 = 0x16;

/// `struct uffdio_range`
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Range {
    /// First byte.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
}

/// `struct uffdio_api`
#[repr(C)]
#[derive(Debug, Default)]
pub struct Api {
    /// [`UFFD_API`].
    pub api: u64,
    /// Requested features in, supported features out.
    pub features: u64,
    /// Supported ioctls out.
    pub ioctls: u64,
}

/// `struct uffdio_register`
#[repr(C)]
#[derive(Debug, Default)]
pub struct Register {
    /// The range to register.
    pub range: Range,
    /// `UFFDIO_REGISTER_MODE_*`.
    pub mode: u64,
    /// ioctls that work on the range, out.
    pub ioctls: u64,
}

/// `struct uffdio_copy`
#[repr(C)]
#[derive(Debug, Default)]
pub struct Copy {
    /// Target address.
    pub dst: u64,
    /// Address of the source in this process.
    pub src: u64,
    /// Bytes.
    pub len: u64,
    /// `UFFDIO_COPY_MODE_*`.
    pub mode: u64,
    /// Bytes copied, or a negative errno.
    pub copy: i64,
}

/// `struct uffdio_zeropage` and `struct uffdio_poison`: one layout.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Fill {
    /// Target range.
    pub range: Range,
    /// Mode bits.
    pub mode: u64,
    /// Bytes done, or a negative errno.
    pub done: i64,
}

const _: () = {
    assert!(UFFDIO_API == 0xc018_aa3f);
    assert!(UFFDIO_REGISTER == 0xc020_aa00);
    assert!(UFFDIO_WAKE == 0x8010_aa02);
    assert!(UFFDIO_COPY == 0xc028_aa03);
    assert!(UFFDIO_ZEROPAGE == 0xc020_aa04);
    assert!(UFFDIO_CONTINUE == 0xc020_aa07);
    assert!(UFFDIO_POISON == 0xc020_aa08);
    assert!(size_of::<Range>() == 16);
    assert!(size_of::<Api>() == 24);
    assert!(size_of::<Register>() == 32);
    assert!(size_of::<Copy>() == 40);
    assert!(size_of::<Fill>() == 32);
};

/// The argument struct of a request. Only structs of this module implement it.
///
/// # Safety
/// The type is `repr(C)`, has no padding and every bit pattern is valid, so the kernel may write any of it.
unsafe trait IoctlArgument {}
// SAFETY: u64 fields only.
unsafe impl IoctlArgument for Range {}
// SAFETY: u64 fields only.
unsafe impl IoctlArgument for Api {}
// SAFETY: u64 fields only.
unsafe impl IoctlArgument for Register {}
// SAFETY: u64 and i64 fields only.
unsafe impl IoctlArgument for Copy {}
// SAFETY: u64 and i64 fields only.
unsafe impl IoctlArgument for Fill {}

macro_rules! request {
    ($(#[$doc:meta])* $name:ident, $number:ident, $arg:ty) => {
        $(#[$doc])*
        ///
        /// # Errors
        /// The kernel's errno.
        pub fn $name(fd: std::os::fd::BorrowedFd<'_>, arg: &mut $arg) -> std::io::Result<()> {
            call(fd, $number, arg)
        }
    };
}

fn call<A: IoctlArgument>(
    fd: std::os::fd::BorrowedFd<'_>,
    number: libc::c_ulong,
    arg: &mut A,
) -> std::io::Result<()> {
    use std::os::fd::AsRawFd as _;
    // SAFETY: `number` carries the size of A (each pair is made by `request!`). `arg` is a live exclusive
    // reference, and any bits may be written to it. Addresses inside are memory of the registered process, or
    // sources that the kernel reads with fault handling. The kernel never writes to this process's memory
    // through them.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), number, std::ptr::from_mut(arg)) };
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

request!(
    /// Negotiates the version and features.
    api, UFFDIO_API, Api
);
request!(
    /// Registers a range.
    register, UFFDIO_REGISTER, Register
);
request!(
    /// Wakes waiting threads.
    wake, UFFDIO_WAKE, Range
);
request!(
    /// Copies pages.
    copy, UFFDIO_COPY, Copy
);
request!(
    /// Maps zero pages.
    zeropage, UFFDIO_ZEROPAGE, Fill
);
request!(
    /// Maps pages of a shared-memory file.
    continue_minor, UFFDIO_CONTINUE, Fill
);
request!(
    /// Poisons pages.
    poison, UFFDIO_POISON, Fill
);
