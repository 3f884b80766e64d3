// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shared by tests of the bench: a CRIU that works, programs in the place of `rewake`, leftovers of a run.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// CRIU's path; the reason where none works.
pub(crate) fn criu() -> Result<PathBuf, String> {
    let name = std::env::var("REWAKE_CRIU").unwrap_or_else(|_| "criu".to_owned());
    let found = Command::new("sh").args(["-c", "command -v \"$0\"", &name]).output().unwrap();
    let path = PathBuf::from(String::from_utf8(found.stdout).unwrap().trim());
    let check = Command::new(&name).arg("check").output();
    if check.is_ok_and(|output| output.status.success()) {
        return Ok(path);
    }
    Err(format!("`{name} check` fails (not root, no CRIU, or a kernel without what it needs)"))
}

/// A program that stands in for `rewake` and runs `script`, with CRIU's path in $CRIU.
pub(crate) fn stand_in(directory: &Path, criu: &Path, script: &str) -> PathBuf {
    let path = directory.join("rewake");
    let text = format!(
        "#!/bin/sh\nCRIU={}\n[ \"$1\" = --version ] && exec $CRIU \"$@\"\n{script}\n",
        criu.display()
    );
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// Directories of images and logs that the bench has not deleted.
pub(crate) fn images_left(directory: &Path) -> usize {
    let entries = std::fs::read_dir(directory).unwrap().flatten();
    entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("rewake-bench-")).count()
}
