// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake export`, and clients of it.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::Context;
use nix::unistd::Pid;
use rewake_testkit::daemon::restore;
use rewake_testkit::process::{PATIENCE, children, output, processes_naming, until};
use rewake_testkit::programs::rewake;

pub use rewake_testkit::export::ImageExport;

use crate::criu::Criu;
use crate::scene::Scene;

/// The file for the messages of a restore, in its work directory.
const MESSAGES: &str = "restore.err";
/// The log of a streamer in the work directory.
pub const STREAMER_LOG: &str = "rewake-streamer.log";

/// Runs `rewake pull` from a port of this host, with these options. Returns whether it succeeded, and what it
/// wrote.
///
/// # Errors
/// No program to start.
pub fn pull(
    port: u16,
    image: impl AsRef<OsStr>,
    to: &Path,
    options: &[String],
) -> anyhow::Result<(bool, String)> {
    let mut from = OsString::from("127.0.0.1:");
    from.push(image);
    let mut command = Command::new(rewake()?);
    command.args(["pull", "--port", &port.to_string()]).arg(from).arg(to).args(options);
    let output = command.output().context("rewake pull")?;
    let text = [output.stdout, output.stderr].concat();
    Ok((output.status.success(), String::from_utf8_lossy(&text).into_owned()))
}

/// Writes the manifest of a scene's image. Returns the name of the image below its folder.
///
/// # Errors
/// It cannot be sealed.
pub fn seal(scene: &Scene) -> anyhow::Result<String> {
    output(Command::new(rewake()?).arg("seal").arg(scene.images()))?;
    let name = scene.images().file_name().and_then(|name| Some(name.to_str()?.to_owned()));
    name.context("the name of the image")
}

/// Compares a copy with its manifest.
///
/// # Errors
/// It is not complete, or not right.
pub fn verify(copy: &Path) -> anyhow::Result<()> {
    output(Command::new(rewake()?).arg("verify").arg(copy)).map(drop)
}

/// `rewake restore --from` a port of this host into the directory `copy`, not yet started. `options` are for
/// it.
///
/// # Errors
/// No program to start.
pub fn restore_from(
    criu: &Criu,
    scene: &Scene,
    port: u16,
    copy: &Path,
    options: &[&str],
) -> anyhow::Result<Command> {
    let name = scene.images().file_name().map(|name| name.to_string_lossy().into_owned());
    let name = name.context("the name of the image")?;
    let mut command = restore(criu, copy)?;
    command.args(["--from", &format!("127.0.0.1:{name}"), "--port", &port.to_string()]);
    command.args(options).arg("-W").arg(scene.work()).args(["--", "-d", "-v4"]);
    Ok(command)
}

/// Has a command write its messages into `restore.err` of a scene's work directory: its streamer outlives it,
/// and has a copy of the descriptor.
///
/// # Errors
/// The file cannot be made.
pub fn with_messages_in_file(command: &mut Command, scene: &Scene) -> anyhow::Result<()> {
    let file = File::create(scene.work().join(MESSAGES)).context("the file for messages")?;
    command.stdout(Stdio::null()).stderr(file);
    Ok(())
}

/// What `rewake restore` and its streamer have said. A streamer that the command does not wait for has a log
/// of its own.
#[must_use]
pub fn messages(scene: &Scene) -> String {
    let text = |name| fs::read_to_string(scene.work().join(name)).unwrap_or_default();
    [MESSAGES, STREAMER_LOG].map(text).concat()
}

/// The processes of the streamer of a work directory that has ended or ends: none are left in time.
///
/// # Errors
/// Some are left.
pub fn streamer_ended(scene: &Scene) -> anyhow::Result<()> {
    let text = scene.work().display().to_string();
    let ended = until(PATIENCE, || processes_naming(&text).is_empty().then_some(()));
    ended.with_context(|| format!("the streamer does not end\n{}", messages(scene)))
}

/// The fetchers of the streamer of a scene's work directory.
#[must_use]
pub fn fetchers(scene: &Scene) -> Vec<Pid> {
    let is_fetcher = |pid: &Pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.ends_with(b"\0fetcher\0")
    };
    let streamers = processes_naming(&scene.work().display().to_string());
    streamers.into_iter().flat_map(children).filter(is_fetcher).collect()
}

/// The workers of the streamer of a scene's work directory.
#[must_use]
pub fn workers(scene: &Scene) -> Vec<Pid> {
    let streamers = processes_naming(&scene.work().display().to_string());
    let of_them = streamers.iter().copied().flat_map(children);
    of_them.filter(|pid| streamers.contains(pid)).collect()
}

/// Asserts that both directories have the same files of an image.
///
/// # Panics
/// They have not, or one cannot be read.
pub fn assert_same(image: &Path, copy: &Path) {
    let mut count = 0;
    for entry in fs::read_dir(image).unwrap() {
        let name = entry.unwrap().file_name();
        if name.to_str().unwrap().ends_with(".img") || name == "rewake-manifest" {
            assert!(fs::read(image.join(&name)).unwrap() == fs::read(copy.join(&name)).unwrap(), "{name:?}");
            count += 1;
        }
    }
    assert!(count > 5, "{count} files");
}
