// SPDX-License-Identifier: MIT OR Apache-2.0
//! The process that owns the filled memory.

use std::io::{IoSlice, Read as _};
use std::num::NonZeroUsize;
use std::os::fd::AsRawFd as _;

use anyhow::Context as _;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use rewake_uffd::Uffd;

/// Arguments of the hidden subcommand.
#[derive(Debug, clap::Args)]
pub(crate) struct TargetOptions {
    /// Size of the memory in MiB
    #[arg(long)]
    size_mib: u64,
}

/// Maps the memory, sends its address (native-endian u64) and userfaultfd over the socket that is standard
/// input, and waits until the bench closes it.
pub(crate) fn run_target(options: &TargetOptions) -> anyhow::Result<()> {
    let bytes = options.size_mib << 20;
    let length = usize::try_from(bytes).ok().and_then(NonZeroUsize::new).context("no memory asked for")?;
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a new anonymous mapping at an address that the kernel picks touches no other memory.
    let start = unsafe { mmap_anonymous(None, length, protection, MapFlags::MAP_PRIVATE) }.context("mmap")?;
    let address = start.as_ptr() as u64;
    let uffd = Uffd::open(0).context("userfaultfd (needs root)")?;
    uffd.register_missing(address, bytes).context("UFFDIO_REGISTER")?;
    let descriptors = [uffd.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&descriptors)];
    let payload = address.to_ne_bytes();
    let stdin = std::io::stdin();
    sendmsg::<()>(stdin.as_raw_fd(), &[IoSlice::new(&payload)], &rights, MsgFlags::empty(), None)
        .context("sending the userfaultfd")?;
    let mut nothing = [0_u8; 1];
    stdin.lock().read(&mut nothing).context("waiting for the end of the measurement")?;
    Ok(())
}
