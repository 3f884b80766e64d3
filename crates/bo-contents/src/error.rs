// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors of saves and loads.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use nix::errno::Errno;

use crate::folder::FileError;

/// The time without progress after which a restore or dump fails.
pub(crate) const STALL_LIMIT: Duration = Duration::from_secs(120);

/// Buffers could not be saved or loaded.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A copy on a GPU failed.
    #[error(transparent)]
    Engine(#[from] rewake_sdma_copy::Error),
    /// A GPU's driver failed.
    #[error(transparent)]
    Driver(#[from] rewake_amdgpu_uapi::Error),
    /// A file of the image could not be opened or examined.
    #[error(transparent)]
    File(#[from] FileError),
    /// A read or write of a file failed.
    #[error(transparent)]
    Transfer(#[from] rewake_image_io::TransferError),
    /// The I/O engine failed.
    #[error(transparent)]
    Store(#[from] rewake_image_io::StoreError),
    /// `KFD_MAX_BUFFER_SIZE` is not valid.
    #[error(transparent)]
    Setting(#[from] rewake_criu_images::amdgpu::settings::BadSetting),
    /// A file, memory or a thread could not be created.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The transfer makes no progress.
    #[error(transparent)]
    Stuck(#[from] Stall),
    /// Bytes of the image are on another host, and do not arrive any more.
    #[error("{0}: bytes that are on another host do not arrive any more: see above")]
    Lost(PathBuf),
    /// The thread panicked, which is a bug in Rewake.
    #[error("the copy thread panicked: this is a bug in rewake")]
    Panicked,
    /// The caller ended the load with [`LoadHandle::give_up`](crate::LoadHandle::give_up).
    #[error("the load was given up: no process needs it")]
    GivenUp,
}

impl From<Errno> for Error {
    fn from(errno: Errno) -> Self {
        Self::Io(errno.into())
    }
}

/// The transfer makes no progress.
#[derive(Debug, thiserror::Error)]
pub enum Stall {
    /// Reads or writes of files do not end.
    #[error("{0} transfers of image files have not ended for {STALL_LIMIT:?}: does the storage answer?")]
    Files(usize),
    /// Nothing is in flight, which is a bug in Rewake.
    #[error("no progress for {STALL_LIMIT:?} with nothing in flight: this is a bug in rewake")]
    Nothing,
    /// A buffer that is saved has no dma-buf.
    #[error("buffer {0} of the image has bytes, but the driver exported no dma-buf for it")]
    NoBytes(usize),
}
