// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory that processes share through ROCm's library: a file and a semaphore that every one of them expects to
//! find. Images keep its size and first word (`hsakmt_shared_mem` of libhsakmt's `perfctr.c`).

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;

use rewake_criu_images::amdgpu::KfdImage;

const MEMORY: &str = "/dev/shm/hsakmt_shared_mem";
/// The library's name for it; the file is `/dev/shm/sem.hsakmt_semaphore`.
const SEMAPHORE: &std::ffi::CStr = c"/hsakmt_semaphore";
/// Everybody's, as the library makes it.
const MODE: u32 = 0o666;

/// It could not be read or made.
#[derive(Debug, thiserror::Error)]
#[error("{act} {name}")]
pub(crate) struct SharedError {
    act: &'static str,
    name: &'static str,
    #[source]
    source: io::Error,
}

fn failed(act: &'static str, name: &'static str) -> impl Fn(io::Error) -> SharedError {
    move |source| SharedError { act, name, source }
}

/// Notes the shared memory in a process's image, if there is some.
pub(crate) fn note(mut image: KfdImage) -> Result<KfdImage, SharedError> {
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

/// Makes the shared memory anew where it is gone; leaves alone what is there.
pub(crate) fn put_back(image: &KfdImage) -> Result<(), SharedError> {
    if image.shared_memory_size == 0 {
        return Ok(());
    }
    let failed = failed("make", MEMORY);
    match OpenOptions::new().write(true).create_new(true).mode(MODE).open(MEMORY) {
        Ok(mut file) => {
            file.set_len(image.shared_memory_size).map_err(&failed)?;
            file.write_all(&image.shared_memory_magic.to_le_bytes()).map_err(&failed)?;
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(failed(error)),
    }
    crate::abi::make_semaphore(SEMAPHORE, MODE).map_err(|source| SharedError {
        act: "make",
        name: "/dev/shm/sem.hsakmt_semaphore",
        source,
    })
}
