// SPDX-License-Identifier: MIT OR Apache-2.0
//! CRIU's plugin interface (`criu-plugin.h`) and all unsafe code.
//!
//! - [`descriptor`]: the object that CRIU finds, and how it is fitted to the host.
//! - [`entry`]: the C functions that CRIU calls.
//! - [`symbols`]: CRIU's functions that plugins call.
//! - [`mark`]: identifies CRIU's main process.

mod descriptor;
mod entry;
mod mark;
mod symbols;

pub(crate) use descriptor::has_post_forking;
pub use descriptor::{Descriptor, HOOKS, Registered};
pub(crate) use mark::ProcessMark;
pub(crate) use symbols::{
    LogLevel, add_inventory_plugin, add_option, check_and_remove_inventory_plugin, fdstore_add, fdstore_get,
    image_dir, log, log_file, root_pid, run_id,
};
