// SPDX-License-Identifier: MIT OR Apache-2.0
//! The paths of an archive's entries.

/// The folder with CRIU's files.
const FOLDER: &str = "checkpoint";

/// How the names of files begin that `rewake` writes into an image's directory. Such a file from an archive
/// would claim that the image was sealed, or that it is arriving.
const OWN: &str = "rewake-";

/// Where a file of an archive belongs.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ArchivePlace {
    /// A file of the checkpoint, by its name; none: the folder itself.
    Checkpoint(Option<String>),
    /// Elsewhere: what a container engine keeps in addition to the checkpoint.
    Elsewhere,
}

impl ArchivePlace {
    /// Reads a path of an archive.
    ///
    /// # Errors
    /// It leads out of the archive, the folder has a folder, or a file with a name of `rewake`.
    pub(crate) fn of(path: &[u8]) -> Result<Self, String> {
        if path.contains(&0) || path.starts_with(b"/") {
            return Err("an absolute path, expected one in the archive".to_owned());
        }
        let components = path.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".");
        let components: Vec<&[u8]> = components.collect();
        if components.contains(&&b".."[..]) {
            return Err("a path with `..`, expected one in the archive".to_owned());
        }
        match &*components {
            [folder] if *folder == FOLDER.as_bytes() => Ok(Self::Checkpoint(None)),
            [folder, name] if *folder == FOLDER.as_bytes() => {
                let name = std::str::from_utf8(name).map_err(|_| "a name that is not UTF-8".to_owned())?;
                if name.starts_with(OWN) {
                    return Err(
                        "a file of a sealed image, and no checkpoint of an engine has one: leave it out"
                            .to_owned(),
                    );
                }
                Ok(Self::Checkpoint(Some(name.to_owned())))
            }
            [folder, ..] if *folder == FOLDER.as_bytes() => {
                Err("a folder in the checkpoint, and CRIU makes none".to_owned())
            }
            _ => Ok(Self::Elsewhere),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str) -> Option<String> {
        match ArchivePlace::of(path.as_bytes()).unwrap() {
            ArchivePlace::Checkpoint(name) => name,
            ArchivePlace::Elsewhere => None,
        }
    }

    #[test]
    fn files_of_the_checkpoint_have_one_component_below_it() {
        for path in ["checkpoint/pstree.img", "./checkpoint/pstree.img", "checkpoint//./pstree.img"] {
            assert_eq!(file(path).as_deref(), Some("pstree.img"), "{path}");
        }
        assert_eq!(ArchivePlace::of(b"checkpoint/"), Ok(ArchivePlace::Checkpoint(None)));
        for path in ["config.dump", "./", "rootfs-diff.tar", "checkpoints/x", "a/checkpoint/pstree.img"] {
            assert_eq!(ArchivePlace::of(path.as_bytes()), Ok(ArchivePlace::Elsewhere), "{path}");
        }
    }

    #[test]
    fn paths_out_of_the_archive_are_refused() {
        for path in ["/checkpoint/a", "../a", "checkpoint/../a", "a/..", "checkpoint/a/b", "checkpoint/a\0b"]
        {
            assert!(ArchivePlace::of(path.as_bytes()).is_err(), "{path}");
        }
    }
}
