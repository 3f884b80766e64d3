// SPDX-License-Identifier: MIT OR Apache-2.0
//! CRIU's plugin for AMD GPUs, by the name of CRIU's own one.
//!
//! Today it knows what belongs to a GPU and refuses to dump or restore it, with a line that says so. Where nothing does,
//! it steps aside: dumps and restores of other processes go as if it were not there.
//!
//! * `device`: whether a file is an AMD GPU's.
//! * `image`: whether an image holds the state of one.
#![deny(unsafe_code)]

mod device;
mod image;

use std::ffi::CStr;
use std::os::fd::BorrowedFd;
use std::path::Path;

use rewake_criu_plugin::{Answer, Host, Mapping, Plugin, Refusal, Restored, Stage, register};

use device::Devices;

/// GPU state where none can be handled.
#[derive(Debug, thiserror::Error)]
enum Unable {
    /// In a process.
    #[error("{0} is in use, and this amdgpu_plugin.so cannot dump GPUs yet: use the one of CRIU")]
    Dump(String),
    /// In an image.
    #[error("{0}: GPU state, which this amdgpu_plugin.so cannot restore yet: use the one of CRIU")]
    Restore(String),
}

/// The plugin of one CRIU command.
#[derive(Debug)]
struct Amdgpu {
    devices: Devices,
}

register!(Amdgpu);

impl Plugin for Amdgpu {
    const NAME: &'static CStr = c"amdgpu_plugin";

    fn init(host: &Host, stage: Stage) -> Answer<Self> {
        let devices = Devices::of_machine(Path::new("/sys/class/kfd/kfd"))?;
        let aside = match stage {
            Stage::Dump | Stage::PreDump if !devices.any() => "this machine has no AMD GPU",
            Stage::Restore { named: false } => "the image has no AMD GPU's state",
            _ => return Ok(Self { devices }),
        };
        host.info(format_args!("{aside}: stepping aside"));
        Err(Refusal::NotMine)
    }

    fn handle_device_mapping(&mut self, _: &Host, _: BorrowedFd<'_>, status: &libc::stat) -> Answer {
        self.refuse(status)
    }

    fn dump_file(&mut self, _: &Host, file: BorrowedFd<'_>, _: u32) -> Answer {
        self.refuse(&nix::sys::stat::fstat(file)?)
    }

    fn restore_file(&mut self, host: &Host, id: u32) -> Answer<Restored> {
        match image::gpu_state(host.image_dir()?, id)? {
            Some(name) => Err(Unable::Restore(name).into()),
            None => Err(Refusal::NotMine),
        }
    }

    fn update_mapping(&mut self, _: &Host, path: &CStr, _: u64, _: u64) -> Answer<Mapping> {
        let path = path.to_string_lossy();
        if device::is_path_of_gpu(&path) {
            return Err(Unable::Restore(format!("a mapping of {path}")).into());
        }
        Err(Refusal::NotMine)
    }
}

impl Amdgpu {
    fn refuse(&self, status: &libc::stat) -> Answer {
        match self.devices.name_of(status) {
            Some(name) => Err(Unable::Dump(name).into()),
            None => Err(Refusal::NotMine),
        }
    }
}
