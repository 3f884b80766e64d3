// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where a restore happens: a daemon that runs already or one of its own, and a work directory.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf, absolute};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};
use tempfile::TempDir;

use super::super::directory;
use crate::cli::Restore;
use crate::control::client::{Client, ClientError};
use rewake_streamer::session::address;
use rewake_streamer::session::image::Image;

/// A daemon and the directories of one restore. Dropping it removes the directories that were made for it.
#[derive(Debug)]
pub(super) struct WorkDir {
    /// The daemon's control socket.
    pub(super) socket: PathBuf,
    /// True when the daemon was started for this restore.
    pub(super) own_daemon: bool,
    /// Work directory.
    pub(super) work: PathBuf,
    _folders: Vec<TempDir>,
}

impl WorkDir {
    /// Finds a daemon, or starts one, and connects to it.
    ///
    /// # Errors
    /// The daemon that was asked for is not there, none can be started, or the image cannot be served (told by
    /// a daemon only if one runs already).
    pub(super) async fn find(options: &Restore, images: &Path) -> anyhow::Result<(Self, Client)> {
        let given = options.work_dir.as_deref().map(|path| directory(path, "-W")).transpose()?;
        let socket = socket(options)?;
        let mut folders = Vec::new();
        let (socket, own_daemon, client) = match Client::connect(&socket).await {
            Ok(client) => (socket, false, client),
            Err(ClientError::NoDaemon(_)) if options.socket.is_none() => {
                Image::open(images).context("this image cannot be served; nothing was started")?;
                let folder = folder(&std::env::temp_dir())?;
                let socket = start_daemon(folder.path())?;
                folders.push(folder);
                let client = Client::connect(&socket).await?;
                (socket, true, client)
            }
            Err(error) => return Err(error.into()),
        };
        let (work, own) = work(given, beside(&socket))?;
        folders.extend(own);
        folders.reverse(); // the inner one is removed first
        Ok((Self { socket, own_daemon, work, _folders: folders }, client))
    }
}

/// Where a daemon is looked for. If it was named there must be one.
pub(super) fn socket(options: &Restore) -> anyhow::Result<PathBuf> {
    Ok(match &options.socket {
        Some(path) => absolute(path)?,
        None => address::default_socket()?,
    })
}

/// The work directory that was given, or one in this folder, which goes with it.
pub(super) fn work(given: Option<PathBuf>, parent: &Path) -> anyhow::Result<(PathBuf, Option<TempDir>)> {
    if let Some(given) = given {
        return Ok((given, None));
    }
    let own = folder(parent)?;
    Ok((own.path().to_owned(), Some(own)))
}

/// The folder that a daemon's socket is in, for work directories: a daemon with a /tmp of its own would not find them there.
pub(super) fn beside(socket: &Path) -> &Path {
    socket.parent().unwrap_or_else(|| Path::new("/"))
}

/// A private folder, removed when dropped.
pub(super) fn folder(parent: &Path) -> anyhow::Result<TempDir> {
    let private = fs::Permissions::from_mode(0o700);
    let made = tempfile::Builder::new().prefix("restore-").permissions(private).tempdir_in(parent);
    made.with_context(|| format!("making a work directory in {}", parent.display()))
}

/// Starts a daemon that ends with its one session, in the background: it outlives this command when that is
/// killed, since the restored processes depend on it.
fn start_daemon(folder: &Path) -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().context("finding this program")?;
    let socket = folder.join("rewake.sock");
    // Not ours: whoever reads our stderr to its end should not wait for the daemon's.
    let complaints = folder.join("serve.err");
    let mut command = Command::new(program);
    command.args(["serve", "--until-idle", "-d", "--socket"]).arg(&socket);
    let stderr = File::create(&complaints).with_context(|| format!("making {}", complaints.display()))?;
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr).status();
    if status.context("starting a daemon")?.success() {
        return Ok(socket);
    }
    let said = fs::read_to_string(&complaints).unwrap_or_default();
    bail!(
        "a daemon for this restore could not be started: {}",
        said.lines().last().unwrap_or("it said nothing")
    )
}
