// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files that are made again when their inputs have changed: beside each is a stamp with the hash of its
//! inputs, written last.

use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};

use crate::files;

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
        let bytes = files::bytes(path)?;
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
    files::remove(thing)?;
    make()?;
    files::write(&stamp, hash)
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
        files::create_folder(&folder).unwrap();
        let thing = folder.join("thing");
        let mut made = 0;
        for input in ["a", "a", "b", "b"] {
            ready(&thing, &Inputs::default().text(input), || {
                made += 1;
                files::write(&thing, input)
            })
            .unwrap();
            assert_eq!(fs::read_to_string(&thing).unwrap(), input);
        }
        fs::remove_file(&thing).unwrap();
        let failed = ready(&thing, &Inputs::default().text("b"), || anyhow::bail!("no"));
        assert!(failed.is_err());
        files::remove(&folder).unwrap();
        assert_eq!(made, 2);
    }
}
