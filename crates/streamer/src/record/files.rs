// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keeps the timeline in CRIU's work directory, beside CRIU's own logs and statistics.

use std::io::{self, Write as _};
use std::path::Path;

use anyhow::Context as _;
use serde::Serialize;
use tempfile::NamedTempFile;

use super::model::Record;
use super::trace::trace;

/// The record, for programs.
pub const JSON: &str = "rewake-timeline.json";
/// The record as a trace, for users.
pub const TRACE: &str = "rewake-trace.json";

/// Writes both files, each whole or not at all. Files of an earlier restore are replaced.
///
/// # Errors
/// The directory cannot be written to.
pub fn write(record: &Record, work: &Path) -> anyhow::Result<()> {
    put(work, JSON, record)?;
    put(work, TRACE, &trace(record))
}

fn put(work: &Path, name: &str, value: &impl Serialize) -> anyhow::Result<()> {
    let written = || -> io::Result<()> {
        let mut file = NamedTempFile::new_in(work)?;
        file.write_all(&serde_json::to_vec(value)?)?;
        file.write_all(b"\n")?;
        file.persist(work.join(name))?;
        Ok(())
    };
    written().with_context(|| format!("writing {name} in {}", work.display()))
}

/// Reads the record; `None` if the file does not exist.
///
/// # Errors
/// It cannot be read.
pub fn read(work: &Path) -> anyhow::Result<Option<Record>> {
    let path = work.join(JSON);
    let bytes = match std::fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        bytes => bytes.with_context(|| format!("reading {}", path.display()))?,
    };
    serde_json::from_slice(&bytes).with_context(|| format!("reading {}", path.display())).map(Some)
}

/// Removes the files of an earlier restore, which would look like this one's.
///
/// # Errors
/// It cannot be removed.
pub fn clear(work: &Path) -> anyhow::Result<()> {
    for name in [JSON, TRACE] {
        match std::fs::remove_file(work.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("removing an old {name} in {}", work.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::example;
    use super::*;

    #[test]
    fn a_written_record_is_read_until_it_is_cleared() {
        let work = tempfile::tempdir().unwrap();
        assert_eq!(read(work.path()).unwrap(), None);
        write(&Record::default(), work.path()).unwrap();
        write(&example::record(), work.path()).unwrap();
        assert_eq!(read(work.path()).unwrap(), Some(example::record()));
        let mut names: Vec<_> =
            std::fs::read_dir(work.path()).unwrap().map(|of| of.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, [JSON, TRACE]);
        clear(work.path()).unwrap();
        clear(work.path()).unwrap();
        assert_eq!(read(work.path()).unwrap(), None);
    }
}
