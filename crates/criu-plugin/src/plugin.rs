// SPDX-License-Identifier: MIT OR Apache-2.0
//! The trait of a plugin, with its hooks.

use std::ffi::CStr;
use std::os::fd::{BorrowedFd, OwnedFd};

use crate::answer::{Answer, MapSource, Refusal, Restored};
use crate::host::Host;

/// The command that CRIU loaded the plugin for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// `criu dump`.
    Dump,
    /// `criu pre-dump`: memory only, and [`Plugin::exit`] is not called.
    PreDump,
    /// `criu restore`.
    Restore {
        /// Whether the image names this plugin, or is too old to name any. An unnamed plugin has nothing to
        /// restore and should refuse with [`Refusal::NotMine`].
        named: bool,
    },
}

/// A CRIU plugin. Hooks that it does not implement return [`Refusal::NotMine`].
///
/// Two hooks never run at the same time. Hooks marked *task* run in the process that is being restored: a
/// fork of CRIU with a copy of the plugin, in the namespaces of the task, with its pid. No other process sees
/// what a task writes into `self`. No thread of it may outlive the hook. Descriptors that stay open must not
/// have a number that the task uses (CRIU's `find_unused_fd_pid`). All other hooks run in CRIU's main
/// process.
///
/// Start no thread before [`Plugin::post_forking`]: CRIU forks with plain `clone`, which copies only one
/// thread but also locks that other threads hold.
#[expect(unused_variables, reason = "the names of arguments are documentation")]
pub trait Plugin: Sized + Send + 'static {
    /// The name in CRIU's log and in the image's inventory.
    const NAME: &'static CStr;

    /// Makes the plugin right after loading. [`Refusal::NotMine`]: the plugin does nothing, and no other hook
    /// is called.
    ///
    /// # Errors
    /// [`Refusal::Failed`] ends CRIU's command.
    fn init(host: &Host, stage: Stage) -> Answer<Self>;

    /// Called at the end, also of a dump or restore that failed (then `result` is not 0). A dump's tasks are
    /// still stopped; a restore's tasks run. All threads must be joined here. It is not called after a
    /// pre-dump. It is called after a panic in another hook, too, to undo what must not stay.
    fn exit(self, host: &Host, stage: Stage, result: i32) {}

    /// Dumps a unix socket (`CR_PLUGIN_HOOK__DUMP_UNIX_SK`).
    ///
    /// # Errors
    /// [`Refusal`]; here and in all hooks below.
    fn dump_unix_socket(&mut self, host: &Host, socket: BorrowedFd<'_>, inode: u32) -> Answer {
        Err(Refusal::NotMine)
    }

    /// *task:* Restores a unix socket (`CR_PLUGIN_HOOK__RESTORE_UNIX_SK`).
    fn restore_unix_socket(&mut self, host: &Host, inode: u32) -> Answer<OwnedFd> {
        Err(Refusal::NotMine)
    }

    /// Dumps an open file that CRIU does not know (`CR_PLUGIN_HOOK__DUMP_EXT_FILE`), before the task's memory
    /// is dumped. `file` is the task's own. `id` names it in the image; a file shared by tasks is dumped
    /// once.
    fn dump_file(&mut self, host: &Host, file: BorrowedFd<'_>, id: u32) -> Answer {
        Err(Refusal::NotMine)
    }

    /// *task:* Restores an open file (`CR_PLUGIN_HOOK__RESTORE_EXT_FILE`), in the first task that has it.
    fn restore_file(&mut self, host: &Host, id: u32) -> Answer<Restored> {
        Err(Refusal::NotMine)
    }

    /// Dumps a mount (`CR_PLUGIN_HOOK__DUMP_EXT_MOUNT`).
    fn dump_mount(&mut self, host: &Host, mountpoint: &CStr, id: i32) -> Answer {
        Err(Refusal::NotMine)
    }

    /// *task:* Restores a mount (`CR_PLUGIN_HOOK__RESTORE_EXT_MOUNT`).
    fn restore_mount(&mut self, host: &Host, id: i32, mountpoint: &CStr, old_root: &CStr) -> Answer {
        Err(Refusal::NotMine)
    }

    /// Dumps a network link (`CR_PLUGIN_HOOK__DUMP_EXT_LINK`).
    fn dump_link(&mut self, host: &Host, index: i32, link_type: i32, kind: &CStr) -> Answer {
        Err(Refusal::NotMine)
    }

    /// Decides whether a mapped device can be dumped (`CR_PLUGIN_HOOK__HANDLE_DEVICE_VMA`). `Ok` makes CRIU
    /// keep the mapping and call [`Plugin::update_mapping`] at the restore. `file` may be usable for `fstat`
    /// only. It is called once for a row of mappings of one file, also in pre-dumps. If no plugin returns
    /// `Ok`, the dump fails.
    fn handle_device_mapping(&mut self, host: &Host, file: BorrowedFd<'_>, status: &libc::stat) -> Answer {
        Err(Refusal::NotMine)
    }

    /// *task:* Returns what to map in the place of a mapped device (`CR_PLUGIN_HOOK__UPDATE_VMA_MAP`). It is
    /// called in every task with the mapping, when the task's files are restored. `address` and `offset` are
    /// those at the dump, in bytes. CRIU has no errors here: this crate returns a descriptor that cannot be
    /// mapped, so that the restore fails.
    fn update_mapping(&mut self, host: &Host, path: &CStr, address: u64, offset: u64) -> Answer<MapSource> {
        Err(Refusal::NotMine)
    }

    /// Called when all memory of a restored task is in place and the task is about to run
    /// (`CR_PLUGIN_HOOK__RESUME_DEVICES_LATE`). `pid` is in CRIU's pid namespace. **CRIU ignores an error**:
    /// it is only logged.
    fn resume_devices_late(&mut self, host: &Host, pid: i32) -> Answer {
        Err(Refusal::NotMine)
    }

    /// Called before a task is stopped (`CR_PLUGIN_HOOK__PAUSE_DEVICES`, CRIU 4.0). It may be called twice,
    /// or for a task that ends meanwhile; also in pre-dumps.
    fn pause_devices(&mut self, host: &Host, pid: i32) -> Answer {
        Err(Refusal::NotMine)
    }

    /// Called when all tasks are stopped and nothing is dumped yet (`CR_PLUGIN_HOOK__CHECKPOINT_DEVICES`,
    /// CRIU 4.0).
    fn checkpoint_devices(&mut self, host: &Host, pid: i32) -> Answer {
        Err(Refusal::NotMine)
    }

    /// Called when the first task is forked (`CR_PLUGIN_HOOK__POST_FORKING`, CRIU 4.2). From now on threads
    /// may be started, with all signals blocked.
    fn post_forking(&mut self, host: &Host) -> Answer {
        Err(Refusal::NotMine)
    }

    /// Called before the first task is forked (`CR_PLUGIN_HOOK__RESTORE_INIT`, after CRIU 4.2).
    fn restore_init(&mut self, host: &Host) -> Answer {
        Err(Refusal::NotMine)
    }

    /// Called when all tasks are dumped (`CR_PLUGIN_HOOK__DUMP_DEVICES_LATE`, after CRIU 4.2). It is not
    /// called when the dump has failed: [`Plugin::exit`] is.
    fn dump_devices_late(&mut self, host: &Host, pid: i32) -> Answer {
        Err(Refusal::NotMine)
    }
}
