// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a peer may do: the options `--allow`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};

use rewake_criu_tls::PeerName;

/// One `--allow NAME` or `--allow NAME=FOLDER`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowedPeer {
    /// The name that the peer's certificate must have.
    pub(crate) name: PeerName,
    /// The images that it may read; none: all.
    pub folder: Option<PathBuf>,
}

impl AllowedPeer {
    /// Reads `NAME` or `NAME=FOLDER`.
    ///
    /// # Errors
    /// The name is none of a host, or the folder's path has `..`; says what is expected.
    pub fn of(given: &OsStr) -> Result<Self, String> {
        let mut parts = given.as_bytes().splitn(2, |byte| *byte == b'=');
        let name = str::from_utf8(parts.next().unwrap_or_default()).map_err(|error| error.to_string())?;
        let name = PeerName::of_address(name).map_err(|error| error.to_string())?;
        let folder = parts.next().map(|folder| Path::new(OsStr::from_bytes(folder)));
        if folder.is_some_and(|folder| !is_below(folder)) {
            return Err("expected NAME=FOLDER, and for the folder a path without `..`".to_owned());
        }
        Ok(Self { name, folder: folder.map(Path::to_owned) })
    }
}

/// Whether a path names something below a directory.
fn is_below(path: &Path) -> bool {
    let mut parts = path.components().peekable();
    parts.peek().is_some() && parts.all(|part| matches!(part, Component::Normal(_)))
}

/// What one peer may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerRights {
    /// All that a peer can request.
    All,
    /// It may read images in these folders.
    Folders(Vec<PathBuf>),
}

impl PeerRights {
    /// Checks whether the peer may read an image with this name, which has no `..`. The name may be the
    /// folder's own.
    ///
    /// # Errors
    /// It may not; says what it may read.
    pub fn check_image(&self, name: &Path) -> anyhow::Result<()> {
        self.check_place(name, |folder| name.starts_with(folder))
    }

    /// Checks whether the peer may read what the name of an image, or a link, has led to: `is_in` says
    /// whether that is in a folder. The answer is that for an image of another folder, whether there is one
    /// or not.
    ///
    /// # Errors
    /// It may not; says what it may read.
    pub fn check_place(&self, name: &Path, is_in: impl Fn(&Path) -> bool) -> anyhow::Result<()> {
        let Self::Folders(folders) = self else { return Ok(()) };
        if folders.iter().any(|folder| is_in(folder)) {
            return Ok(());
        }
        let folders: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
        anyhow::bail!(
            "image {}: this server's --allow permits this client's certificate to read {} only",
            name.display(),
            folders.join(" and ")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folders(names: &[&str]) -> PeerRights {
        PeerRights::Folders(names.iter().map(PathBuf::from).collect())
    }

    #[test]
    fn a_peer_reads_images_in_its_folders_only() {
        let rights = folders(&["web", "db/a"]);
        for name in ["web", "web/1", "web/x/2", "db/a", "db/a/1"] {
            rights.check_image(Path::new(name)).unwrap();
        }
        for name in ["webs", "db", "db/b", "a", "x/web"] {
            let refused = rights.check_image(Path::new(name)).unwrap_err().to_string();
            assert!(refused.contains(name) && refused.ends_with("to read web and db/a only"), "{refused}");
        }
        PeerRights::All.check_image(Path::new("anything")).unwrap();
    }

    #[test]
    fn an_option_names_a_peer_and_a_folder() {
        let of = |given: &[u8]| AllowedPeer::of(OsStr::from_bytes(given));
        let allowed = of(b"host-b=web/caf\xe9").unwrap();
        assert_eq!(allowed.name, PeerName::of_address("host-b").unwrap());
        assert_eq!(allowed.folder, Some(OsStr::from_bytes(b"web/caf\xe9").into()));
        assert_eq!(of(b"192.0.2.1").unwrap().folder, None);
        for wrong in ["", "=web", "no name", "host-b=", "host-b=/web", "host-b=../web", "host-b=."] {
            of(wrong.as_bytes()).unwrap_err();
        }
    }
}
