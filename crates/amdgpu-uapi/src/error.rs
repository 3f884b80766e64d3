// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors that name the call, its object and the kernel's answer.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// What goes wrong with a GPU.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no such device, or it may not be opened.
    #[error("open {}: {source}; is the amdgpu driver loaded, and may this user open it?", path.display())]
    Open {
        /// The device node.
        path: PathBuf,
        /// The kernel's answer.
        r#source: io::Error,
    },
    /// An ioctl or a mapping failed.
    #[error("{what}: {source}")]
    Call {
        /// Which, and of what.
        what: Box<FailedCall>,
        /// The kernel's answer.
        r#source: io::Error,
    },
    /// The topology cannot be read or makes no sense.
    #[error("{}: {reason}", path.display())]
    Topology {
        /// File or folder in sysfs.
        path: PathBuf,
        /// What was found and what was expected.
        reason: String,
    },
    /// Checkpoint data of the kernel is not what its interface says.
    #[error("checkpoint data of {length} bytes: {reason}")]
    Blob {
        /// All bytes.
        length: usize,
        /// Where and what.
        reason: String,
    },
    /// A GPU did not do in time what it should.
    #[error("{what} on GPU {gpu:#x}: not done after {seconds} s")]
    Late {
        /// What was waited for.
        what: &'static str,
        /// The GPU.
        gpu: u32,
        /// How long.
        seconds: u64,
    },
}

impl Error {
    /// The kernel's errno, where one is the cause.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Open { source, .. } | Self::Call { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }
}

/// A call, for messages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FailedCall {
    call: &'static str,
    gpu: Option<u32>,
    address: Option<u64>,
    size: Option<u64>,
}

impl FailedCall {
    /// The call's name in the kernel's header.
    #[must_use]
    pub fn named(call: &'static str) -> Self {
        Self { call, ..Self::default() }
    }

    /// On which GPU.
    #[must_use]
    pub fn on(mut self, gpu: u32) -> Self {
        self.gpu = Some(gpu);
        self
    }

    /// At which GPU address, and how many bytes.
    #[must_use]
    pub fn at(mut self, address: u64, size: u64) -> Self {
        self.address = Some(address);
        self.size = Some(size);
        self
    }

    /// The error of this call; for `map_err`.
    pub fn failed(self) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::Call { what: Box::new(self), source }
    }
}

impl fmt::Display for FailedCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.call)?;
        if let Some(gpu) = self.gpu {
            write!(f, " on GPU {gpu:#x}")?;
        }
        if let (Some(address), Some(size)) = (self.address, self.size) {
            write!(f, ", {size:#x} bytes at {address:#x}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_call_the_gpu_and_the_place() {
        let act = FailedCall::named("MAP_MEMORY_TO_GPU").on(0x1234).at(0x7000_0000, 0x1000);
        let error = act.failed()(io::Error::from_raw_os_error(libc::EFAULT));
        assert_eq!(error.errno(), Some(libc::EFAULT));
        let text = error.to_string();
        assert!(
            text.starts_with("MAP_MEMORY_TO_GPU on GPU 0x1234, 0x1000 bytes at 0x70000000: Bad address"),
            "{text}"
        );
    }
}
