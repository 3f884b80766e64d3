// SPDX-License-Identifier: MIT OR Apache-2.0
//! CRIU plugins in Rust. A crate of type `cdylib` implements [`Plugin`] and passes it to [`register!`]:
//!
//! ```
//! use std::os::fd::{AsFd, BorrowedFd};
//! use rewake_criu_plugin::{Answer, Host, Plugin, Refusal, Stage, register};
//!
//! struct Terminal;
//!
//! impl Plugin for Terminal {
//!     const NAME: &'static std::ffi::CStr = c"terminal_plugin";
//!
//!     fn init(host: &Host, stage: Stage) -> Answer<Self> {
//!         host.info(format_args!("loaded for {stage:?}"));
//!         Ok(Self)
//!     }
//!
//!     fn dump_file(&mut self, host: &Host, file: BorrowedFd<'_>, id: u32) -> Answer {
//!         let copy = file.try_clone_to_owned()?;
//!         host.record_in_inventory()?;
//!         Err(Refusal::NotMine)
//!     }
//! }
//!
//! register!(Terminal);
//! # fn main() {}
//! ```
//!
//! This crate takes care of:
//!
//! - **One binary for every CRIU.** A CRIU refuses a plugin with more hooks than it knows, and ends. So the
//!   descriptor is fitted to the host while it is loaded; CRIU never calls a hook that it does not know. All
//!   functions of the host are resolved at run time, so that the file loads anywhere. A missing function
//!   gives [`HostError::Missing`].
//! - **Errors and panics** in a hook become one line in CRIU's log and a failed dump or restore; nothing
//!   unwinds into CRIU.
//! - **Processes.** Hooks of the restore run in the restored tasks, which are forks of CRIU with a copy of
//!   the plugin. Hooks of CRIU's main process (see [`Plugin`]) are refused in any other process.
//! - **The inventory.** The plugin's name is added to the image once, and checked once.
//!
//! Sources: CRIU 4.1.1 and 4.2.1; the signatures of later versions are from its development branch of
//! November 2025.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]

mod abi;
mod answer;
mod host;
mod plugin;
mod runtime;

pub use abi::{Descriptor, HOOKS, Registered};
pub use answer::{Answer, MapSource, Refusal, Restored};
pub use host::{Host, HostError};
pub use plugin::{Plugin, Stage};
pub use runtime::PluginSlot;

/// Makes a type the plugin of this `cdylib`: exports `CR_PLUGIN_DESC` and fits it to the CRIU that loads it.
///
/// Use it once per `cdylib`, which must be built with unwinding panics, as cargo does by default.
#[macro_export]
macro_rules! register {
    ($plugin:ty) => {
        const _: () = {
            assert!(
                cfg!(panic = "unwind"),
                "a CRIU plugin must catch panics: build it with panic = \"unwind\""
            );

            static SLOT: $crate::PluginSlot<$plugin> = $crate::PluginSlot::new();

            impl $crate::Registered for $plugin {
                fn slot() -> &'static $crate::PluginSlot<Self> {
                    &SLOT
                }
            }

            #[unsafe(no_mangle)]
            pub static CR_PLUGIN_DESC: $crate::Descriptor = $crate::Descriptor::of::<$plugin>();

            extern "C" fn fit_to_host() {
                CR_PLUGIN_DESC.fit_to_host();
            }

            // Runs during CRIU's dlopen, before CRIU reads the descriptor.
            #[used]
            #[unsafe(link_section = ".init_array")]
            static ON_LOAD: extern "C" fn() = fit_to_host;
        };
    };
}
