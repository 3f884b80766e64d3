// SPDX-License-Identifier: MIT OR Apache-2.0
//! A CRIU plugin that writes down every call, and keeps files and mappings of one device. From the
//! environment:
//!
//! * `OBSERVER_LOG`: the file to append to; a line a call: the hook, its subject, and how many threads the
//!   process has.
//! * `OBSERVER_FAIL`, `OBSERVER_PANIC`: the call that fails or panics.

use std::env;
use std::ffi::CStr;
use std::fmt::Display;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use rewake_criu_plugin::{Answer, Host, MapSource, Plugin, Refusal, Restored, Stage, register};

/// The observed device.
#[derive(Debug)]
struct Observer;

register!(Observer);

/// Logs a call, and fails or panics as the environment says.
fn called(hook: &str, detail: impl Display) -> Answer {
    if let Some(log) = env::var_os("OBSERVER_LOG") {
        let threads = std::fs::read_dir("/proc/self/task")?.count();
        let mut log = OpenOptions::new().append(true).create(true).open(log)?;
        log.write_all(format!("{hook} {detail} threads={threads}\n").as_bytes())?;
    }
    let asked = |name| env::var(name).is_ok_and(|value| value == hook);
    assert!(!asked("OBSERVER_PANIC"), "asked to\npanic");
    if asked("OBSERVER_FAIL") {
        let cause = std::io::Error::other("asked to\nfail");
        Err(cause)?;
    }
    Ok(())
}

/// Opens the image of a file, which holds the path that it was opened by.
fn image(host: &Host, id: u32, flags: OFlag) -> anyhow::Result<File> {
    let name = format!("observer-{id}.img");
    Ok(openat(host.image_dir()?, name.as_str(), flags | OFlag::O_CLOEXEC, Mode::S_IRUSR | Mode::S_IWUSR)?
        .into())
}

impl Plugin for Observer {
    const NAME: &'static CStr = c"observer";

    fn init(_: &Host, stage: Stage) -> Answer<Self> {
        called("init", format_args!("{stage:?}"))?;
        Ok(Self)
    }

    fn exit(self, host: &Host, stage: Stage, result: i32) {
        if let Err(Refusal::Failed(error)) = called("exit", format_args!("{stage:?} {}", result == 0)) {
            host.error(error);
        }
    }

    fn pause_devices(&mut self, host: &Host, _: i32) -> Answer {
        host.record_in_inventory()?;
        called("PAUSE_DEVICES", "")
    }

    fn checkpoint_devices(&mut self, host: &Host, _: i32) -> Answer {
        host.record_in_inventory()?;
        called("CHECKPOINT_DEVICES", "")
    }

    fn handle_device_mapping(&mut self, host: &Host, _: BorrowedFd<'_>, status: &libc::stat) -> Answer {
        host.record_in_inventory()?;
        called("HANDLE_DEVICE_VMA", format_args!("{:o}", status.st_mode & libc::S_IFMT))
    }

    fn dump_file(&mut self, host: &Host, file: BorrowedFd<'_>, id: u32) -> Answer {
        let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        called("DUMP_EXT_FILE", path.display())?;
        image(host, id, OFlag::O_WRONLY | OFlag::O_CREAT)?.write_all(path.as_os_str().as_encoded_bytes())?;
        Ok(())
    }

    fn dump_devices_late(&mut self, _: &Host, _: i32) -> Answer {
        called("DUMP_DEVICES_LATE", "")
    }

    fn restore_init(&mut self, _: &Host) -> Answer {
        called("RESTORE_INIT", "")
    }

    fn post_forking(&mut self, _: &Host) -> Answer {
        called("POST_FORKING", "")
    }

    fn restore_file(&mut self, host: &Host, id: u32) -> Answer<Restored> {
        let mut path = String::new();
        image(host, id, OFlag::O_RDONLY)?.read_to_string(&mut path)?;
        called("RESTORE_EXT_FILE", &path)?;
        if env::var_os("OBSERVER_LATER").is_some() {
            return Ok(Restored::Later);
        }
        // Uses the descriptor store that all tasks share.
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let id = host.store_fd(file.as_fd())?;
        Ok(Restored::File(host.stored_fd(id)?))
    }

    fn update_mapping(&mut self, _: &Host, path: &CStr, _: u64, offset: u64) -> Answer<MapSource> {
        called("UPDATE_VMA_MAP", format_args!("{} {offset:#x}", path.to_string_lossy()))?;
        let file = OpenOptions::new().read(true).write(true).open(path.to_str()?)?;
        Ok(MapSource { offset, file: Some(file.into()) })
    }

    fn resume_devices_late(&mut self, host: &Host, _: i32) -> Answer {
        called("RESUME_DEVICES_LATE", host.run_id()?.len())
    }
}
