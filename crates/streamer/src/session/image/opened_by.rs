// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares a session's image with the one that `criu restore` restores (M6): registers of one and memory of
//! another would make a program that never existed. A copy of the session's image is accepted.
//!
//! CRIU keeps its image directory open from before it connects until the restore has finished. So
//! `/proc/PID/fd` of the process that connects shows which image it restores, before any task has reported.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use anyhow::bail;
use rewake_criu_images::ImageDir;
use rewake_process::proc;
use tracing::debug;

use super::Image;

impl Image {
    /// Checks that a process which has an image open has this one.
    ///
    /// A process without an image directory, or one whose descriptors this process may not list, is accepted.
    ///
    /// # Errors
    /// The process has the directory of another dump's image open, and none of this one's.
    pub(crate) fn check_opened_by(&self, pid: i32) -> anyhow::Result<()> {
        let folder = PathBuf::from(format!("/proc/{pid}/fd"));
        let numbers = proc::numbers(&folder).unwrap_or_else(|error| {
            debug!(%error, pid, "which image the restore has open is not known");
            Vec::new()
        });
        let mut other = None;
        for path in numbers.into_iter().map(|number| folder.join(number.to_string())) {
            // The restore closes descriptors meanwhile.
            let Ok(found) = fs::metadata(&path) else { continue };
            if !found.is_dir() {
                continue;
            }
            if (found.dev(), found.ino()) == self.directory() {
                return Ok(());
            }
            match ImageDir::open(&path).and_then(|dir| dir.dump_id()) {
                Ok(dump) if dump == self.dump => return Ok(()),
                Ok(_) => other = fs::read_link(&path).ok().or(other),
                // It is no image.
                Err(_) => {}
            }
        }
        let Some(other) = other else { return Ok(()) };
        bail!(
            "`criu restore` restores the image in {}, and this streamer serves another dump: give both the \
             same directory (-D)",
            other.display()
        )
    }
}
