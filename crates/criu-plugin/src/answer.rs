// SPDX-License-Identifier: MIT OR Apache-2.0
//! The results that a hook returns to CRIU.

use std::error::Error;
use std::os::fd::OwnedFd;

/// The result of a hook. `?` turns every error into [`Refusal::Failed`].
pub type Answer<T = ()> = Result<T, Refusal>;

/// Why a hook has no result.
#[derive(Debug)]
pub enum Refusal {
    /// Not for this plugin: CRIU calls the next plugin (`-ENOTSUP`).
    NotMine,
    /// The plugin failed: the error is logged, and the dump or restore fails.
    Failed(Box<dyn Error + Send + Sync>),
}

impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for Refusal {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// The result of restoring a file.
#[derive(Debug)]
pub enum Restored {
    /// The file is open: CRIU moves it to its number in the task.
    File(OwnedFd),
    /// The file depends on another task: CRIU calls again when another task sends this one a file. It fails
    /// the restore with CRIU up to 4.2.1.
    Later,
}

/// How a mapping of a device is restored.
#[derive(Debug)]
pub struct MapSource {
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// The file to map; None: CRIU opens the path of the old file. CRIU closes it.
    pub file: Option<OwnedFd>,
}

/// Writes an error with its causes on one line. A cause that the text before ends with is left out.
pub(crate) fn one_line(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| (*error).source());
    let mut text: Vec<String> = Vec::new();
    for cause in causes.map(ToString::to_string) {
        if !text.last().is_some_and(|before| before.ends_with(&cause)) {
            text.push(cause);
        }
    }
    text.join(": ").split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_one_line_with_their_causes() {
        #[derive(Debug, thiserror::Error)]
        #[error("read\nthe image")]
        struct Outer(#[source] std::io::Error);
        let error = Outer(std::io::Error::other("disk on fire"));
        assert_eq!(one_line(&error), "read the image: disk on fire");
        #[derive(Debug, thiserror::Error)]
        #[error("restore: {0}")]
        struct WithSource(#[source] Outer);
        let error = WithSource(Outer(std::io::Error::other("disk on fire")));
        assert_eq!(one_line(&error), "restore: read the image: disk on fire");
    }

    #[test]
    fn a_question_mark_fails_the_hook() {
        fn hook() -> Answer {
            Err(std::io::Error::other("no"))?;
            Ok(())
        }
        assert!(matches!(hook(), Err(Refusal::Failed(error)) if error.to_string() == "no"));
    }
}
