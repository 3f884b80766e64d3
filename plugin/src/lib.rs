// SPDX-License-Identifier: MIT OR Apache-2.0
//! CRIU's plugin for AMD GPUs, by the name, and with the image files, of CRIU's own one: what one dumps the other
//! restores. Where nothing belongs to a GPU it steps aside: dumps and restores go as if it were not there.
//!
//! * [`dump`]: processes paused, their GPU state and memory written, paused until CRIU has their memory, too.
//! * [`restore`]: GPU state made anew in the restored tasks, memory loaded, queues started once.
//! * [`contents`]: the memory of buffers, to and from the image. `buffers`: which of them a mapping shows.
//! * `shared`, in both: buffers that processes have in common, open dma-bufs, two `/dev/kfd`s of one process. CRIU's
//!   images have no place for that: `rewake-shared.img` has it, beside what CRIU's own plugin restores as copies.
//! * `hsakmt`: what ROCm's library shares between processes. `abi`, `kcmp`: the only `unsafe` code.
//! * `guard`: what is done when CRIU itself is killed. `device`: whether a file is an AMD GPU's.
//! * `image`: the image's files. `topology`: the machine as images tell it.
#![deny(unsafe_code)]

#[allow(unsafe_code, reason = "the one place for it")]
mod abi;
mod buffers;
mod contents;
mod criu_watchdog;
mod device;
mod dump;
mod hsakmt;
mod image;
#[allow(unsafe_code, reason = "the system call has no other form")]
mod kcmp;
mod restore;
mod topology;

use std::ffi::CStr;
use std::os::fd::BorrowedFd;
use std::path::Path;

use rewake_criu_plugin::{Answer, Host, Mapping, Plugin, Refusal, Restored, Stage, register};
use rewake_plugin_session::{Dumped, Parking};

use device::Devices;
use dump::Dump;
use image::Images;
use restore::Restore;

/// The plugin of one CRIU command.
#[derive(Debug)]
enum Amdgpu {
    Dump(Box<Dump>, Waited),
    Restore(Box<Restore>, Parking),
}

/// What a dump waited for, before CRIU stopped anything; a pre-dump waits for nothing.
type Waited = Option<Dumped>;

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
                // Also without a GPU: this may be the only plugin of ours that CRIU has.
                let waited = (stage == Stage::Dump).then(|| Dumped::wait(host)).transpose()?;
                let devices = Devices::of_machine(Path::new(device::CLASS))?;
                if !devices.any() {
                    return aside("this machine has no AMD GPU");
                }
                Ok(Self::Dump(Box::new(Dump::new(devices)), waited))
            }
            // The stock plugin does not name itself where no render node is mapped.
            Stage::Restore { named } => match Images::read(host.image_dir()?)? {
                Some(images) => Ok(Self::Restore(Box::new(Restore::new(host, images)?), Parking::new())),
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
        // Other plugins have something to do then.
        Err(Refusal::NotMine)
    }

    fn dump_file(&mut self, host: &Host, file: BorrowedFd<'_>, id: u32) -> Answer {
        self.dumping()?.file(host, file, id)
    }

    fn restore_file(&mut self, host: &Host, id: u32) -> Answer<Restored> {
        self.restoring()?.file(host, id)
    }

    fn update_mapping(&mut self, host: &Host, path: &CStr, address: u64, offset: u64) -> Answer<Mapping> {
        self.restoring()?.mapping(host, &path.to_string_lossy(), address, offset)
    }

    fn post_forking(&mut self, host: &Host) -> Answer {
        self.restoring()?.forked(host);
        // Other plugins have something to do then.
        Err(Refusal::NotMine)
    }

    fn resume_devices_late(&mut self, host: &Host, pid: i32) -> Answer {
        // Before a queue runs, and before the tasks are tied to CRIU by options of its trace, which parking sets anew.
        if let Self::Restore(_, parking) = self {
            parking.task(host, pid);
        }
        self.restoring()?.resume(host, pid)
    }

    fn pause_devices(&mut self, _: &Host, pid: i32) -> Answer {
        if let Self::Dump(_, Some(waited)) = self {
            waited.check(pid)?;
        }
        // Other plugins have something to do then.
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
