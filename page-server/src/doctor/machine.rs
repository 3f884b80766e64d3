// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads facts about this machine, without verdicts.

use std::io;

use nix::sys::resource::{Resource, getrlimit};
use rewake_image_io::{BufferSlice, Engine};
use rewake_process::names::field;
use rewake_uffd::Uffd;

use super::gpu_machine::DEFAULT;
use super::kernel::{FEATURES, Kernel};
use super::plugin;
use rewake_plugin_protocol::plugin_folder;

/// cachestat(2): the same number on every architecture except alpha.
const SYS_CACHESTAT: libc::c_long = 451;

/// Returns the kernel's release and the machine.
#[must_use]
pub fn kernel() -> Kernel {
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten();
    Kernel {
        release: text("/proc/sys/kernel/osrelease").unwrap_or_default(),
        machine: std::env::consts::ARCH,
        page_bytes: page.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0),
    }
}

/// Returns the effective capabilities, as the kernel's bits.
#[must_use]
pub fn capabilities() -> u64 {
    let status = std::fs::read("/proc/self/status").unwrap_or_default();
    field(&status, "CapEff:").and_then(|digits| u64::from_str_radix(digits, 16).ok()).unwrap_or(0)
}

/// Opens a userfaultfd and returns the names of the features of [`FEATURES`] that it lacks.
///
/// # Errors
/// The kernel refuses to open one.
pub fn userfaultfd() -> io::Result<Vec<&'static str>> {
    Uffd::open(0)?;
    Ok(FEATURES.iter().filter(|(bit, _)| !userfaultfd_feature(*bit)).map(|(_, name)| *name).collect())
}

/// Returns whether a userfaultfd can have this feature.
#[must_use]
pub fn userfaultfd_feature(bit: u64) -> bool {
    Uffd::open(bit).is_ok()
}

/// Sets an engine up as the daemon does. Returns what is missing, or `None` if the engine has io_uring.
///
/// # Errors
/// No engine can be set up.
pub fn io_uring() -> Result<Option<String>, String> {
    let engine = Engine::<BufferSlice>::new(None);
    engine.map(|engine| engine.note().map(str::to_owned)).map_err(|error| error.to_string())
}

/// Returns whether the kernel reports which pages of a file are in the page cache.
#[must_use]
pub fn cachestat() -> bool {
    let nothing = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: -1 is no descriptor: the kernel refuses the call before it reads the pointers.
    unsafe { libc::syscall(SYS_CACHESTAT, -1, nothing, nothing, 0) };
    io::Error::last_os_error().raw_os_error() == Some(libc::EBADF)
}

/// Returns how many descriptors this process may have open (the soft limit).
#[must_use]
pub fn open_files() -> u64 {
    getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft)
}

/// Returns `fs.pipe-max-size` in bytes.
#[must_use]
pub fn pipe_max_size() -> u64 {
    text("/proc/sys/fs/pipe-max-size").and_then(|value| value.parse().ok()).unwrap_or(0)
}

/// Returns the folder whose plugins CRIU loads without `--libdir`.
#[must_use]
pub fn criu_plugins() -> plugin::PluginFolder {
    let path = plugin_folder::variable().unwrap_or_else(|| DEFAULT.into());
    plugin::PluginFolder { has_plugin: path.join(plugin::FILE).is_file(), path }
}

/// Reads a small file, without surrounding blanks. Returns `None` if that fails.
fn text(path: &str) -> Option<String> {
    Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
}
