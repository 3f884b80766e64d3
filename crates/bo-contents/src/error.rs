// SPDX-License-Identifier: MIT OR Apache-2.0
//! Why contents could not be moved.

use std::io;

use nix::errno::Errno;

use crate::folder::FileError;
use crate::pipeline::PATIENCE;

/// Contents could not be moved.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A GPU's copies.
    #[error(transparent)]
    Engine(#[from] rewake_sdma_copy::Error),
    /// A GPU's driver.
    #[error(transparent)]
    Driver(#[from] rewake_amdgpu_uapi::Error),
    /// A file of the image.
    #[error(transparent)]
    File(#[from] FileError),
    /// Reading or writing it.
    #[error(transparent)]
    Transfer(#[from] rewake_image_io::files::TransferError),
    /// What reads and writes files.
    #[error(transparent)]
    Store(#[from] rewake_image_io::StoreError),
    /// `KFD_MAX_BUFFER_SIZE`.
    #[error(transparent)]
    Setting(#[from] rewake_amdgpu_uapi::settings::BadSetting),
    /// Files, memory and threads.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Nothing goes on.
    #[error(transparent)]
    Stuck(#[from] Stuck),
    /// A fault of ours.
    #[error("copying panicked: a fault of rewake")]
    Panicked,
    /// [`LoadHandle::give_up`](crate::Desk::give_up).
    #[error("given up: nobody waits for it any more")]
    GivenUp,
}

impl From<Errno> for Error {
    fn from(errno: Errno) -> Self {
        Self::Io(errno.into())
    }
}

/// Nothing goes on.
#[derive(Debug, thiserror::Error)]
pub enum Stuck {
    /// Files do not answer.
    #[error("{0} transfers of image files have not ended for {PATIENCE:?}: does the storage answer?")]
    Files(usize),
    /// A fault of ours.
    #[error("nothing has happened for {PATIENCE:?}, and nothing is under way: a fault of rewake")]
    Nothing,
    /// What is to be saved cannot be reached.
    #[error("buffer {0} of the image has bytes, but the driver exported no dma-buf for it")]
    NoBytes(usize),
}
