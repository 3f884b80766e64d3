// SPDX-License-Identifier: MIT OR Apache-2.0
//! The functions that CRIU calls: C's arguments become Rust's, answers become numbers.

use std::ffi::{CStr, c_char, c_int};
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use super::descriptor::{Registered, restore_file_can_wait};
use crate::answer::{Answer, Mapping, Refusal, Restored};
use crate::host::Host;
use crate::plugin::Stage;
use crate::runtime::{self, No, Place, hook};

/// CRIU asks the next plugin.
const NOT_MINE: c_int = -libc::ENOTSUP;
/// CRIU fails.
const FAILED: c_int = -1;
/// A descriptor that no process can have open: its mmap fails.
const UNMAPPABLE: c_int = c_int::MAX;

/// Whether this process is a task whose restore fails in the end, since a mapping went wrong: one line about that is enough.
static DOOMED: AtomicBool = AtomicBool::new(false);

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

/// A hook that gives nothing.
fn plain<P: Registered>(name: &str, place: Place, act: impl FnOnce(&mut P, &Host) -> Answer) -> c_int {
    code(hook(name, place, act).map(|()| 0))
}

fn code(answer: Result<c_int, No>) -> c_int {
    answer.unwrap_or_else(|no| match no {
        No::NotMine => NOT_MINE,
        No::Failed => FAILED,
    })
}

/// Calls `act` with the descriptor that CRIU lends.
///
/// # Safety
/// It is open and stays so for the call.
unsafe fn lent<T>(fd: c_int, act: impl FnOnce(BorrowedFd<'_>) -> Answer<T>) -> Answer<T> {
    if fd < 0 {
        return Err(Refusal::from("CRIU gave no file"));
    }
    // SAFETY: the caller's promise; not -1.
    act(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// A string of CRIU's; empty for a null pointer.
///
/// # Safety
/// It is null, or terminated and lives through the call.
unsafe fn text<'a>(pointer: *const c_char) -> &'a CStr {
    // SAFETY: the caller's promise.
    if pointer.is_null() { c"" } else { unsafe { CStr::from_ptr(pointer) } }
}

pub(super) extern "C" fn dump_unix_sk<P: Registered>(fd: c_int, inode: c_int) -> c_int {
    plain("DUMP_UNIX_SK", Place::Main, |plugin: &mut P, host| {
        // SAFETY: CRIU lends its copy of the socket for the call.
        unsafe { lent(fd, |fd| plugin.dump_unix_socket(host, fd, inode.cast_unsigned())) }
    })
}

pub(super) extern "C" fn restore_unix_sk<P: Registered>(inode: c_int) -> c_int {
    let act = |plugin: &mut P, host: &Host| plugin.restore_unix_socket(host, inode.cast_unsigned());
    code(hook("RESTORE_UNIX_SK", Place::Task, act).map(IntoRawFd::into_raw_fd))
}

pub(super) extern "C" fn dump_ext_file<P: Registered>(fd: c_int, id: c_int) -> c_int {
    plain("DUMP_EXT_FILE", Place::Main, |plugin: &mut P, host| {
        // SAFETY: CRIU lends its copy of the file for the call.
        unsafe { lent(fd, |fd| plugin.dump_file(host, fd, id.cast_unsigned())) }
    })
}

/// Called with one argument by CRIU up to 4.2.1, with two by later ones, which do not initialise what the second points to.
pub(super) extern "C" fn restore_ext_file<P: Registered>(id: c_int, retry: *mut bool) -> c_int {
    let may_wait = restore_file_can_wait();
    let answer = hook("RESTORE_EXT_FILE", Place::Task, |plugin: &mut P, host| {
        match plugin.restore_file(host, id.cast_unsigned())? {
            Restored::Later if !may_wait => Err("this CRIU cannot ask again later: use a newer one".into()),
            restored => Ok(restored),
        }
    });
    if may_wait && !retry.is_null() {
        // SAFETY: a host with that many hooks passes the address of a bool of its own; otherwise it is not looked at.
        unsafe { retry.write(matches!(answer, Ok(Restored::Later))) };
    }
    code(answer.map(|restored| match restored {
        Restored::File(fd) => fd.into_raw_fd(),
        // Ignored by CRIU, as long as it is no error.
        Restored::Later => 0,
    }))
}

pub(super) extern "C" fn dump_ext_mount<P: Registered>(mountpoint: *const c_char, id: c_int) -> c_int {
    plain("DUMP_EXT_MOUNT", Place::Main, |plugin: &mut P, host| {
        // SAFETY: a string of CRIU's that lives through the call.
        plugin.dump_mount(host, unsafe { text(mountpoint) }, id)
    })
}

/// The last argument is null in every CRIU.
pub(super) extern "C" fn restore_ext_mount<P: Registered>(
    id: c_int,
    mountpoint: *const c_char,
    old_root: *const c_char,
    _is_file: *mut c_int,
) -> c_int {
    plain("RESTORE_EXT_MOUNT", Place::Task, |plugin: &mut P, host| {
        // SAFETY: strings of CRIU's that live through the call.
        let (mountpoint, old_root) = unsafe { (text(mountpoint), text(old_root)) };
        plugin.restore_mount(host, id, mountpoint, old_root)
    })
}

pub(super) extern "C" fn dump_ext_link<P: Registered>(
    index: c_int,
    link_type: c_int,
    kind: *const c_char,
) -> c_int {
    plain("DUMP_EXT_LINK", Place::Main, |plugin: &mut P, host| {
        // SAFETY: a string of CRIU's that lives through the call.
        plugin.dump_link(host, index, link_type, unsafe { text(kind) })
    })
}

pub(super) extern "C" fn handle_device_vma<P: Registered>(fd: c_int, status: *const libc::stat) -> c_int {
    plain("HANDLE_DEVICE_VMA", Place::Main, |plugin: &mut P, host| {
        // SAFETY: null, or CRIU's own, which lives through the call.
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
        // SAFETY: a string of CRIU's that lives through the call.
        plugin.update_mapping(host, unsafe { text(path) }, address, old_offset)
    };
    let doomed = DOOMED.load(Ordering::Relaxed);
    let answer = if doomed { Err(No::Failed) } else { hook("UPDATE_VMA_MAP", Place::Task, act) };
    let (offset, fd) = match answer {
        Ok(Mapping { offset, file }) => (offset, file.map(IntoRawFd::into_raw_fd)),
        Err(No::NotMine) => return NOT_MINE,
        // CRIU takes no error here: it would map the old file at the old offset.
        Err(No::Failed) => {
            DOOMED.store(true, Ordering::Relaxed);
            (old_offset, Some(UNMAPPABLE))
        }
    };
    // SAFETY: addresses of two variables of CRIU's, which reads them after the call.
    unsafe {
        new_offset.write(offset);
        if let Some(fd) = fd {
            file.write(fd);
        }
    }
    1
}

pub(super) extern "C" fn resume_devices_late<P: Registered>(pid: c_int) -> c_int {
    plain("RESUME_DEVICES_LATE", Place::Main, |plugin: &mut P, host| plugin.resume_devices_late(host, pid))
}

pub(super) extern "C" fn pause_devices<P: Registered>(pid: c_int) -> c_int {
    plain("PAUSE_DEVICES", Place::Main, |plugin: &mut P, host| plugin.pause_devices(host, pid))
}

pub(super) extern "C" fn checkpoint_devices<P: Registered>(pid: c_int) -> c_int {
    plain("CHECKPOINT_DEVICES", Place::Main, |plugin: &mut P, host| plugin.checkpoint_devices(host, pid))
}

pub(super) extern "C" fn post_forking<P: Registered>() -> c_int {
    plain("POST_FORKING", Place::Main, |plugin: &mut P, host| plugin.post_forking(host))
}

pub(super) extern "C" fn restore_init<P: Registered>() -> c_int {
    plain("RESTORE_INIT", Place::Main, |plugin: &mut P, host| plugin.restore_init(host))
}

pub(super) extern "C" fn dump_devices_late<P: Registered>(pid: c_int) -> c_int {
    plain("DUMP_DEVICES_LATE", Place::Main, |plugin: &mut P, host| plugin.dump_devices_late(host, pid))
}
