// SPDX-License-Identifier: MIT OR Apache-2.0
//! The machine's limit for filling memory: UFFDIO_COPY from a buffer in the CPU's cache into another process.
//! A server that fills through userfaultfd with as many threads cannot be faster.

mod target;

use std::io::IoSliceMut;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use rewake_uffd::{FillPort as _, Uffd};

use crate::processes::Process;
pub(crate) use target::{TargetOptions, run_target};

/// Bytes of one UFFDIO_COPY: small enough to stay in the second-level cache, large enough to amortise the
/// call.
const PIECE: u64 = 256 << 10;
/// A larger size only takes longer.
const MAX_MIB: u64 = 1024;
const TARGET_EXIT: Duration = Duration::from_secs(10);

/// Fills a fresh process's memory once with `threads` threads; GB/s (10^9 bytes).
pub(crate) fn measure(size_mib: u64, threads: u32) -> anyhow::Result<f64> {
    let size_mib = size_mib.min(MAX_MIB);
    let (ours, theirs) = UnixStream::pair().context("socketpair for the fill target")?;
    ours.set_read_timeout(Some(TARGET_EXIT))?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["fill-target", "--size-mib", &size_mib.to_string()]);
    let mut target = Process::spawn(command.stdin(Stdio::from(OwnedFd::from(theirs))))?;
    // The command holds our copy of the target's end; while it is open a target's death would go unnoticed.
    drop(command);
    let (start, uffd) = receive(&ours).context("userfaultfd of the fill target")?;
    let bytes = size_mib << 20;
    let elapsed = fill(&uffd, start, bytes, threads)?;
    drop(ours);
    target.wait(TARGET_EXIT)?.check("the fill target failed", String::new)?;
    Ok(bytes as f64 / 1e9 / elapsed.as_secs_f64())
}

fn fill(uffd: &Uffd, start: u64, bytes: u64, threads: u32) -> anyhow::Result<Duration> {
    let next = AtomicU64::new(0);
    let work = || -> anyhow::Result<()> {
        let hot = vec![0x5a_u8; usize::try_from(PIECE)?];
        loop {
            let offset = next.fetch_add(PIECE, Ordering::Relaxed);
            if offset >= bytes {
                return Ok(());
            }
            let outcome = uffd.copy(start + offset, &hot);
            if !outcome.complete(PIECE) {
                bail!("UFFDIO_COPY of {PIECE} bytes at offset {offset}: {outcome:?}");
            }
        }
    };
    let began = Instant::now();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("a fill thread panicked"))
    })?;
    Ok(began.elapsed())
}

fn receive(socket: &UnixStream) -> anyhow::Result<(u64, Uffd)> {
    let mut address = [0_u8; 8];
    let mut space = nix::cmsg_space!([i32; 1]);
    let mut parts = [IoSliceMut::new(&mut address)];
    let message =
        recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)?;
    let descriptor = message.cmsgs()?.find_map(|control| match control {
        ControlMessageOwned::ScmRights(descriptors) => descriptors.first().copied(),
        _ => None,
    });
    let descriptor = descriptor.context("the fill target closed its socket without sending one")?;
    // SAFETY: the kernel made this descriptor for this message; nothing else owns it.
    let uffd = Uffd::adopt(unsafe { OwnedFd::from_raw_fd(descriptor) })?;
    Ok((u64::from_ne_bytes(address), uffd))
}
