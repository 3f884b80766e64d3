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
pub mod manual;
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
pub mod version;

mod aborts;
mod detach;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use nix::sys::stat::{SFlag, fstat};
use rewake_process::private_socket;
use rewake_process::ready::Ready;
use tokio::runtime::Runtime;

use crate::cli::GivenDescriptor;

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
/// It is not open.
fn ready(status: Option<GivenDescriptor>) -> anyhow::Result<Ready> {
    let status = status.filter(|status| status.number().is_some());
    let waiting = status.map(|status| status.take("--status-fd")).transpose()?;
    Ok(Ready { waiting: waiting.map(File::from).into_iter().collect(), standard_error: None })
}

/// Returns the descriptor of `--ps-socket`, if it names one; to be asked for once.
///
/// # Errors
/// It is not open, no socket, or that of `--status-fd`.
fn connected(
    socket: Option<GivenDescriptor>,
    status: Option<GivenDescriptor>,
) -> anyhow::Result<Option<OwnedFd>> {
    let Some(socket) = socket.filter(|socket| socket.number().is_some()) else { return Ok(None) };
    if socket.number() == status.and_then(GivenDescriptor::number) {
        bail!("--ps-socket and --status-fd name one descriptor: give each a descriptor of its own");
    }
    let socket = socket.take("--ps-socket")?;
    let kind = SFlag::from_bits_truncate(fstat(&socket).context("--ps-socket")?.st_mode) & SFlag::S_IFMT;
    if kind != SFlag::S_IFSOCK {
        bail!(
            "--ps-socket: this descriptor is no socket: expected one that is connected with the other side"
        );
    }
    Ok(Some(socket))
}

/// The agent's control socket: the one that was named, else where an agent of this user listens.
fn control_socket(named: Option<&Path>) -> anyhow::Result<PathBuf> {
    Ok(match named {
        Some(path) => std::path::absolute(path)?,
        None => private_socket::default_socket()?,
    })
}

/// Threads that send requests to a store, and decompress.
const STORE_THREADS: usize = 2;

/// The runtime of a command that uses a store.
fn store_runtime() -> io::Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(STORE_THREADS).enable_all().build()
}

/// Paths for a message of the agent.
fn bytes_of(paths: impl IntoIterator<Item = PathBuf>) -> Vec<Vec<u8>> {
    paths.into_iter().map(|path| path.into_os_string().into_vec()).collect()
}
