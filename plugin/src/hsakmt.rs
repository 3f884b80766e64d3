// SPDX-License-Identifier: MIT OR Apache-2.0
//! Restores the file and the semaphore that ROCm's library shares between processes. Images have the file's
//! size and first word (`hsakmt_shared_mem` of libhsakmt's `perfctr.c`).

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;

use rewake_criu_images::amdgpu::KfdImage;

const MEMORY: &str = "/dev/shm/hsakmt_shared_mem";
/// The semaphore's name; its file is `/dev/shm/sem.hsakmt_semaphore`.
const SEMAPHORE: &std::ffi::CStr = c"/hsakmt_semaphore";
/// All users may access it, as with the library's own.
const MODE: u32 = 0o666;

/// The shared file or semaphore could not be read or created.
#[derive(Debug, thiserror::Error)]
#[error("{action} {name}")]
pub(crate) struct SharedError {
    action: &'static str,
    name: &'static str,
    #[source]
    source: io::Error,
}

fn failed(action: &'static str, name: &'static str) -> impl Fn(io::Error) -> SharedError {
    move |source| SharedError { action, name, source }
}

/// Adds the shared memory to a process's image, if it exists.
pub(crate) fn add_to_image(mut image: KfdImage) -> Result<KfdImage, SharedError> {
    let failed = failed("read", MEMORY);
    let mut file = match File::open(MEMORY) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(image),
        Err(error) => return Err(failed(error)),
    };
    let mut magic = [0; 4];
    file.read_exact(&mut magic).map_err(&failed)?;
    image.shared_memory_size = file.metadata().map_err(&failed)?.len();
    image.shared_memory_magic = u32::from_le_bytes(magic);
    Ok(image)
}

/// Creates the shared memory again if it does not exist.
pub(crate) fn recreate(image: &KfdImage) -> Result<(), SharedError> {
    if image.shared_memory_size == 0 {
        return Ok(());
    }
    let failed = failed("create", MEMORY);
    match OpenOptions::new().write(true).create_new(true).mode(MODE).open(MEMORY) {
        Ok(mut file) => {
            file.set_len(image.shared_memory_size).map_err(&failed)?;
            file.write_all(&image.shared_memory_magic.to_le_bytes()).map_err(&failed)?;
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(failed(error)),
    }
    crate::abi::make_semaphore(SEMAPHORE, MODE).map_err(|source| SharedError {
        action: "create",
        name: "/dev/shm/sem.hsakmt_semaphore",
        source,
    })
}
