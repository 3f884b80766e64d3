// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors of image directories.

use std::io;
use std::path::{Path, PathBuf};

use crate::open::LinkRefusal;

/// Why an image was refused. Every message has the file, what was expected, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The operating system refused an act on a file.
    #[error("{file}: cannot {act} it: {source}", file = file.display())]
    Io {
        /// The failed act, as a verb.
        act: &'static str,
        /// The file.
        file: PathBuf,
        /// The operating system's answer.
        r#source: io::Error,
    },
    /// A required file does not exist.
    #[error(
        "{file}: expected {expected}, but there is no such file: check the images directory, or dump \
         again",
        file = file.display()
    )]
    Missing {
        /// The file.
        file: PathBuf,
        /// The contents of the file.
        expected: &'static str,
    },
    /// A dump that has replaced the image removes it.
    #[error("{file}: another image is taking its place; try again", file = file.display())]
    BeingReplaced {
        /// The image's inventory.
        file: PathBuf,
    },
    /// A symbolic link that is not followed ([`crate::open`]).
    #[error("{file}: is a symbolic link {refusal}", file = file.display())]
    SymbolicLink {
        /// The link.
        file: PathBuf,
        /// Why it is not followed.
        refusal: LinkRefusal,
    },
    /// The bytes violate the format.
    #[error(
        "{file}: at byte {offset}: expected {expected}, found {found}; the image is damaged: dump again",
        file = file.display()
    )]
    Damaged {
        /// The file.
        file: PathBuf,
        /// Byte offset of the header or record in the file.
        offset: u64,
        /// The expected value.
        expected: String,
        /// The value that was found.
        found: String,
    },
    /// This crate does not read this kind of image.
    #[error(
        "{file}: expected {expected}, found {found}; dump again with a supported CRIU",
        file = file.display()
    )]
    Unsupported {
        /// The file.
        file: PathBuf,
        /// The supported value.
        expected: String,
        /// The value that was found.
        found: String,
    },
    /// The pages may be compressed, which this crate does not read.
    #[error(
        "{file}: image version 3 (compressed pages, CRIU 4.3 and later), expected version 2; dump again \
         without --compress",
        file = file.display()
    )]
    Compressed {
        /// The inventory.
        file: PathBuf,
    },
    /// A count or a length is beyond a named limit of this crate.
    #[error(
        "{file}: at byte {offset}: {found} {what}, more than {limit_name} = {limit}; the image is \
         damaged or hostile: dump again",
        file = file.display()
    )]
    TooMany {
        /// The file.
        file: PathBuf,
        /// Byte offset in the file.
        offset: u64,
        /// What was counted.
        what: &'static str,
        /// The count.
        found: u64,
        /// The name of the limit.
        limit_name: &'static str,
        /// Its value.
        limit: u64,
    },
    /// A pages file is shorter than its pagemap requires.
    #[error(
        "{file}: {len} bytes, expected {expected}: the image is truncated: dump again",
        file = file.display()
    )]
    PagesTruncated {
        /// The pages file.
        file: PathBuf,
        /// Its length in bytes.
        len: u64,
        /// The sum of the pagemap's present pages in bytes.
        expected: u64,
    },
    /// A pagemap puts a page in a parent image, and no parent has it.
    #[error(
        "{file}: {pages} pages at {vaddr:#x} are said to be in a parent image, and {parent} has none of \
         them; restore the parent images next to this one, or dump again in full",
        file = file.display(),
        parent = parent.display()
    )]
    NotInParent {
        /// The pagemap of the restored image.
        file: PathBuf,
        /// The first address.
        vaddr: u64,
        /// Number of pages.
        pages: u64,
        /// The last directory that was searched.
        parent: PathBuf,
    },
    /// Lazy pages where no userfaultfd will be registered: they cannot be served, and skipping them corrupts
    /// memory.
    #[error(
        "{file}: {pages} lazy pages at {vaddr:#x} are in {found}, expected private anonymous memory; the \
         image is damaged: dump again",
        file = file.display()
    )]
    NotLazyable {
        /// The pagemap.
        file: PathBuf,
        /// The first address.
        vaddr: u64,
        /// Number of pages.
        pages: u64,
        /// The kind of the mapping, or "no mapping".
        found: &'static str,
    },
    /// The chain of parents leads back into itself.
    #[error(
        "{file}: this parent image is also its own descendant, expected a chain with an end; correct the \
         `parent` link",
        file = file.display()
    )]
    ParentCycle {
        /// The parent.
        file: PathBuf,
    },
    /// The chain of parents is longer than [`crate::MAX_PARENTS`].
    #[error(
        "{image}: more than {limit} parent images in a row (MAX_PARENTS), each by the link `parent` of the \
         one before: expected at most {limit}; dump again in full, without --prev-images-dir",
        image = first_of_line(file).display()
    )]
    TooManyParents {
        /// The first parent that was not opened.
        file: PathBuf,
        /// [`crate::MAX_PARENTS`].
        limit: usize,
    },
}

/// The image whose line of parents this path ends: a hundred times `/parent` says nothing.
fn first_of_line(path: &Path) -> &Path {
    let is_parent = |path: &&Path| path.file_name().is_some_and(|name| name == "parent");
    path.ancestors().find(|path| !is_parent(path)).unwrap_or(path)
}

impl ImageError {
    /// Whether files of the image are wrong, as opposed to those that this program cannot read now, or not at
    /// all.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        match self {
            Self::Missing { .. }
            | Self::SymbolicLink { .. }
            | Self::Damaged { .. }
            | Self::TooMany { .. }
            | Self::PagesTruncated { .. }
            | Self::NotLazyable { .. } => true,
            Self::Io { .. }
            | Self::BeingReplaced { .. }
            | Self::Unsupported { .. }
            | Self::Compressed { .. }
            | Self::NotInParent { .. }
            | Self::ParentCycle { .. }
            | Self::TooManyParents { .. } => false,
        }
    }
}

/// Result of this crate.
pub type Result<T, E = ImageError> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ImageDir, MAX_PARENTS};

    #[test]
    fn too_many_parents_are_one_short_line() {
        let folder = tempfile::tempdir().unwrap();
        for number in 0..=MAX_PARENTS + 1 {
            let image = folder.path().join(number.to_string());
            std::fs::create_dir(&image).unwrap();
            std::os::unix::fs::symlink(format!("../{}", number + 1), image.join("parent")).unwrap();
        }
        let chain = |from: usize| {
            let mut image = ImageDir::open(folder.path().join(from.to_string())).unwrap();
            while let Some(parent) = image.parent()? {
                image = parent;
            }
            Ok::<_, ImageError>(())
        };
        chain(1).unwrap();
        let refused = chain(0).unwrap_err().to_string();
        let expected = format!("{}: more than 128 parent images in a row", folder.path().join("0").display());
        assert!(
            refused.starts_with(&expected) && refused.ends_with("without --prev-images-dir"),
            "{refused}"
        );
    }
}
