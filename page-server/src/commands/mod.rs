// SPDX-License-Identifier: MIT OR Apache-2.0
//! One file a command.

pub mod cache;
mod criu;
mod criu_server;
pub mod doctor;
pub mod dump;
pub mod export;
pub mod gc;
pub mod inspect;
pub mod lazy_pages;
pub mod ls;
pub mod migrate;
pub mod page_server;
pub mod park;
mod picture;
pub mod planner;
mod print;
pub mod pull;
pub mod push;
pub mod receive;
pub mod recover;
pub mod restore;
pub mod rm;
pub mod seal;
pub mod serve;
pub mod status;
pub mod streamer;
pub mod verify;

mod aborts;
mod detach;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use rewake_process::ready::Ready;
use rewake_streamer::session::address;
use tokio::runtime::Runtime;

/// The full path of a directory that `option` names.
fn directory(path: &Path, option: &str) -> anyhow::Result<PathBuf> {
    let full = path.canonicalize().with_context(|| format!("{option} {}", path.display()))?;
    if !full.is_dir() {
        bail!("{option} {}: expected a directory", path.display());
    }
    Ok(full)
}

/// Reports to the descriptor of `--status-fd`, if it was given; to be asked for once.
///
/// # Errors
/// EMFILE.
fn ready(status: Option<RawFd>) -> anyhow::Result<Ready> {
    // A process keeps its standard descriptors: what another file of such a number is would get messages.
    let taken = status.map(|number| match number {
        0 => io::stdin().as_fd().try_clone_to_owned(),
        1 => io::stdout().as_fd().try_clone_to_owned(),
        2 => io::stderr().as_fd().try_clone_to_owned(),
        _ => Ok(given(number)),
    });
    let taken = taken.transpose().context("--status-fd")?;
    Ok(Ready { waiting: taken.map(File::from).into_iter().collect(), standard_error: None })
}

/// A descriptor that an option names; to be asked for once.
fn given(number: RawFd) -> OwnedFd {
    // SAFETY: who started us gave this descriptor to us, to use and to close.
    unsafe { OwnedFd::from_raw_fd(number) }
}

/// The agent's control socket: the one that was named, else where an agent of this user listens.
fn control_socket(named: Option<&Path>) -> anyhow::Result<PathBuf> {
    Ok(match named {
        Some(path) => std::path::absolute(path)?,
        None => address::default_socket()?,
    })
}

/// Threads that send requests to a store, and decompress.
const STORE_THREADS: usize = 2;

/// The runtime of a command that uses a store.
fn store_runtime() -> io::Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(STORE_THREADS).enable_all().build()
}
