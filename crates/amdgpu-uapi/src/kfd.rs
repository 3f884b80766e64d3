// SPDX-License-Identifier: MIT OR Apache-2.0
//! `/dev/kfd`.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use crate::abi::call::Argument as _;
use crate::abi::{call, *};
use crate::{Error, FailedCall};

/// An open `/dev/kfd`: this process's compute state, which all its opens share.
#[derive(Debug)]
pub struct Kfd {
    file: File,
}

impl Kfd {
    /// Opens `/dev/kfd`.
    ///
    /// # Errors
    /// It does not exist, it may not be opened, or the device cgroup hides every GPU.
    pub fn open() -> Result<Self, Error> {
        let path = PathBuf::from("/dev/kfd");
        match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(file) => Ok(Self { file }),
            Err(source) => Err(Error::Open { path, source }),
        }
    }

    /// Returns the interface version, major and minor.
    ///
    /// # Errors
    /// GET_VERSION failed.
    pub fn version(&self) -> Result<(u32, u32), Error> {
        let mut argument = kfd_ioctl_get_version_args::zeroed();
        call::get_version(self.as_fd(), &mut argument).map_err(FailedCall::named("GET_VERSION").failed())?;
        Ok((argument.major_version, argument.minor_version))
    }

    /// Returns the address ranges of every GPU that this process may use.
    ///
    /// # Errors
    /// GET_PROCESS_APERTURES_NEW failed.
    pub fn apertures(&self) -> Result<Vec<kfd_process_device_apertures>, Error> {
        call::apertures(self.as_fd()).map_err(FailedCall::named("GET_PROCESS_APERTURES_NEW").failed())
    }

    /// Opens a stream of a GPU's system management events, which are lines of text.
    ///
    /// # Errors
    /// SMI_EVENTS failed.
    pub fn smi_events(&self, gpu: u32) -> Result<OwnedFd, Error> {
        call::smi_events(self.as_fd(), gpu).map_err(FailedCall::named("SMI_EVENTS").on(gpu).failed())
    }
}

impl From<Kfd> for OwnedFd {
    fn from(kfd: Kfd) -> Self {
        kfd.file.into()
    }
}

impl AsFd for Kfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
