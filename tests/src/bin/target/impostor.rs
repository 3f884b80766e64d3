// SPDX-License-Identifier: MIT OR Apache-2.0
//! A restore that ends at the worst moment: every task has handed its userfaultfd over, and the "restore
//! finished" notice is missing. It plays both CRIU and the restored task, under the dumped task's pid.

use std::io::{IoSlice, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, ensure};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use nix::unistd::Pid;
use rewake_tests::pattern::{BASE, PAGE, Pattern};
use rewake_uffd::Uffd;

use crate::family::expect_all;
use crate::memory::Region;
use crate::stage::Stage;

/// Fork, remap, remove and unmap events: what CRIU asks for.
const FEATURES: u64 = 0x2 | 0x4 | 0x8 | 0x40;

/// `struct clone_args` of the kernel (`include/uapi/linux/sched.h`).
#[repr(C)]
#[derive(Default)]
struct CloneArguments {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// Hands memory over as the task `pid` to the server at `socket`, leaves out the notice, and reads all of it.
pub(crate) fn run(stage: &Stage, pid: i32, socket: &Path) -> anyhow::Result<()> {
    let child = fork_as(pid, || match hand_over(stage, pid, socket) {
        Ok(region) => {
            region.check_all(stage);
            stage.status()
        }
        Err(error) => {
            stage.bad(&format!("the hand-over failed: {error:#}"));
            2
        }
    })?;
    expect_all(stage, &[child])
}

fn hand_over(stage: &Stage, pid: i32, socket: &Path) -> anyhow::Result<Region> {
    let region = Region::map(BASE, stage.pages, Pattern::new(stage.seed))?;
    let uffd = Uffd::open(FEATURES).context("open a userfaultfd")?;
    uffd.register_missing(region.start as u64, (region.pages * PAGE) as u64).context("register")?;
    let mut stream = UnixStream::connect(socket).context("connect")?;
    stream.write_all(&pid.to_ne_bytes())?;
    let fds = [uffd.as_fd().as_raw_fd()];
    let control = [ControlMessage::ScmRights(&fds)];
    sendmsg::<()>(stream.as_raw_fd(), &[IoSlice::new(&[0])], &control, MsgFlags::empty(), None)?;
    drop((stream, uffd));
    // The server reacts now to the missing notice; the reads that follow check it.
    std::thread::sleep(Duration::from_millis(200));
    Ok(region)
}

/// Forks a child with a pid of the caller's choice, which must be free.
fn fork_as(pid: i32, child: impl FnOnce() -> u8) -> anyhow::Result<Pid> {
    let wanted = [pid];
    let arguments = CloneArguments {
        exit_signal: libc::SIGCHLD.cast_unsigned().into(),
        set_tid: wanted.as_ptr() as u64,
        set_tid_size: 1,
        ..CloneArguments::default()
    };
    // SAFETY: without CLONE_VM or a stack this is a fork; this process has one thread, and `arguments` and
    // `wanted` live until the call returns.
    let result =
        unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, size_of::<CloneArguments>()) };
    ensure!(result >= 0, "clone3 with pid {pid}: {}", std::io::Error::last_os_error());
    if result == 0 {
        std::process::exit(child().into());
    }
    Ok(Pid::from_raw(pid))
}
