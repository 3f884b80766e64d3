// SPDX-License-Identifier: MIT OR Apache-2.0
//! What can be wrong with an image directory.

use std::io;
use std::path::PathBuf;

/// Why an image was refused. Every message names the file, what was expected, and the way out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The operating system refused an act on a file.
    #[error("{file}: cannot {act} it: {source}", file = file.display())]
    Io {
        /// What was tried, as a verb.
        act: &'static str,
        /// On which file.
        file: PathBuf,
        /// The operating system's answer.
        r#source: io::Error,
    },
    /// A file that the image must have is not there.
    #[error("{file}: expected {expected}, but there is no such file: check the images directory, or dump again", file = file.display())]
    Missing {
        /// The file.
        file: PathBuf,
        /// What it would have told.
        expected: &'static str,
    },
    /// A symbolic link where a file must be: its target may be any file that root can read.
    #[error("{file}: is a symbolic link: expected a file of the image; put the file itself there", file = file.display())]
    SymbolicLink {
        /// The link.
        file: PathBuf,
    },
    /// The bytes are not what the format says.
    #[error("{file}: at byte {offset}: expected {expected}, found {found}; the image is damaged: dump again", file = file.display())]
    Damaged {
        /// The file.
        file: PathBuf,
        /// Where, in bytes from the start of the file: the start of the header or record.
        offset: u64,
        /// What the format asks for.
        expected: String,
        /// What is there.
        found: String,
    },
    /// The image is of a kind that this crate does not read.
    #[error("{file}: expected {expected}, found {found}; dump again with a supported CRIU", file = file.display())]
    Unsupported {
        /// The file.
        file: PathBuf,
        /// What is supported.
        expected: String,
        /// What is there.
        found: String,
    },
    /// The pages may be compressed, which this crate does not read.
    #[error("{file}: image version 3 (compressed pages, CRIU 4.3 and later), expected version 2; dump again without --compress", file = file.display())]
    Compressed {
        /// The inventory.
        file: PathBuf,
    },
    /// A count or a length is beyond a named limit of this crate.
    #[error("{file}: at byte {offset}: {found} {what}, more than {limit_name} = {limit}; the image is damaged or hostile: dump again", file = file.display())]
    TooMany {
        /// The file.
        file: PathBuf,
        /// Where, in bytes.
        offset: u64,
        /// What was counted.
        what: &'static str,
        /// How much there is.
        found: u64,
        /// The constant of this crate.
        limit_name: &'static str,
        /// Its value.
        limit: u64,
    },
    /// A pages file is shorter than its pagemap says.
    #[error("{file}: {len} bytes, expected {expected}: the image is truncated: dump again", file = file.display())]
    PagesTruncated {
        /// The pages file.
        file: PathBuf,
        /// Its length in bytes.
        len: u64,
        /// The sum of the pagemap's present pages in bytes.
        expected: u64,
    },
    /// A page is said to be in a parent image, and no parent has it.
    #[error("{file}: {pages} pages at {vaddr:#x} are said to be in a parent image, and {parent} has none of them; restore the parent images next to this one, or dump again in full", file = file.display(), parent = parent.display())]
    NotInParent {
        /// The pagemap of the image that is to be restored.
        file: PathBuf,
        /// The first address.
        vaddr: u64,
        /// How many pages.
        pages: u64,
        /// The last place looked in.
        parent: PathBuf,
    },
    /// Lazy pages where no userfaultfd will be registered: serving them is impossible, skipping them corrupts.
    #[error("{file}: {pages} lazy pages at {vaddr:#x} are in {found}, expected private anonymous memory; the image is damaged: dump again", file = file.display())]
    NotLazyable {
        /// The pagemap.
        file: PathBuf,
        /// The first address.
        vaddr: u64,
        /// How many pages.
        pages: u64,
        /// The mapping that is there, or "no mapping".
        found: &'static str,
    },
    /// The chain of parents leads back into itself.
    #[error("{file}: this parent image is also its own descendant, expected a chain with an end; correct the `parent` link", file = file.display())]
    ParentCycle {
        /// The parent.
        file: PathBuf,
    },
    /// The chain of parents is longer than [`crate::MAX_PARENTS`].
    #[error("{file}: more than MAX_PARENTS = {limit} parent images in a row; dump again in full", file = file.display())]
    TooManyParents {
        /// The first parent that was not opened.
        file: PathBuf,
        /// [`crate::MAX_PARENTS`].
        limit: usize,
    },
}

/// This crate's result.
pub type Result<T, E = ImageError> = std::result::Result<T, E>;
