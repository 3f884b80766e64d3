// SPDX-License-Identifier: MIT OR Apache-2.0
//! CRIU's functions. The plugin is not linked against them: each is resolved by name in the loading program
//! when it is needed.
//!
//! Prototypes are from CRIU's headers `criu-plugin.h`, `log.h`, `image.h`, `fdstore.h`, `files.h`,
//! `crtools.h`. They are the same from 4.1 to the development branch of November 2025.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::ptr::NonNull;

use crate::host::HostError;

/// CRIU's log levels (`log.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LogLevel {
    Error = 1,
    Warn = 2,
    Info = 3,
    Debug = 4,
}

/// Returns the address of the host's symbol `name`.
pub(super) fn find(name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: the call only resolves a name; the string is terminated.
    NonNull::new(unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) })
}

/// Returns a function of the host as a pointer of the given type.
macro_rules! function {
    ($name:ident: $type:ty) => {{
        const NAME: &str = stringify!($name);
        const SYMBOL: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
            Ok(name) => name,
            Err(_) => unreachable!(),
        };
        let address = find(SYMBOL).ok_or(HostError::Missing(NAME))?;
        // SAFETY: the host's symbol of this name is CRIU's function with this prototype.
        let function: $type = unsafe { std::mem::transmute(address.as_ptr()) };
        function
    }};
}

/// Writes one line to CRIU's log, or to standard error if the host has no log.
pub(crate) fn log(level: LogLevel, line: &str) {
    let line = line.replace('\0', " ");
    if print(level, &line).is_err() {
        // An error here cannot be reported.
        let _ = writeln!(std::io::stderr(), "{line}");
    }
}

fn print(level: LogLevel, line: &str) -> Result<(), HostError> {
    let print = function!(print_on_level: unsafe extern "C" fn(c_uint, *const c_char, ...));
    let Ok(line) = CString::new(line) else { return Ok(()) };
    // SAFETY: the format takes one string; both are terminated and outlive the call.
    unsafe { print(level as c_uint, c"%s\n".as_ptr(), line.as_ptr()) };
    Ok(())
}

/// Calls `criu_get_image_dir`. Returns `None` if it gives no descriptor. The descriptor lives as long as the
/// process.
pub(crate) fn image_dir() -> Result<Option<BorrowedFd<'static>>, HostError> {
    let get = function!(criu_get_image_dir: unsafe extern "C" fn() -> c_int);
    // SAFETY: the call takes nothing and returns the number of one of CRIU's service descriptors.
    let fd = unsafe { get() };
    // SAFETY: the number is valid; CRIU keeps its service descriptors open until after the last hook.
    Ok((fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) }))
}

/// Has CRIU parse one more option, as if it were at the end of its command line. Returns whether CRIU took
/// it.
///
/// `parse_options` is not for plugins. Its prototype has been the same from 3.11 to the development branch of
/// September 2026; `PARSING_ARGV` is the last of its five states (`cr_options.h`).
pub(crate) fn add_option(option: &CStr) -> Result<bool, HostError> {
    const PARSING_ARGV: c_int = 5;
    let parse = function!(
        parse_options: unsafe extern "C" fn(c_int, *mut *mut c_char, *mut bool, *mut bool, c_int) -> c_int
    );
    // CRIU may keep pointers into the arguments, so they are never freed.
    let [name, option] = [c"criu", option].map(|text| text.to_owned().into_raw());
    let arguments: &'static mut [*mut c_char; 3] = Box::leak(Box::new([name, option, std::ptr::null_mut()]));
    let (mut wrong, mut runs) = (false, false);
    // SAFETY: two terminated strings and the null pointer that ends them, which live as long as the process;
    // two places to write to.
    let parsed = unsafe { parse(2, arguments.as_mut_ptr(), &mut wrong, &mut runs, PARSING_ARGV) };
    Ok(parsed == 0 && !wrong)
}

/// Calls `log_get_fd`. Returns `None` if it gives no descriptor. The descriptor lives as long as the process.
pub(crate) fn log_file() -> Result<Option<BorrowedFd<'static>>, HostError> {
    let get = function!(log_get_fd: unsafe extern "C" fn() -> c_int);
    // SAFETY: the call takes nothing and returns the number of one of CRIU's service descriptors, or 2.
    let fd = unsafe { get() };
    // SAFETY: the number is valid; CRIU keeps its log open until after the last hook.
    Ok((fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) }))
}

/// Calls `add_inventory_plugin`, which returns a negative number on failure. A second call adds the name
/// again, which no restore accepts.
pub(crate) fn add_inventory_plugin(name: &CStr) -> Result<c_int, HostError> {
    let add = function!(add_inventory_plugin: unsafe extern "C" fn(*const c_char) -> c_int);
    // SAFETY: the name is terminated; CRIU copies it.
    Ok(unsafe { add(name.as_ptr()) })
}

/// Calls `check_and_remove_inventory_plugin`.
pub(crate) fn check_and_remove_inventory_plugin(name: &CStr) -> Result<bool, HostError> {
    let check =
        function!(check_and_remove_inventory_plugin: unsafe extern "C" fn(*const c_char, usize) -> bool);
    // SAFETY: the name is terminated and this long; it is compared only.
    Ok(unsafe { check(name.as_ptr(), name.count_bytes()) })
}

/// Calls `fdstore_add`, which returns an id, or a negative number on failure.
pub(crate) fn fdstore_add(fd: BorrowedFd<'_>) -> Result<c_int, HostError> {
    let add = function!(fdstore_add: unsafe extern "C" fn(c_int) -> c_int);
    // SAFETY: the descriptor is open; CRIU stores a copy.
    Ok(unsafe { add(fd.as_raw_fd()) })
}

/// Calls `fdstore_get`. Returns None on failure.
pub(crate) fn fdstore_get(id: c_int) -> Result<Option<OwnedFd>, HostError> {
    let get = function!(fdstore_get: unsafe extern "C" fn(c_int) -> c_int);
    // SAFETY: the call takes a number and returns -1 for an unknown one.
    let fd = unsafe { get(id) };
    // SAFETY: a new descriptor, which the caller owns.
    Ok((fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Reads `criu_run_id`.
pub(crate) fn run_id() -> Result<String, HostError> {
    let id = find(c"criu_run_id").ok_or(HostError::Missing("criu_run_id"))?;
    // SAFETY: CRIU's array has a terminated string, written once, before plugins are loaded.
    let id = unsafe { CStr::from_ptr(id.as_ptr().cast_const().cast()) };
    Ok(id.to_string_lossy().into_owned())
}

/// Returns the pid of `root_item`: the pointer `pid` of `struct pstree_item`, and the number `real` of
/// `struct pid` (`pstree.h`, `pid.h`). Both are the same in 4.1.1, 4.2.1 and the development branch.
///
/// Another layout must not crash CRIU, so the memory is read through a file, and the result is only a number.
pub(crate) fn root_pid() -> Result<i32, HostError> {
    const PID: u64 = 40;
    const REAL: u64 = 8;
    let root = find(c"root_item").ok_or(HostError::Missing("root_item"))?;
    let memory = File::open("/proc/self/mem").map_err(|error| HostError::NoRoot(error.to_string()))?;
    let word = |address: u64| {
        let mut bytes = [0; 8];
        let read = memory.read_exact_at(&mut bytes, address);
        read.map(|()| bytes).map_err(|error| HostError::NoRoot(format!("{address:#x}: {error}")))
    };
    let pointer = |address| word(address).map(u64::from_ne_bytes);
    let item = pointer(root.as_ptr().expose_provenance() as u64)?;
    let [a, b, c, d, ..] = word(pointer(item.wrapping_add(PID))?.wrapping_add(REAL))?;
    match i32::from_ne_bytes([a, b, c, d]) {
        pid if pid > 0 => Ok(pid),
        other => Err(HostError::NoRoot(format!("it has pid {other}"))),
    }
}
