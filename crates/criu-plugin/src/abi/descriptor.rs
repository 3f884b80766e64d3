// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cr_plugin_desc_t`: the object that describes a plugin to CRIU.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{entry, symbols};
use crate::plugin::Plugin;
use crate::runtime::PluginSlot;

/// Hooks that this crate knows (`CR_PLUGIN_HOOK__MAX` of the development branch).
pub const HOOKS: u32 = 15;
/// Hooks that every CRIU since 3.17 has, for a host whose number is unknown.
const MIN_HOOKS: u32 = 10;
/// The first number of hooks with which CRIU can call `RESTORE_EXT_FILE` again.
const WITH_RETRY: u32 = 14;
/// The first number of hooks with `POST_FORKING`.
const WITH_FORKING: u32 = 13;
/// `CRIU_PLUGIN_VERSION`, 0.2.0: the same since CRIU 1.4.
const VERSION: c_uint = 2 << 8;

/// A type that [`crate::register!`] made the plugin of this `cdylib`.
pub trait Registered: Plugin {
    /// The slot of its instance.
    fn slot() -> &'static PluginSlot<Self>;
}

/// `cr_plugin_desc_t`; [`crate::register!`] makes it. Only [`Descriptor::of`] makes one, so that each hook is
/// in its place.
#[repr(C)]
#[derive(Debug)]
pub struct Descriptor {
    name: *const c_char,
    init: extern "C" fn(c_int) -> c_int,
    exit: extern "C" fn(c_int, c_int),
    version: c_uint,
    max_hooks: AtomicU32,
    hooks: [*const c_void; HOOKS as usize],
}

const _: () = {
    assert!(size_of::<Descriptor>() == 152);
    assert!(offset_of!(Descriptor, init) == 8);
    assert!(offset_of!(Descriptor, exit) == 16);
    assert!(offset_of!(Descriptor, version) == 24);
    assert!(offset_of!(Descriptor, max_hooks) == 28);
    assert!(offset_of!(Descriptor, hooks) == 32);
};

// SAFETY: the pointers are to constants and functions; `max_hooks` is atomic.
unsafe impl Sync for Descriptor {}

impl Descriptor {
    /// Makes the descriptor of a plugin, for the oldest host until [`Descriptor::fit_to_host`].
    #[must_use]
    pub const fn of<P: Registered>() -> Self {
        Self {
            name: P::NAME.as_ptr(),
            init: entry::init::<P>,
            exit: entry::exit::<P>,
            version: VERSION,
            max_hooks: AtomicU32::new(MIN_HOOKS),
            // In the order of CRIU's enumeration: each function has the prototype of its place.
            hooks: [
                entry::dump_unix_sk::<P> as *const c_void,
                entry::restore_unix_sk::<P> as *const c_void,
                entry::dump_ext_file::<P> as *const c_void,
                entry::restore_ext_file::<P> as *const c_void,
                entry::dump_ext_mount::<P> as *const c_void,
                entry::restore_ext_mount::<P> as *const c_void,
                entry::dump_ext_link::<P> as *const c_void,
                entry::handle_device_vma::<P> as *const c_void,
                entry::update_vma_map::<P> as *const c_void,
                entry::resume_devices_late::<P> as *const c_void,
                entry::pause_devices::<P> as *const c_void,
                entry::checkpoint_devices::<P> as *const c_void,
                entry::post_forking::<P> as *const c_void,
                entry::restore_init::<P> as *const c_void,
                entry::dump_devices_late::<P> as *const c_void,
            ],
        }
    }

    /// Sets `max_hooks` to what the host knows. With more hooks CRIU would end; with less it would not call
    /// all.
    pub fn fit_to_host(&self) {
        self.max_hooks.store(hooks_of_host().unwrap_or(MIN_HOOKS).min(HOOKS), Ordering::Relaxed);
    }
}

/// Whether the host passes a second argument to `RESTORE_EXT_FILE`.
pub(crate) fn restore_file_can_wait() -> bool {
    hooks_of_host().is_some_and(|hooks| hooks >= WITH_RETRY)
}

/// Whether the host calls `POST_FORKING`.
pub(crate) fn has_post_forking() -> bool {
    hooks_of_host().is_some_and(|hooks| hooks >= WITH_FORKING)
}

/// `CR_PLUGIN_HOOK__MAX` of the host. It follows from the size of the object `cr_plugin_ctl`, which has one
/// list head and one more per hook.
fn hooks_of_host() -> Option<u32> {
    /// `RTLD_DL_SYMENT` of `dlfcn.h`
    const SYMBOL: c_int = 1;
    let address = symbols::find(c"cr_plugin_ctl")?;
    // SAFETY: plain data, for which zeros are fine.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    let mut symbol = std::ptr::null_mut::<c_void>();
    // SAFETY: any address is valid; both results are live.
    let found = unsafe { libc::dladdr1(address.as_ptr(), &raw mut info, &raw mut symbol, SYMBOL) };
    if found == 0 || symbol.is_null() {
        return None;
    }
    // SAFETY: with this flag the result is an entry of the loaded object's symbol table.
    let size = unsafe { (*symbol.cast::<libc::Elf64_Sym>()).st_size };
    hooks_by_size(size)
}

/// Returns `None` if CRIU's object has another layout.
fn hooks_by_size(size: u64) -> Option<u32> {
    const LIST_HEAD: u64 = 2 * size_of::<*const c_void>() as u64;
    let heads = u32::try_from(size / LIST_HEAD).ok()?;
    let whole = size.is_multiple_of(LIST_HEAD);
    heads.checked_sub(1).filter(|hooks| whole && *hooks >= MIN_HOOKS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_hooks_follows_from_the_size_of_criu_s_object() {
        assert_eq!(hooks_by_size(0xd0), Some(12), "CRIU 4.1.1");
        assert_eq!(hooks_by_size(0xe0), Some(13), "CRIU 4.2.1");
        assert_eq!(hooks_by_size(0x100), Some(15), "the development branch of November 2025");
        for other in [0, 0x10, 0xa0, 0xe8, u64::MAX] {
            assert_eq!(hooks_by_size(other), None, "{other:#x}");
        }
        assert_eq!(hooks_of_host(), None, "a test is not CRIU");
    }
}
