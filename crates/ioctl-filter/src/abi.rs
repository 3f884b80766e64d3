// SPDX-License-Identifier: MIT OR Apache-2.0
//! bpf(2): `include/uapi/linux/bpf.h`. The kernel reads as many bytes of an argument as the caller says.

use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

const BPF_MAP_CREATE: libc::c_int = 0;
const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_BTF_LOAD: libc::c_int = 18;
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_MAP_TYPE_HASH: u32 = 1;
const BPF_PROG_TYPE_LSM: u32 = 29;
const BPF_LSM_MAC: u32 = 27;
const BPF_F_SLEEPABLE: u32 = 1 << 4;
/// lsm_list_modules(2), Linux 6.8: the same number on every architecture except alpha.
const SYS_LSM_LIST_MODULES: libc::c_long = 461;
/// `include/uapi/linux/lsm.h`
const LSM_ID_BPF: u64 = 109;
/// More than the kernel can have.
const MAX_MODULES: u32 = 64;
/// The licence of a program that may use all helpers; one of `license_is_gpl_compatible`
/// (`include/linux/license.h`).
const LICENSE: &std::ffi::CStr = c"Dual MIT/GPL";
const NAME: &[u8] = b"rewake_filter";
// The kernel has room for 15 characters and a zero (BPF_OBJ_NAME_LEN).
const _: () = assert!(NAME.len() < 16);
/// Bytes of the verifier's log, of which the kernel keeps the end.
const LOG_BYTES: usize = 64 * 1024;
/// The last lines of the log, which errors show.
const LOG_LINES: usize = 3;

/// An instruction: `struct bpf_insn`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Instruction {
    pub(crate) code: u8,
    /// The destination register, and in the upper half the source register.
    pub(crate) registers: u8,
    pub(crate) offset: i16,
    pub(crate) immediate: i32,
}

/// Bytes of a [`ControlRequest`].
pub(crate) const REQUEST_BYTES: i32 = 16;
/// Bytes of a [`Function`].
const FUNCTION_BYTES: u32 = 8;

/// The start and the type of a function of a program: `struct bpf_func_info`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Function {
    pub(crate) at: u32,
    pub(crate) type_id: u32,
}

/// A request to a program: the argument of an ioctl that no driver has.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct ControlRequest {
    /// The program's secret. A program ignores requests with another one.
    pub(crate) secret: u64,
    pub(crate) part: u32,
    /// The classes of calls to block from now on.
    pub(crate) classes: u32,
}

/// The argument of BPF_MAP_CREATE.
#[derive(Default)]
#[repr(C)]
struct Map {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
    inner_map_fd: u32,
    numa_node: u32,
    map_name: [u8; 16],
}

/// The argument of BPF_PROG_LOAD.
#[derive(Default)]
#[repr(C)]
struct ProgLoad {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
    prog_ifindex: u32,
    expected_attach_type: u32,
    prog_btf_fd: u32,
    func_info_rec_size: u32,
    func_info: u64,
    func_info_cnt: u32,
    line_info_rec_size: u32,
    line_info: u64,
    line_info_cnt: u32,
    attach_btf_id: u32,
}

/// The argument of BPF_BTF_LOAD.
#[derive(Default)]
#[repr(C)]
struct BtfLoad {
    btf: u64,
    btf_log_buf: u64,
    btf_size: u32,
    btf_log_size: u32,
    btf_log_level: u32,
    unused: u32,
}

/// The argument of BPF_LINK_CREATE.
#[derive(Default)]
#[repr(C)]
struct LinkCreate {
    prog_fd: u32,
    target_fd: u32,
    attach_type: u32,
    flags: u32,
}

const _: () = {
    assert!(size_of::<Instruction>() == 8);
    assert!(size_of::<Function>() == FUNCTION_BYTES as usize);
    assert!(size_of::<ControlRequest>() == REQUEST_BYTES as usize);
    assert!(offset_of!(ControlRequest, part) == 8);
    assert!(offset_of!(ControlRequest, classes) == 12);
    assert!(size_of::<Map>() == 44);
    assert!(offset_of!(Map, map_name) == 28);
    assert!(size_of::<ProgLoad>() == 112);
    assert!(offset_of!(ProgLoad, prog_name) == 48);
    assert!(offset_of!(ProgLoad, func_info) == 80);
    assert!(offset_of!(ProgLoad, attach_btf_id) == 108);
    assert!(size_of::<BtfLoad>() == 32);
    assert!(size_of::<LinkCreate>() == 16);
};

/// # Safety
/// The addresses in the argument must refer to valid memory of the lengths that it states.
unsafe fn bpf<T>(command: libc::c_int, argument: &T) -> io::Result<OwnedFd> {
    // SAFETY: the length is that of the argument; the caller guarantees the addresses in it.
    let done = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(argument), size_of::<T>()) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    let number = RawFd::try_from(done).map_err(io::Error::other)?;
    // SAFETY: the call has just opened it (with close-on-exec), and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Creates a hash table with keys of `key` bytes and values of 4 bytes. Memory for all `entries` is allocated
/// at once.
pub(crate) fn table(key: u32, entries: u32) -> io::Result<OwnedFd> {
    let mut argument = Map {
        map_type: BPF_MAP_TYPE_HASH,
        key_size: key,
        value_size: 4,
        max_entries: entries,
        ..Map::default()
    };
    argument.map_name[..NAME.len()].copy_from_slice(NAME);
    // SAFETY: it has no addresses.
    unsafe { bpf(BPF_MAP_CREATE, &argument) }
}

/// Loads a program's types (BTF).
pub(crate) fn load_types(btf: &[u8]) -> io::Result<OwnedFd> {
    let argument = BtfLoad { btf: address(btf), btf_size: count(btf), ..BtfLoad::default() };
    // SAFETY: the bytes outlive the call.
    unsafe { bpf(BPF_BTF_LOAD, &argument) }
}

/// Loads a program for the hook whose function has the kernel type `hook`. A program with function types may
/// sleep, and loops may call its functions. Returns also the verifier's log if the kernel refused it.
pub(crate) fn load(
    code: &[Instruction],
    typed: Option<(&OwnedFd, &[Function])>,
    hook: u32,
) -> (io::Result<OwnedFd>, String) {
    let mut argument = ProgLoad {
        prog_type: BPF_PROG_TYPE_LSM,
        insn_cnt: count(code),
        insns: address(code),
        license: LICENSE.as_ptr() as u64,
        expected_attach_type: BPF_LSM_MAC,
        attach_btf_id: hook,
        ..ProgLoad::default()
    };
    if let Some((types, functions)) = typed {
        argument.prog_flags = BPF_F_SLEEPABLE;
        argument.prog_btf_fd = number(types);
        argument.func_info_rec_size = FUNCTION_BYTES;
        argument.func_info = address(functions);
        argument.func_info_cnt = count(functions);
    }
    argument.prog_name[..NAME.len()].copy_from_slice(NAME);
    // SAFETY: code, functions and licence outlive the call.
    let loaded = unsafe { bpf(BPF_PROG_LOAD, &argument) };
    if loaded.is_ok() {
        return (loaded, String::new());
    }
    // The program is loaded again to get the log.
    let mut log = vec![0_u8; LOG_BYTES];
    argument.log_level = 1;
    argument.log_size = count(&log);
    argument.log_buf = log.as_mut_ptr() as u64;
    // SAFETY: as above; the log has the stated room, and nothing reads it meanwhile.
    let again = unsafe { bpf(BPF_PROG_LOAD, &argument) };
    // ENOSPC means that the log was cut.
    let loaded = if again.is_ok() { again } else { loaded };
    let text = String::from_utf8_lossy(&log);
    let lines: Vec<&str> = text.trim_end_matches('\0').lines().collect();
    (loaded, lines[lines.len().saturating_sub(LOG_LINES)..].iter().map(|line| format!("\n{line}")).collect())
}

/// Attaches a program to its hook until the returned descriptor is closed.
pub(crate) fn attach(program: &OwnedFd) -> io::Result<OwnedFd> {
    let argument = LinkCreate { prog_fd: number(program), attach_type: BPF_LSM_MAC, ..LinkCreate::default() };
    // SAFETY: it has no addresses.
    unsafe { bpf(BPF_LINK_CREATE, &argument) }
}

/// Returns whether `bpf` is among the kernel's active security modules.
pub(crate) fn runs_lsm_programs() -> io::Result<bool> {
    let mut ids = [0_u64; MAX_MODULES as usize];
    let mut bytes = MAX_MODULES * 8;
    // SAFETY: the kernel writes at most as many bytes as `bytes` says, and updates that number.
    let count = unsafe { libc::syscall(SYS_LSM_LIST_MODULES, ids.as_mut_ptr(), &raw mut bytes, 0) };
    let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
    Ok(ids[..count].contains(&LSM_ID_BPF))
}

/// Returns the kernel's release.
pub(crate) fn release() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned()
}

/// Makes an ioctl that no driver has and that a program may answer. Returns its errno, or 0.
pub(crate) fn control(file: BorrowedFd<'_>, number: u32, request: &ControlRequest) -> i32 {
    let argument: *const ControlRequest = request;
    // SAFETY: the number encodes the argument's size, and that the kernel only reads it; no driver has this
    // ioctl.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::c_ulong::from(number), argument) };
    if result < 0 { io::Error::last_os_error().raw_os_error().unwrap_or(0) } else { 0 }
}

/// Returns a random number.
pub(crate) fn random() -> io::Result<u64> {
    let mut bytes = [0_u8; 8];
    // SAFETY: it writes at most as many bytes as the buffer has.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got == 8 { Ok(u64::from_ne_bytes(bytes)) } else { Err(io::Error::last_os_error()) }
}

fn address<T>(of: &[T]) -> u64 {
    of.as_ptr() as u64
}

/// Returns a length as u32: programs have some hundred instructions.
fn count<T>(of: &[T]) -> u32 {
    u32::try_from(of.len()).unwrap_or(u32::MAX)
}

/// Returns a descriptor as structs and instructions contain it.
pub(crate) fn number(fd: &OwnedFd) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}
