// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files that are made again when their inputs have changed: beside each is a stamp with the hash of its
//! inputs, written last.

use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// The inputs of one file or folder, hashed in the order of the calls.
#[derive(Debug, Default)]
pub(super) struct Inputs(DefaultHasher);

impl Inputs {
    pub(super) fn text(mut self, text: &str) -> Self {
        text.hash(&mut self.0);
        self
    }

    /// A file's bytes.
    pub(super) fn file(mut self, path: &Path) -> anyhow::Result<Self> {
        let bytes = fs::read(path).with_context(|| format!("read {}", path.display()))?;
        bytes.hash(&mut self.0);
        Ok(self)
    }

    /// The stamp of another file or folder that is an input.
    pub(super) fn made(self, thing: &Path) -> anyhow::Result<Self> {
        self.file(&stamp(thing))
    }

    fn hash(&self) -> String {
        format!("{:016x}\n", self.0.finish())
    }
}

/// Makes `thing`, unless it exists and was made from the same inputs.
pub(super) fn ready(
    thing: &Path,
    inputs: &Inputs,
    make: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let (stamp, hash) = (stamp(thing), inputs.hash());
    if thing.exists() && fs::read_to_string(&stamp).is_ok_and(|old| old == hash) {
        return Ok(());
    }
    remove(thing)?;
    make()?;
    fs::write(&stamp, hash).with_context(|| format!("write {}", stamp.display()))
}

/// Creates a folder with its parents.
pub(super) fn create(folder: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))
}

/// Removes a file, or a folder with all in it, if there is one.
pub(super) fn remove(path: &Path) -> anyhow::Result<()> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

fn stamp(thing: &Path) -> PathBuf {
    thing.with_added_extension("stamp")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thing_is_made_once_and_again_when_an_input_changes() {
        let folder = std::env::temp_dir().join(format!("rewake-cache-{}", std::process::id()));
        create(&folder).unwrap();
        let thing = folder.join("thing");
        let mut made = 0;
        for input in ["a", "a", "b", "b"] {
            ready(&thing, &Inputs::default().text(input), || {
                made += 1;
                fs::write(&thing, input).context("write")
            })
            .unwrap();
            assert_eq!(fs::read_to_string(&thing).unwrap(), input);
        }
        fs::remove_file(&thing).unwrap();
        let failed = ready(&thing, &Inputs::default().text("b"), || anyhow::bail!("no"));
        assert!(failed.is_err());
        remove(&folder).unwrap();
        assert_eq!(made, 2);
    }
}
