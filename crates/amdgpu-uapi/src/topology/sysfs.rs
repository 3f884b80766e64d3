// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads small text files with bounds.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use crate::Error;

/// The most bytes of a file: a page, as sysfs never shows more.
const FILE: u64 = 4096;
/// The most numbered folders in a folder: an MI300 shows some hundred caches.
const FOLDERS: u32 = 4096;

/// The `name value` lines of a file.
pub(super) type Properties = BTreeMap<String, u64>;

/// Reads a file. Returns `None` if this process may not see it.
pub(super) fn text(path: &Path) -> Result<Option<String>, Error> {
    let read = || {
        let mut text = String::new();
        File::open(path)?.take(FILE + 1).read_to_string(&mut text)?;
        Ok(text)
    };
    match read() {
        Ok(text) if text.len() as u64 > FILE => {
            Err(wrong(path, &format!("longer than {FILE} bytes, which sysfs files never are")))
        }
        Ok(text) => Ok(Some(text)),
        Err(error) if hidden(&error) => Ok(None),
        Err(error) => Err(wrong(path, &error.to_string())),
    }
}

/// Returns whether the device cgroup hides the GPU: the driver fails with EPERM.
fn hidden(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied
}

/// Reads a file with one number.
pub(super) fn number(path: &Path) -> Result<u64, Error> {
    let text = text(path)?.ok_or_else(|| wrong(path, "this process may not read it"))?;
    let number = text.trim();
    number.parse().map_err(|_| wrong(path, &format!("{number:?} is no number")))
}

/// Reads a file of properties. Returns `None` if this process may not see it.
pub(super) fn properties(path: &Path) -> Result<Option<Properties>, Error> {
    let Some(text) = text(path)? else { return Ok(None) };
    let mut properties = Properties::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let (name, value) = parse(line).ok_or_else(|| {
            let line: String = line.chars().take(80).collect();
            wrong(path, &format!("line {}: {line:?} is not a name and a number", index + 1))
        })?;
        properties.insert(name.to_owned(), value);
    }
    Ok(Some(properties))
}

/// Parses a line. Of a list (sibling maps of caches), the first number is kept. Signed values wrap to u64, as
/// the driver's do.
fn parse(line: &str) -> Option<(&str, u64)> {
    let (name, value) = line.trim().split_once(char::is_whitespace)?;
    let first = value.trim().split(',').next()?;
    let value = first.parse().ok().or_else(|| first.parse::<i64>().ok().map(i64::cast_unsigned))?;
    Some((name, value))
}

/// Reads `folder/0/properties`, `folder/1/properties` and so on. The list is empty if the folder does not
/// exist.
pub(super) fn numbered(folder: &Path) -> Result<Vec<Properties>, Error> {
    let mut found = Vec::new();
    for number in 0..FOLDERS {
        let path: PathBuf = folder.join(number.to_string());
        if !path.is_dir() {
            return Ok(found);
        }
        found.extend(properties(&path.join("properties"))?);
    }
    Err(wrong(folder, &format!("more than {FOLDERS} entries")))
}

fn wrong(path: &Path, reason: &str) -> Error {
    Error::Topology { path: path.to_owned(), reason: reason.to_owned() }
}
