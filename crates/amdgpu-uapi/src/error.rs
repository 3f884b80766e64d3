// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors with the call, its object and the kernel's answer.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// A GPU, or the driver, failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device does not exist, or may not be opened.
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
        /// The call, and its object.
        what: Box<FailedCall>,
        /// The kernel's answer.
        r#source: io::Error,
    },
    /// The topology cannot be read, or is not valid.
    #[error("{}: {reason}", path.display())]
    Topology {
        /// The file or folder in sysfs.
        path: PathBuf,
        /// The value that was found, and the expected one.
        reason: String,
    },
    /// The kernel's checkpoint data does not match its interface.
    #[error("checkpoint data of {length} bytes: {reason}")]
    Blob {
        /// The size of all bytes.
        length: usize,
        /// The place, and the mismatch.
        reason: String,
    },
}

impl Error {
    /// Returns the kernel's errno, if one is the cause.
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
    /// Names the call as the kernel's header does.
    #[must_use]
    pub fn named(call: &'static str) -> Self {
        Self { call, ..Self::default() }
    }

    /// Adds the GPU.
    #[must_use]
    pub fn on(mut self, gpu: u32) -> Self {
        self.gpu = Some(gpu);
        self
    }

    /// Adds the GPU address, and the number of bytes.
    #[must_use]
    pub fn at(mut self, address: u64, size: u64) -> Self {
        self.address = Some(address);
        self.size = Some(size);
        self
    }

    /// Returns a closure for `map_err` that makes the error of this call.
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
