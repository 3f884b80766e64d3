// SPDX-License-Identifier: MIT OR Apache-2.0
//! The generation id of a restore: what differs between restored copies of one program (`docs/serve.md`).

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::Path;

use anyhow::Context as _;
use nix::fcntl::{OFlag, renameat};
use nix::unistd::{UnlinkatFlags, unlinkat};
use rewake_process::beneath::Beneath;

/// The environment variable of CRIU, and so of its action scripts, that has the id.
pub(super) const VARIABLE: &str = "REWAKE_GENERATION_ID";
/// The file in the work directory that has the id, and a newline.
const FILE: &str = "generation-id";

/// Returns a new id: 128 random bits of the kernel as 32 hexadecimal digits, as of a virtual machine's
/// generation.
///
/// # Errors
/// The kernel's random numbers cannot be read.
pub(super) fn generation_id() -> anyhow::Result<String> {
    let mut bits = [0; 16];
    let read = |bits: &mut [u8]| -> io::Result<()> { File::open("/dev/urandom")?.read_exact(bits) };
    read(&mut bits).context("/dev/urandom, for the generation id")?;
    Ok(format!("{:032x}", u128::from_ne_bytes(bits)))
}

/// Writes the id into the work directory. A file or a link of another user there is replaced, and not written
/// to: the directory may be another user's, and this process root's.
///
/// # Errors
/// The file cannot be written.
pub(super) fn write(work: &Path, id: &str) -> anyhow::Result<()> {
    let write = || -> io::Result<()> {
        let work = Beneath::open(work)?;
        // No other file has this name, as the id is new.
        let part = format!("{FILE}.{id}");
        let written = work.create(&*part, OFlag::O_EXCL, 0o600)?.write_all(format!("{id}\n").as_bytes());
        let renamed = written.and_then(|()| Ok(renameat(&work, &*part, &work, FILE)?));
        if renamed.is_err() {
            let _ = unlinkat(&work, &*part, UnlinkatFlags::NoRemoveDir);
        }
        renamed
    };
    write().with_context(|| work.join(FILE).display().to_string())
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
        assert_eq!(fs::read_dir(work.path()).unwrap().count(), 1, "no part is left");
    }

    #[test]
    fn a_link_in_the_place_of_the_file_is_replaced_and_not_followed() {
        let work = tempfile::tempdir().unwrap();
        let other = tempfile::NamedTempFile::new().unwrap();
        fs::write(other.path(), "of another program").unwrap();
        std::os::unix::fs::symlink(other.path(), work.path().join(FILE)).unwrap();
        let id = generation_id().unwrap();
        write(work.path(), &id).unwrap();
        assert_eq!(fs::read_to_string(other.path()).unwrap(), "of another program");
        assert!(work.path().join(FILE).symlink_metadata().unwrap().is_file());
    }
}
