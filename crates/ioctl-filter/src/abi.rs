// SPDX-License-Identifier: MIT OR Apache-2.0
//! bpf(2): `include/uapi/linux/bpf.h`. The kernel takes the arguments' first bytes, as many as it is told there are.

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
/// What a program that may use all helpers says; one of `license_is_gpl_compatible` (`include/linux/license.h`).
const LICENSE: &std::ffi::CStr = c"Dual MIT/GPL";
const NAME: &[u8] = b"rewake_ioctl_filter";
/// Of what the verifier has to say; it keeps the end.
const LOG: usize = 64 * 1024;
/// Its last lines, that are shown.
const LINES: usize = 3;

/// `struct bpf_insn`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Instruction {
    pub(crate) code: u8,
    /// The destination's register, and in the upper half the source's.
    pub(crate) registers: u8,
    pub(crate) offset: i16,
    pub(crate) immediate: i32,
}

/// Bytes of a [`Request`].
pub(crate) const REQUEST_BYTES: i32 = 16;
/// Bytes of a [`Function`].
const FUNCTION_BYTES: u32 = 8;

/// `struct bpf_func_info`: where a function of a program begins, and its type.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Function {
    pub(crate) at: u32,
    pub(crate) type_id: u32,
}

/// What a program is asked or told: the argument of an ioctl that no driver has.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Request {
    /// The program's own; another program does not look at the rest.
    pub(crate) secret: u64,
    pub(crate) part: u32,
    /// What is kept away from now on.
    pub(crate) kinds: u32,
}

/// Of BPF_MAP_CREATE.
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

/// Of BPF_PROG_LOAD.
#[derive(Default)]
#[repr(C)]
struct Load {
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

/// Of BPF_BTF_LOAD.
#[derive(Default)]
#[repr(C)]
struct Types {
    btf: u64,
    btf_log_buf: u64,
    btf_size: u32,
    btf_log_size: u32,
    btf_log_level: u32,
    unused: u32,
}

/// Of BPF_LINK_CREATE.
#[derive(Default)]
#[repr(C)]
struct Link {
    prog_fd: u32,
    target_fd: u32,
    attach_type: u32,
    flags: u32,
}

const _: () = {
    assert!(size_of::<Instruction>() == 8);
    assert!(size_of::<Function>() == FUNCTION_BYTES as usize);
    assert!(size_of::<Request>() == REQUEST_BYTES as usize);
    assert!(offset_of!(Request, part) == 8);
    assert!(offset_of!(Request, kinds) == 12);
    assert!(size_of::<Map>() == 44);
    assert!(offset_of!(Map, map_name) == 28);
    assert!(size_of::<Load>() == 112);
    assert!(offset_of!(Load, prog_name) == 48);
    assert!(offset_of!(Load, func_info) == 80);
    assert!(offset_of!(Load, attach_btf_id) == 108);
    assert!(size_of::<Types>() == 32);
    assert!(size_of::<Link>() == 16);
};

/// # Safety
/// The addresses in the argument are of what they should be, and as long as it says.
unsafe fn bpf<T>(command: libc::c_int, argument: &T) -> io::Result<OwnedFd> {
    // SAFETY: an argument of the length that is told; for the addresses in it the caller answers.
    let done = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(argument), size_of::<T>()) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    let number = RawFd::try_from(done).map_err(io::Error::other)?;
    // SAFETY: just opened (with close-on-exec), and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// A hash table of 4 bytes by `key` bytes; all its memory, for that many `entries`, is taken at once.
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

/// Types of a program, as BTF.
pub(crate) fn load_types(btf: &[u8]) -> io::Result<OwnedFd> {
    let argument = Types { btf: address(btf), btf_size: count(btf), ..Types::default() };
    // SAFETY: the bytes outlive the call.
    unsafe { bpf(BPF_BTF_LOAD, &argument) }
}

/// Loads a program for the hook whose function has the type `hook` in the kernel. It may sleep, and its functions be called by loops, if it comes with
/// their types. And what the verifier said, if it refused.
pub(crate) fn load(
    code: &[Instruction],
    typed: Option<(&OwnedFd, &[Function])>,
    hook: u32,
) -> (io::Result<OwnedFd>, String) {
    let mut argument = Load {
        prog_type: BPF_PROG_TYPE_LSM,
        insn_cnt: count(code),
        insns: address(code),
        license: LICENSE.as_ptr() as u64,
        expected_attach_type: BPF_LSM_MAC,
        attach_btf_id: hook,
        ..Load::default()
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
    // Again, to be told why.
    let mut log = vec![0_u8; LOG];
    argument.log_level = 1;
    argument.log_size = count(&log);
    argument.log_buf = log.as_mut_ptr() as u64;
    // SAFETY: as above; the log has the room that is told, and nobody looks at it meanwhile.
    let again = unsafe { bpf(BPF_PROG_LOAD, &argument) };
    // ENOSPC: it had more to say than there is room for.
    let loaded = if again.is_ok() { again } else { loaded };
    let text = String::from_utf8_lossy(&log);
    let lines: Vec<&str> = text.trim_end_matches('\0').lines().collect();
    (loaded, lines[lines.len().saturating_sub(LINES)..].iter().map(|line| format!("\n{line}")).collect())
}

/// Has a program run at its hook, as long as what this gives is open.
pub(crate) fn attach(program: &OwnedFd) -> io::Result<OwnedFd> {
    let argument = Link { prog_fd: number(program), attach_type: BPF_LSM_MAC, ..Link::default() };
    // SAFETY: it has no addresses.
    unsafe { bpf(BPF_LINK_CREATE, &argument) }
}

/// The kernel's release.
pub(crate) fn release() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned()
}

/// The errno of an ioctl that no driver has, which a program may answer; 0 if it succeeded.
pub(crate) fn ask(file: BorrowedFd<'_>, number: u32, request: &Request) -> i32 {
    let argument: *const Request = request;
    // SAFETY: its number says that it is written for the kernel to read, and how long it is; no driver has it.
    let asked = unsafe { libc::ioctl(file.as_raw_fd(), libc::c_ulong::from(number), argument) };
    if asked < 0 { io::Error::last_os_error().raw_os_error().unwrap_or(0) } else { 0 }
}

/// A number that nobody can guess.
pub(crate) fn random() -> io::Result<u64> {
    let mut bytes = [0_u8; 8];
    // SAFETY: it writes so many bytes at most, which are there.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got == 8 { Ok(u64::from_ne_bytes(bytes)) } else { Err(io::Error::last_os_error()) }
}

fn address<T>(of: &[T]) -> u64 {
    of.as_ptr() as u64
}

/// A program of ours is some hundred instructions.
fn count<T>(of: &[T]) -> u32 {
    u32::try_from(of.len()).unwrap_or(u32::MAX)
}

/// A descriptor as structs and instructions have it.
pub(crate) fn number(fd: &OwnedFd) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}
