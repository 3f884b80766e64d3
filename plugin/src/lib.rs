// SPDX-License-Identifier: MIT OR Apache-2.0
//! CRIU's plugin for AMD GPUs. It has the name and the image files of CRIU's own plugin, so that either
//! restores what the other dumped. Without GPU state it steps aside, and dumps and restores run as without
//! it.
//!
//! * [`dump`]: evicts the processes' queues, writes GPU state and memory, and resumes the queues when CRIU
//!   has finished.
//! * [`restore`]: makes GPU state in the restored tasks, loads memory, and starts the queues once.
//! * [`contents`]: saves and loads the memory of buffers. `buffers`: finds the buffer of a mapping.
//! * `shared`, in both: buffers that processes share, open dma-bufs, two `/dev/kfd`s of one process. CRIU's
//!   images cannot hold them: `rewake-shared.img` does. CRIU's own plugin ignores that file and restores
//!   copies.
//! * `hsakmt`: what ROCm's library shares between processes. `abi`: the only `unsafe` code.
//! * `criu_watchdog`: resumes queues or kills tasks when CRIU is killed. `device`: identifies files of AMD
//!   GPUs.
//! * `image`: the image's files. [`topology`]: the machine's nodes, as images describe them.
//! * [`placement`]: finds a GPU of this machine for each GPU of the image.
#![deny(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::unwrap_used))]

#[allow(unsafe_code, reason = "system calls that no crate has")]
mod abi;
mod buffers;
mod contents;
mod criu_watchdog;
mod device;
mod dump;
mod hsakmt;
mod image;
pub mod placement;
mod polling;
mod restore;
pub mod topology;

use std::ffi::CStr;
use std::os::fd::BorrowedFd;
use std::path::Path;

use rewake_criu_plugin::{Answer, Host, MapSource, Plugin, Refusal, Restored, Stage, register};
use rewake_plugin_session::{Dumped, Parking, PluginImages, restore_lazily};

use device::Devices;
use dump::Dump;
use image::Images;
use restore::Restore;

/// The plugin of one CRIU command.
#[derive(Debug)]
enum Amdgpu {
    Dump(Box<Dump>, DumpWait),
    Restore(Box<Restore>, Parking),
}

/// The missing memory that a dump waited for before CRIU stopped any task; none for a pre-dump, which does
/// not wait.
type DumpWait = Option<Dumped>;

register!(Amdgpu);

impl Plugin for Amdgpu {
    const NAME: &'static CStr = c"amdgpu_plugin";

    fn init(host: &Host, stage: Stage) -> Answer<Self> {
        let aside = |why| {
            host.info(format_args!("{why}: stepping aside"));
            Err(Refusal::NotMine)
        };
        match stage {
            Stage::Dump | Stage::PreDump => {
                // Also without a GPU: CRIU may have no `rewake_plugin.so`.
                let waited = (stage == Stage::Dump).then(|| Dumped::wait(host)).transpose()?;
                let devices = Devices::of_machine(Path::new(device::CLASS))?;
                if !devices.has_gpus() {
                    return aside("this machine has no AMD GPU");
                }
                Ok(Self::Dump(Box::new(Dump::new(devices)), waited))
            }
            // CRIU's own plugin is not in the inventory if no render node was mapped.
            Stage::Restore { named } => match Images::read(host.image_dir()?)? {
                Some(images) => {
                    restore_lazily(host, PluginImages::WithGpus)?;
                    Ok(Self::Restore(Box::new(Restore::new(host, images)?), Parking::new()))
                }
                None => {
                    if named {
                        image::refuse_stream(host.image_dir()?)?;
                    }
                    aside("the image has no AMD GPU's state")
                }
            },
        }
    }

    fn exit(self, host: &Host, _: Stage, result: i32) {
        match self {
            Self::Dump(dump, _) => dump.end(host),
            Self::Restore(restore, _) => restore.end(host, result),
        }
    }

    fn handle_device_mapping(&mut self, host: &Host, _: BorrowedFd<'_>, status: &libc::stat) -> Answer {
        self.dumping()?.mapping(host, status)
    }

    fn checkpoint_devices(&mut self, _: &Host, pid: i32) -> Answer {
        self.dumping()?.task(pid)?;
        // CRIU then asks other plugins, too.
        Err(Refusal::NotMine)
    }

    fn dump_file(&mut self, host: &Host, file: BorrowedFd<'_>, id: u32) -> Answer {
        self.dumping()?.file(host, file, id)
    }

    fn restore_file(&mut self, host: &Host, id: u32) -> Answer<Restored> {
        self.restoring()?.file(host, id)
    }

    fn update_mapping(&mut self, host: &Host, path: &CStr, address: u64, offset: u64) -> Answer<MapSource> {
        self.restoring()?.mapping(host, &path.to_string_lossy(), address, offset)
    }

    fn post_forking(&mut self, host: &Host) -> Answer {
        self.restoring()?.post_forking(host);
        // CRIU then asks other plugins, too.
        Err(Refusal::NotMine)
    }

    fn resume_devices_late(&mut self, host: &Host, pid: i32) -> Answer {
        // Before a queue runs, and before this plugin sets PTRACE_O_EXITKILL: parking sets the trace's
        // options, too.
        if let Self::Restore(_, parking) = self {
            parking.task(host, pid);
        }
        self.restoring()?.resume(host, pid)
    }

    fn pause_devices(&mut self, _: &Host, pid: i32) -> Answer {
        if let Self::Dump(_, Some(waited)) = self {
            waited.check(pid)?;
        }
        // CRIU then asks other plugins, too.
        Err(Refusal::NotMine)
    }
}

impl Amdgpu {
    fn dumping(&mut self) -> Answer<&mut Dump> {
        if let Self::Dump(dump, _) = self { Ok(dump) } else { Err(Refusal::NotMine) }
    }

    fn restoring(&mut self) -> Answer<&mut Restore> {
        if let Self::Restore(restore, _) = self { Ok(restore) } else { Err(Refusal::NotMine) }
    }
}
