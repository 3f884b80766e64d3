// SPDX-License-Identifier: MIT OR Apache-2.0
//! Several processes, each with some of the layers: the first starts the others and hands the activation to
//! one after the other, over sockets or in one shared buffer.

use std::io::{IoSlice, IoSliceMut, Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, bail, ensure};
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

use crate::gpu::Gpus;
use crate::shape::{Mode, Shape};
use crate::stage::{ACTIVATION, Stage};

/// One of the other processes; it ends when the socket closes.
#[derive(Debug)]
pub struct Relative {
    socket: UnixStream,
    child: Child,
}

impl Relative {
    /// Starts process `process`, and gives it the shared activation if there is one.
    ///
    /// # Errors
    /// It cannot be started, or has ended.
    pub fn start(shape: &Shape, process: u64, shared: Option<BorrowedFd<'_>>) -> anyhow::Result<Self> {
        let (socket, theirs) = UnixStream::pair().context("a pair of sockets")?;
        let program = std::env::current_exe().context("the path of this program")?;
        let child = Command::new(program)
            .args(["stage", "--process", &process.to_string()])
            .args(shape.arguments())
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .spawn()
            .with_context(|| format!("start process {process}"))?;
        if let Some(dmabuf) = shared {
            send_fd(&socket, dmabuf)?;
        }
        let mut relative = Self { socket, child };
        let mut ready = [0];
        relative.socket.read_exact(&mut ready).with_context(|| format!("process {process} ended early"))?;
        Ok(relative)
    }

    /// Has its layers work on the activation; returns the hash of the results.
    ///
    /// # Errors
    /// It has ended.
    pub fn pass(&mut self, stage: &Stage, shared: bool, seed: u64) -> anyhow::Result<u64> {
        self.socket.write_all(&seed.to_le_bytes())?;
        if !shared {
            send_activation(&mut self.socket, stage)?;
        }
        let mut hash = [0; 8];
        self.socket.read_exact(&mut hash).context("another process of the server ended")?;
        if !shared {
            receive_activation(&mut self.socket, stage)?;
        }
        Ok(u64::from_le_bytes(hash))
    }
}

impl Drop for Relative {
    fn drop(&mut self) {
        // It ends when its socket closes; it may have ended already.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        let _ = self.child.wait();
    }
}

/// The body of a process other than the first; ends when the first ends. Its socket is standard input.
///
/// # Errors
/// The driver refuses, or a GPU fails.
pub fn work(shape: &Shape, process: u64) -> anyhow::Result<()> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned().context("take standard input")?;
    let mut socket = UnixStream::from(socket);
    let gpus = Gpus::open(shape.gpus)?;
    let shared = shape.mode == Mode::SharedBo;
    let x = if shared { gpus.import(receive_fd(&socket)?.as_fd())? } else { gpus.host(ACTIVATION)? };
    let mut stage = Stage::load(shape, process, &gpus, x)?;
    socket.write_all(&[1])?;
    let mut seed = [0; 8];
    while socket.read_exact(&mut seed).is_ok() {
        if !shared {
            receive_activation(&mut socket, &stage)?;
        }
        let steps = stage.layer_steps(u64::from_le_bytes(seed), 0);
        stage.lane().run(&steps)?;
        socket.write_all(&stage.result(0, 0).to_le_bytes())?;
        if !shared {
            send_activation(&mut socket, &stage)?;
        }
    }
    Ok(())
}

fn send_activation(socket: &mut UnixStream, stage: &Stage) -> anyhow::Result<()> {
    let mut activation = vec![0; usize::try_from(ACTIVATION)?];
    stage.activation().cpu().read(0, &mut activation);
    socket.write_all(&activation).context("send an activation")
}

fn receive_activation(socket: &mut UnixStream, stage: &Stage) -> anyhow::Result<()> {
    let mut activation = vec![0; usize::try_from(ACTIVATION)?];
    socket.read_exact(&mut activation).context("receive an activation")?;
    stage.activation().cpu().write(0, &activation);
    Ok(())
}

fn send_fd(socket: &UnixStream, fd: BorrowedFd<'_>) -> anyhow::Result<()> {
    let fds = [fd.as_raw_fd()];
    let message = [ControlMessage::ScmRights(&fds)];
    let sent = sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(&[1])], &message, MsgFlags::empty(), None);
    ensure!(sent.context("send a dma-buf")? == 1, "a dma-buf was not sent");
    Ok(())
}

#[expect(unsafe_code, reason = "a received descriptor is owned here")]
fn receive_fd(socket: &UnixStream) -> anyhow::Result<OwnedFd> {
    use std::os::fd::FromRawFd as _;
    let mut byte = [0];
    let mut parts = [IoSliceMut::new(&mut byte)];
    let mut space = nix::cmsg_space!([std::os::fd::RawFd; 1]);
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)
        .context("receive a dma-buf")?;
    for part in message.cmsgs().context("receive a dma-buf")? {
        if let ControlMessageOwned::ScmRights(fds) = part
            && let [fd] = fds[..]
        {
            // SAFETY: the kernel has just installed it for this message.
            return Ok(unsafe { OwnedFd::from_raw_fd(fd) });
        }
    }
    bail!("the first process sent no dma-buf")
}
