// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a hook says to CRIU.

use std::error::Error;
use std::os::fd::OwnedFd;

/// The result of a hook. `?` turns every error into [`Refusal::Failed`].
pub type Answer<T = ()> = Result<T, Refusal>;

/// Why a hook did not do it.
#[derive(Debug)]
pub enum Refusal {
    /// Not this plugin's business: CRIU asks the next plugin (`-ENOTSUP`).
    NotMine,
    /// This plugin's business, and it went wrong: logged, and the dump or restore fails.
    Failed(Box<dyn Error + Send + Sync>),
}

impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for Refusal {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// What became of a file that is to be restored.
#[derive(Debug)]
pub enum Restored {
    /// It is open: CRIU moves it to its number in the task.
    File(OwnedFd),
    /// It waits for another task: CRIU asks again after [`crate::Host::wake_files`] for this one. Only where
    /// [`crate::Host::can_wait`]; elsewhere it fails the restore.
    Later,
}

/// How a mapping of a device is to be restored.
#[derive(Debug)]
pub struct Mapping {
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// The file to map; none: CRIU opens the path of the old one. CRIU closes it.
    pub file: Option<OwnedFd>,
}

/// An error with its causes, on one line. A cause that the error before it has told already is not told again.
pub(crate) fn one_line(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| (*error).source());
    let mut text: Vec<String> = Vec::new();
    for cause in causes.map(ToString::to_string) {
        if !text.last().is_some_and(|told| told.ends_with(&cause)) {
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
        struct Telling(#[source] Outer);
        let error = Telling(Outer(std::io::Error::other("disk on fire")));
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
