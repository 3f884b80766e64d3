// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a process of ours says on standard error when it ends: a panic, or the allocator.

use std::fs::File;
use std::io::{self, Seek as _};
use std::os::unix::fs::FileExt as _;
use std::process::Stdio;

use rewake_process::names::printable;

use crate::session::image::plan_file;

/// Bytes that a message shows.
const SHOWN: usize = 200;

/// The standard error of child processes: a memory file, which needs no reader.
#[derive(Debug)]
pub(crate) struct LastWords(File);

impl LastWords {
    /// # Errors
    /// EMFILE, ENOMEM.
    pub(crate) fn new() -> io::Result<Self> {
        plan_file::memory_file().map(Self)
    }

    /// For a child.
    ///
    /// # Errors
    /// EMFILE.
    pub(crate) fn writer(&self) -> io::Result<Stdio> {
        self.0.try_clone().map(Stdio::from)
    }

    /// Takes what was said, with a colon before it; empty if nothing was. The next child's words come first
    /// again.
    pub(crate) fn take(&self) -> String {
        let mut words = [0; SHOWN];
        let count = self.0.read_at(&mut words, 0).unwrap_or(0);
        // What stays would be shown once more.
        let _ = self.0.set_len(0).and_then(|()| (&self.0).rewind());
        match printable(words[..count].trim_ascii()) {
            words if words.is_empty() => words,
            words => format!(": {words}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn says(words: &LastWords, text: &str) {
        let mut command = Command::new("sh");
        command.args(["-c", "printf %s \"$0\" >&2", text]).stderr(words.writer().unwrap());
        assert!(command.status().unwrap().success());
    }

    #[test]
    fn the_words_of_each_child_are_shown_once() {
        let words = LastWords::new().unwrap();
        assert_eq!(words.take(), "");
        says(&words, "panicked at\n\x1b[31mline");
        assert_eq!(words.take(), ": panicked at\\n\\u{1b}[31mline");
        says(&words, &"x".repeat(300));
        assert_eq!(words.take(), format!(": {}", "x".repeat(SHOWN)));
        says(&words, "y");
        assert_eq!(words.take(), ": y");
    }
}
