// SPDX-License-Identifier: MIT OR Apache-2.0
//! The functions that CRIU calls: they convert C's arguments to Rust's, and results to numbers.

use std::ffi::{CStr, c_char, c_int};
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use super::descriptor::{Registered, restore_file_can_wait};
use crate::answer::{Answer, MapSource, Refusal, Restored};
use crate::host::Host;
use crate::plugin::Stage;
use crate::runtime::{self, HookError, ProcessKind, hook};

/// CRIU calls the next plugin.
const NOT_MINE: c_int = -libc::ENOTSUP;
/// CRIU fails.
const FAILED: c_int = -1;
/// A descriptor that no process can have open: its mmap fails.
const UNMAPPABLE: c_int = c_int::MAX;

/// Whether this process is a task whose restore will fail because of a mapping: one line in the log is
/// enough.
static FAILING: AtomicBool = AtomicBool::new(false);

pub(super) extern "C" fn init<P: Registered>(stage: c_int) -> c_int {
    let host = Host::new(P::NAME);
    let stage = match stage {
        0 => Some(Stage::Dump),
        1 => Some(Stage::PreDump),
        2 => Some(Stage::Restore { named: host.take_from_inventory() }),
        _ => None,
    };
    runtime::init::<P>(stage).map_or(FAILED, |()| 0)
}

pub(super) extern "C" fn exit<P: Registered>(_stage: c_int, result: c_int) {
    runtime::exit::<P>(result);
}

/// Runs a hook without a result.
fn plain<P: Registered>(name: &str, kind: ProcessKind, act: impl FnOnce(&mut P, &Host) -> Answer) -> c_int {
    code(hook(name, kind, act).map(|()| 0))
}

fn code(answer: Result<c_int, HookError>) -> c_int {
    answer.unwrap_or_else(|error| match error {
        HookError::NotMine => NOT_MINE,
        HookError::Failed => FAILED,
    })
}

/// Calls `act` with a descriptor that CRIU lends.
///
/// # Safety
/// The descriptor is open and stays so during the call.
unsafe fn lent<T>(fd: c_int, act: impl FnOnce(BorrowedFd<'_>) -> Answer<T>) -> Answer<T> {
    if fd < 0 {
        return Err(Refusal::from("CRIU gave no file"));
    }
    // SAFETY: the caller's contract; not -1.
    act(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Returns a string of CRIU; an empty one for a null pointer.
///
/// # Safety
/// The pointer is null, or the string is terminated and lives through the call.
unsafe fn text<'a>(pointer: *const c_char) -> &'a CStr {
    // SAFETY: the caller's contract.
    if pointer.is_null() { c"" } else { unsafe { CStr::from_ptr(pointer) } }
}

pub(super) extern "C" fn dump_unix_sk<P: Registered>(fd: c_int, inode: c_int) -> c_int {
    plain("DUMP_UNIX_SK", ProcessKind::Main, |plugin: &mut P, host| {
        // SAFETY: CRIU lends its copy of the socket for the call.
        unsafe { lent(fd, |fd| plugin.dump_unix_socket(host, fd, inode.cast_unsigned())) }
    })
}

pub(super) extern "C" fn restore_unix_sk<P: Registered>(inode: c_int) -> c_int {
    let act = |plugin: &mut P, host: &Host| plugin.restore_unix_socket(host, inode.cast_unsigned());
    code(hook("RESTORE_UNIX_SK", ProcessKind::Task, act).map(IntoRawFd::into_raw_fd))
}

pub(super) extern "C" fn dump_ext_file<P: Registered>(fd: c_int, id: c_int) -> c_int {
    plain("DUMP_EXT_FILE", ProcessKind::Main, |plugin: &mut P, host| {
        // SAFETY: CRIU lends its copy of the file for the call.
        unsafe { lent(fd, |fd| plugin.dump_file(host, fd, id.cast_unsigned())) }
    })
}

/// CRIU up to 4.2.1 passes one argument. Later versions pass two and do not initialise what the second points
/// to.
pub(super) extern "C" fn restore_ext_file<P: Registered>(id: c_int, retry: *mut bool) -> c_int {
    let may_wait = restore_file_can_wait();
    let answer = hook("RESTORE_EXT_FILE", ProcessKind::Task, |plugin: &mut P, host| {
        match plugin.restore_file(host, id.cast_unsigned())? {
            Restored::Later if !may_wait => {
                Err("this CRIU cannot restore a file later: use a newer one".into())
            }
            restored => Ok(restored),
        }
    });
    if may_wait && !retry.is_null() {
        // SAFETY: a host with that many hooks passes the address of its own bool; otherwise the pointer is
        // not used.
        unsafe { retry.write(matches!(answer, Ok(Restored::Later))) };
    }
    code(answer.map(|restored| match restored {
        Restored::File(fd) => fd.into_raw_fd(),
        // CRIU ignores the number unless it is negative.
        Restored::Later => 0,
    }))
}

pub(super) extern "C" fn dump_ext_mount<P: Registered>(mountpoint: *const c_char, id: c_int) -> c_int {
    plain("DUMP_EXT_MOUNT", ProcessKind::Main, |plugin: &mut P, host| {
        // SAFETY: CRIU's string lives through the call.
        plugin.dump_mount(host, unsafe { text(mountpoint) }, id)
    })
}

/// In every CRIU the last argument is null.
pub(super) extern "C" fn restore_ext_mount<P: Registered>(
    id: c_int,
    mountpoint: *const c_char,
    old_root: *const c_char,
    _is_file: *mut c_int,
) -> c_int {
    plain("RESTORE_EXT_MOUNT", ProcessKind::Task, |plugin: &mut P, host| {
        // SAFETY: CRIU's strings live through the call.
        let (mountpoint, old_root) = unsafe { (text(mountpoint), text(old_root)) };
        plugin.restore_mount(host, id, mountpoint, old_root)
    })
}

pub(super) extern "C" fn dump_ext_link<P: Registered>(
    index: c_int,
    link_type: c_int,
    kind: *const c_char,
) -> c_int {
    plain("DUMP_EXT_LINK", ProcessKind::Main, |plugin: &mut P, host| {
        // SAFETY: CRIU's string lives through the call.
        plugin.dump_link(host, index, link_type, unsafe { text(kind) })
    })
}

pub(super) extern "C" fn handle_device_vma<P: Registered>(fd: c_int, status: *const libc::stat) -> c_int {
    plain("HANDLE_DEVICE_VMA", ProcessKind::Main, |plugin: &mut P, host| {
        // SAFETY: the pointer is null, or the status lives through the call.
        let status = unsafe { status.as_ref() }.ok_or("CRIU gave no file status")?;
        // SAFETY: CRIU lends its descriptor for the call.
        unsafe { lent(fd, |fd| plugin.handle_device_mapping(host, fd, status)) }
    })
}

pub(super) extern "C" fn update_vma_map<P: Registered>(
    path: *const c_char,
    address: u64,
    old_offset: u64,
    new_offset: *mut u64,
    file: *mut c_int,
) -> c_int {
    let act = |plugin: &mut P, host: &Host| {
        // SAFETY: CRIU's string lives through the call.
        plugin.update_mapping(host, unsafe { text(path) }, address, old_offset)
    };
    let failing = FAILING.load(Ordering::Relaxed);
    let answer =
        if failing { Err(HookError::Failed) } else { hook("UPDATE_VMA_MAP", ProcessKind::Task, act) };
    let (offset, fd) = match answer {
        Ok(MapSource { offset, file }) => (offset, file.map(IntoRawFd::into_raw_fd)),
        Err(HookError::NotMine) => return NOT_MINE,
        // CRIU has no error here: it would map the old file at the old offset.
        Err(HookError::Failed) => {
            FAILING.store(true, Ordering::Relaxed);
            (old_offset, Some(UNMAPPABLE))
        }
    };
    // SAFETY: the addresses of two variables of CRIU, which reads them after the call.
    unsafe {
        new_offset.write(offset);
        if let Some(fd) = fd {
            file.write(fd);
        }
    }
    1
}

pub(super) extern "C" fn resume_devices_late<P: Registered>(pid: c_int) -> c_int {
    plain("RESUME_DEVICES_LATE", ProcessKind::Main, |plugin: &mut P, host| {
        plugin.resume_devices_late(host, pid)
    })
}

pub(super) extern "C" fn pause_devices<P: Registered>(pid: c_int) -> c_int {
    plain("PAUSE_DEVICES", ProcessKind::Main, |plugin: &mut P, host| plugin.pause_devices(host, pid))
}

pub(super) extern "C" fn checkpoint_devices<P: Registered>(pid: c_int) -> c_int {
    plain("CHECKPOINT_DEVICES", ProcessKind::Main, |plugin: &mut P, host| {
        plugin.checkpoint_devices(host, pid)
    })
}

pub(super) extern "C" fn post_forking<P: Registered>() -> c_int {
    plain("POST_FORKING", ProcessKind::Main, |plugin: &mut P, host| plugin.post_forking(host))
}

pub(super) extern "C" fn restore_init<P: Registered>() -> c_int {
    plain("RESTORE_INIT", ProcessKind::Main, |plugin: &mut P, host| plugin.restore_init(host))
}

pub(super) extern "C" fn dump_devices_late<P: Registered>(pid: c_int) -> c_int {
    plain("DUMP_DEVICES_LATE", ProcessKind::Main, |plugin: &mut P, host| plugin.dump_devices_late(host, pid))
}
