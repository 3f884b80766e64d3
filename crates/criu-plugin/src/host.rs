// SPDX-License-Identifier: MIT OR Apache-2.0
//! The functions of CRIU that a plugin can call.

use std::ffi::CStr;
use std::fmt;
use std::marker::PhantomData;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::abi::{self, LogLevel};

/// Whether the plugin's name is in the inventory of the image that is dumped. A process loads a plugin once.
static RECORDED: AtomicBool = AtomicBool::new(false);

/// Why a function of the host failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    /// The program that loaded the plugin does not have the function.
    #[error("this CRIU has no {0}: expected CRIU 4.1 or newer; use such a one")]
    Missing(&'static str),
    /// CRIU's process tree has no root, or has another layout.
    #[error(
        "CRIU's root_item cannot be read: {0}; expected CRIU 4.1 to 4.2, or one with the same \
         struct pstree_item"
    )]
    NoRoot(String),
    /// The function failed; CRIU has logged the reason.
    #[error("CRIU's {0} failed: see the line of its log before this one")]
    Failed(&'static str),
}

/// The CRIU that called a hook. It cannot leave the hook's thread: CRIU's functions, its log included, must
/// be called from CRIU's own thread.
#[derive(Debug)]
pub struct Host {
    name: &'static CStr,
    own_thread: PhantomData<*const ()>,
}

impl Host {
    pub(crate) fn new(name: &'static CStr) -> Self {
        Self { name, own_thread: PhantomData }
    }

    /// Logs an error.
    pub fn error(&self, message: impl fmt::Display) {
        abi::log(LogLevel::Error, &format!("Error ({}): {message}", self.name()));
    }

    /// Logs a warning.
    pub fn warn(&self, message: impl fmt::Display) {
        abi::log(LogLevel::Warn, &format!("Warn  ({}): {message}", self.name()));
    }

    /// Logs what an operator may want to know (`-v3`).
    pub fn info(&self, message: impl fmt::Display) {
        abi::log(LogLevel::Info, &format!("{}: {message}", self.name()));
    }

    /// Logs what a developer may want to know (`-v4`).
    pub fn debug(&self, message: impl fmt::Display) {
        abi::log(LogLevel::Debug, &format!("{}: {message}", self.name()));
    }

    /// The file that CRIU logs to, for a process that outlives CRIU.
    ///
    /// # Errors
    /// [`HostError`]
    pub fn log_file(&self) -> Result<BorrowedFd<'_>, HostError> {
        abi::log_file()?.ok_or(HostError::Failed("log_get_fd"))
    }

    fn name(&self) -> std::borrow::Cow<'static, str> {
        self.name.to_string_lossy()
    }

    /// The image directory, also in tasks that are being restored.
    ///
    /// # Errors
    /// [`HostError`]
    pub fn image_dir(&self) -> Result<BorrowedFd<'_>, HostError> {
        abi::image_dir()?.ok_or(HostError::Failed("criu_get_image_dir"))
    }

    /// Makes this restore a lazy one, as `--lazy-pages` does: CRIU connects to `lazy-pages.socket` in its
    /// work directory. Only [`crate::Plugin::init`] may call it, because CRIU looks at the option after that.
    ///
    /// # Errors
    /// [`HostError`]: CRIU restores as it would have done.
    pub fn restore_lazily(&self) -> Result<(), HostError> {
        if abi::add_option(c"--lazy-pages")? { Ok(()) } else { Err(HostError::Failed("parse_options")) }
    }

    /// Adds the plugin's name to the image: a restore then requires the plugin. It may be called any number
    /// of times in one dump; the name is added once.
    ///
    /// # Errors
    /// [`HostError`]
    pub fn record_in_inventory(&self) -> Result<(), HostError> {
        if !RECORDED.load(Ordering::Relaxed) {
            non_negative("add_inventory_plugin", abi::add_inventory_plugin(self.name)?)?;
            RECORDED.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Whether the image names the plugin. The first call in a restore removes the name from the list.
    /// Returns true for images without a list (before CRIU 4.1).
    pub(crate) fn take_from_inventory(&self) -> bool {
        abi::check_and_remove_inventory_plugin(self.name).unwrap_or(true)
    }

    /// Puts a copy of a descriptor into the store that all processes of this restore share. Returns its id.
    ///
    /// # Errors
    /// [`HostError`]
    pub fn store_fd(&self, fd: BorrowedFd<'_>) -> Result<i32, HostError> {
        non_negative("fdstore_add", abi::fdstore_add(fd)?)
    }

    /// Returns a copy of a descriptor in that store.
    ///
    /// # Errors
    /// [`HostError`]
    pub fn stored_fd(&self, id: i32) -> Result<OwnedFd, HostError> {
        abi::fdstore_get(id)?.ok_or(HostError::Failed("fdstore_get"))
    }

    /// The unique name of this run of CRIU.
    ///
    /// # Errors
    /// [`HostError::Missing`]
    pub fn run_id(&self) -> Result<String, HostError> {
        abi::run_id()
    }

    /// The root of the tree that is dumped, in this process's pid namespace. It is known from
    /// [`crate::Plugin::init`] on. CRIU has no function for it.
    ///
    /// # Errors
    /// [`HostError`]
    pub fn root_pid(&self) -> Result<i32, HostError> {
        abi::root_pid()
    }

    /// Whether CRIU calls [`crate::Plugin::post_forking`], and has the store when a restore's plugin is made
    /// (CRIU 4.2).
    #[must_use]
    pub fn has_post_forking(&self) -> bool {
        abi::has_post_forking()
    }
}

fn non_negative(function: &'static str, result: i32) -> Result<i32, HostError> {
    if result < 0 { Err(HostError::Failed(function)) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_missing_function_is_named() {
        let host = Host::new(c"test");
        assert_eq!(host.image_dir().unwrap_err(), HostError::Missing("criu_get_image_dir"));
        assert_eq!(host.store_fd(std::io::stdin().as_fd()), Err(HostError::Missing("fdstore_add")));
        assert_eq!(host.log_file().unwrap_err(), HostError::Missing("log_get_fd"));
        assert_eq!(host.root_pid(), Err(HostError::Missing("root_item")));
        let text = host.run_id().unwrap_err().to_string();
        assert_eq!(text, "this CRIU has no criu_run_id: expected CRIU 4.1 or newer; use such a one");
    }
}
