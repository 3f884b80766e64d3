// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake dump`: runs `criu dump`, with the plugin for GPUs where there is one. The image is sealed and on
//! the disk before CRIU kills the tree, and replaces an earlier one in one step.

pub mod action_script;
mod complete;
mod overlay;
mod place;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitStatus;
use std::time::Instant;

use anyhow::{Context as _, anyhow, bail, ensure};
use rewake_manifest::{VerifyReport, verify_files};
use rewake_plugin_session::wait_for_tree;

use self::action_script::ActionScript;
use self::place::DumpPlace;
use super::criu::{CriuInvocation, CriuOptions, NO_PLUGIN, code, show_errors};
use super::{directory, print};
use crate::cli::DumpArgs;
use rewake_plugin_protocol::plugin_folder;
use rewake_streamer::supervise::leftover_stores;
use rewake_streamer::units;

/// Options that are for `rewake dump` itself, not for CRIU.
const OURS: [&str; 6] = ["-t", "--tree", "-D", "--images-dir", "-W", "--work-dir"];

/// Runs the command; gives the exit code: 0 when the tree was dumped.
///
/// # Errors
/// Options or directories are wrong, there is no CRIU, or it failed: the last error lines of its log were
/// shown.
pub fn run(options: &DumpArgs) -> anyhow::Result<u8> {
    let start = Instant::now();
    let target = directory(&options.images_dir, "-D")?;
    let work = options.work_dir.as_deref().map(|path| directory(path, "-W")).transpose()?;
    let given = CriuOptions::read(&options.criu_options, &OURS)?;
    ensure!(
        !given.dedups,
        "--auto-dedup: it removes pages from the parent image while the dump may still fail; run `criu \
         dedup` afterwards, and seal the parent again"
    );
    let gpu = plugin_folder::machine_has_gpu();
    let plugins = options.programs.plugins(gpu, &given)?;
    let (tree, log) = (options.tree.to_string(), given.log.clone().unwrap_or_else(|| "dump.log".into()));
    // CRIU's own plugin folder may lack rewake_plugin.so.
    wait_for_tree(options.tree, |line: &str| print::say(line)).map_err(|error| anyhow!("{error}"))?;
    let kept = leftover_stores::take_back_from(options.tree)?;
    ensure!(kept.is_empty(), "{}", kept.join("; "));
    let place = if given.streams { None } else { Some(DumpPlace::prepare(&target, &log)?) };
    let images = place.as_ref().map_or(&*target, DumpPlace::images);
    let dump = CriuDump {
        options,
        criu: CriuInvocation {
            name: "dump",
            images,
            work: work.as_deref().filter(|work| *work != target).unwrap_or(images),
            ours: &["-t", &tree],
            plugins: plugins.as_deref(),
            given: &options.criu_options,
            options: &given,
            environment: &[],
        },
        target: &target,
        place: place.as_ref(),
        start,
    };
    let done = dump.run();
    let hint = if gpu && plugins.is_none() && !given.plugins { NO_PLUGIN } else { "" };
    dump.conclude(done, &log, hint)
}

/// One dump.
#[derive(Debug)]
struct CriuDump<'a> {
    options: &'a DumpArgs,
    criu: CriuInvocation<'a>,
    /// The user's directory.
    target: &'a Path,
    /// `None` if CRIU writes no files.
    place: Option<&'a DumpPlace>,
    start: Instant,
}

impl CriuDump<'_> {
    /// Runs CRIU, and completes the image. A signal to this process alone does not reach CRIU: a dump that is
    /// cut off can leave its tree stopped.
    fn run(&self) -> anyhow::Result<ExitStatus> {
        let images = self.criu.images;
        let program = self.options.programs.criu();
        let mut command;
        if self.completes_before_the_kill() {
            let scripts = action_script::full_paths(&self.criu.options.scripts)?;
            let script = ActionScript { images: images.into(), target: self.target.into(), scripts };
            let given = without_scripts(self.criu.given);
            command = CriuInvocation { given: &given, ..self.criu }.command(&program);
            script.add_to(&mut command)?;
        } else {
            command = self.criu.command(&program);
        }
        let exit = command.status().with_context(|| rewake_process::criu::starting(&program))?;
        if let Some(place) = self.place
            && exit.success()
            && !place.is_committed()?
        {
            complete::complete(images)?;
            place::commit(images, self.target)?;
        }
        Ok(exit)
    }

    /// A tree that runs on need not wait, stopped, until the image is on the disk.
    fn completes_before_the_kill(&self) -> bool {
        self.place.is_some() && !self.criu.options.keeps_tree
    }

    /// Cleans up; gives the exit code.
    fn conclude(&self, done: anyhow::Result<ExitStatus>, log: &Path, hint: &str) -> anyhow::Result<u8> {
        let Some(exit) = done.as_ref().ok().copied().filter(ExitStatus::success) else {
            if done.is_ok() {
                show_errors(&self.criu.log());
            }
            if let Some(place) = self.place {
                if place.is_exchanged()? {
                    // CRIU failed after that: whether the tree still runs is not known, so no image is
                    // removed.
                    bail!(
                        "criu dump failed when the new image was complete: it is in {}, the old one in {} \
                         until the next dump; see {}",
                        self.target.display(),
                        place.images().display(),
                        self.target.join(log).display()
                    );
                }
                place.abandon(log);
            }
            let exit = done?;
            // Where the user looks for it; an old image's directory has got it.
            let work = if self.criu.work == self.criu.images { self.target } else { self.criu.work };
            bail!("criu dump failed ({exit}); its log is {}{hint}", work.join(log).display());
        };
        match self.place.map(DumpPlace::remove_old) {
            None | Some(Ok(true)) => {}
            Some(Ok(false)) => print::say(format!(
                "the old image is still being restored: it is in {} until the next dump",
                self.criu.images.display()
            )),
            Some(Err(error)) => print::say(format!("the old image is not removed: {error:#}")),
        }
        if let Err(error) = self.report() {
            print::say(format!("the dump has succeeded, and cannot be reported: {error:#}"));
        }
        Ok(code(exit))
    }
}

impl CriuDump<'_> {
    /// Writes the line of a dump that has succeeded.
    fn report(&self) -> anyhow::Result<()> {
        let (tree, time) = (self.options.tree, units::seconds(self.start.elapsed()));
        if self.place.is_none() {
            print::done(format!(
                "process {tree} was dumped in {time}; CRIU has sent its memory, so no image is sealed here"
            ));
            return Ok(());
        }
        let VerifyReport { id, files, bytes, .. } = verify_files(self.target, |_| ())?;
        let (images, bytes) = (self.target.display(), units::bytes(bytes));
        print::done(format!(
            "{images}: process {tree} was dumped in {time}: {files} files, {bytes}; image {id}"
        ));
        Ok(())
    }
}

/// The options for CRIU without its action scripts, which our script runs.
fn without_scripts(given: &[OsString]) -> Vec<OsString> {
    let mut options = given.iter();
    let mut others = Vec::new();
    while let Some(option) = options.next() {
        let text = option.to_string_lossy();
        if text == "--action-script" {
            options.next();
        } else if !text.starts_with("--action-script=") {
            others.push(option.clone());
        }
    }
    others
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn action_scripts_are_left_out_in_both_spellings() {
        let given = ["-v4", "--action-script", "/a", "--action-script=/b", "-o", "log"].map(OsString::from);
        assert_eq!(without_scripts(&given), ["-v4", "-o", "log"].map(OsString::from));
    }
}
