// SPDX-License-Identifier: MIT OR Apache-2.0
//! A CRIU plugin that maps a memfd in the place of some mappings of a device, and has a server watch them.
//! From the environment, at a restore:
//!
//! * `PLACEHOLDERS`: bit N: the mapping of the Nth 8 pages of the device becomes a placeholder.
//! * `PLACEHOLDERS_SERVER`: a UNIX socket. A message has a fresh userfaultfd of the task (byte `u`), or
//!   reports that all memory is in place (byte `l`, process id), and waits for a byte.

use std::env;
use std::ffi::CStr;
use std::fs::{File, OpenOptions};
use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use nix::fcntl::{OFlag, openat};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use nix::sys::stat::Mode;
use rewake_criu_plugin::{Answer, Host, MapSource, Plugin, Restored, Stage, register};

/// Bytes of a mapping.
const STEP: u64 = 8 * 4096;
/// Size of the placeholders' file; the content of a mapping at `offset` is at `SHIFT + offset` there.
const SIZE: u64 = 64 << 20;
const SHIFT: u64 = 16 << 20;

/// The number of the placeholders' file in CRIU's store.
#[derive(Debug)]
struct Placeholders {
    stored: Option<i32>,
}

register!(Placeholders);

fn image(host: &Host, id: u32, flags: OFlag) -> anyhow::Result<File> {
    let name = format!("placeholders-{id}.img");
    Ok(openat(host.image_dir()?, name.as_str(), flags | OFlag::O_CLOEXEC, Mode::S_IRUSR | Mode::S_IWUSR)?
        .into())
}

fn server() -> anyhow::Result<UnixStream> {
    Ok(UnixStream::connect(env::var("PLACEHOLDERS_SERVER")?)?)
}

/// A userfaultfd of this process, before UFFDIO_API.
fn userfaultfd() -> std::io::Result<OwnedFd> {
    // SAFETY: the call takes flags only.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
    let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0).ok_or_else(std::io::Error::last_os_error)?;
    // SAFETY: a fresh descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

impl Plugin for Placeholders {
    const NAME: &'static CStr = c"placeholders";

    fn init(_: &Host, _: Stage) -> Answer<Self> {
        Ok(Self { stored: None })
    }

    fn handle_device_mapping(&mut self, host: &Host, _: BorrowedFd<'_>, _: &libc::stat) -> Answer {
        host.record_in_inventory()?;
        Ok(())
    }

    fn dump_file(&mut self, host: &Host, file: BorrowedFd<'_>, id: u32) -> Answer {
        let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        image(host, id, OFlag::O_WRONLY | OFlag::O_CREAT)?.write_all(path.as_os_str().as_encoded_bytes())?;
        Ok(())
    }

    fn restore_file(&mut self, host: &Host, id: u32) -> Answer<Restored> {
        let memfd = memfd_create("placeholders", MFdFlags::MFD_CLOEXEC)?;
        nix::unistd::ftruncate(&memfd, i64::try_from(SIZE)?)?;
        self.stored = Some(host.store_fd(memfd.as_fd())?);
        let uffd = userfaultfd()?;
        let fds = [uffd.as_raw_fd()];
        let rights = [ControlMessage::ScmRights(&fds)];
        sendmsg::<()>(server()?.as_raw_fd(), &[IoSlice::new(b"u")], &rights, MsgFlags::empty(), None)?;
        let mut path = String::new();
        image(host, id, OFlag::O_RDONLY)?.read_to_string(&mut path)?;
        Ok(Restored::File(OpenOptions::new().read(true).write(true).open(path)?.into()))
    }

    fn update_mapping(&mut self, host: &Host, path: &CStr, address: u64, offset: u64) -> Answer<MapSource> {
        let chosen: u64 = env::var("PLACEHOLDERS")?.parse()?;
        let placeholder = chosen >> (offset / STEP) & 1 == 1;
        let mapping = if placeholder {
            let memfd = host.stored_fd(self.stored.ok_or("no file was restored before")?)?;
            MapSource { offset: SHIFT + offset, file: Some(memfd) }
        } else {
            let device = OpenOptions::new().read(true).write(true).open(path.to_str()?)?;
            MapSource { offset, file: Some(device.into()) }
        };
        host.info(format_args!("{address:#x} {offset:#x} gets {:?}", mapping.file));
        Ok(mapping)
    }

    fn resume_devices_late(&mut self, _: &Host, pid: i32) -> Answer {
        let mut server = server()?;
        server.write_all(b"l")?;
        server.write_all(&pid.to_ne_bytes())?;
        server.read_exact(&mut [0])?;
        Ok(())
    }
}
