// SPDX-License-Identifier: MIT OR Apache-2.0
//! The generation id of a restore: what differs between restored copies of one program (`docs/clones.md`).

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::Context as _;

/// The environment variable of CRIU, and so of its action scripts, that has the id.
pub(super) const VARIABLE: &str = "REWAKE_GENERATION_ID";
/// The file in the work directory that has the id, and a newline.
const FILE: &str = "generation-id";

/// Returns a new id: 128 random bits of the kernel as 32 hexadecimal digits, as of a virtual machine's generation.
///
/// # Errors
/// The kernel's random numbers cannot be read.
pub(super) fn generation_id() -> anyhow::Result<String> {
    let mut bits = [0; 16];
    let read = |bits: &mut [u8]| -> io::Result<()> { File::open("/dev/urandom")?.read_exact(bits) };
    read(&mut bits).context("/dev/urandom, for the generation id")?;
    Ok(format!("{:032x}", u128::from_ne_bytes(bits)))
}

/// Writes the id into the work directory.
///
/// # Errors
/// The file cannot be written.
pub(super) fn write(work: &Path, id: &str) -> anyhow::Result<()> {
    let file = work.join(FILE);
    let write = || -> io::Result<()> {
        let mut open = OpenOptions::new();
        let mut file = open.write(true).create(true).truncate(true).mode(0o600).open(&file)?;
        file.write_all(format!("{id}\n").as_bytes())
    };
    write().with_context(|| file.display().to_string())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn each_id_is_another_one_and_is_in_its_file() {
        let ids = [generation_id().unwrap(), generation_id().unwrap()];
        assert_ne!(ids[0], ids[1]);
        let work = tempfile::tempdir().unwrap();
        for id in ids {
            assert!(id.len() == 32 && id.bytes().all(|digit| digit.is_ascii_hexdigit()), "{id}");
            write(work.path(), &id).unwrap();
            assert_eq!(fs::read_to_string(work.path().join("generation-id")).unwrap(), format!("{id}\n"));
        }
    }
}
