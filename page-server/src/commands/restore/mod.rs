// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake restore`: runs `criu restore` with a streamer, and shows how memory is loaded.
//!
//! The streamer and the restored processes do not depend on this command: it follows them, and may be killed.

mod cached;
mod generation;
mod place;
mod run;
mod source;
mod timeline;
mod view;

use std::path::absolute;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::ValueEnum as _;
use nix::sys::signal::Signal;
use nix::unistd::{AccessFlags, access};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};

use self::cached::CacheLease;
use self::place::WaitingStreamer;
use self::run::RestoreRun;
use self::timeline::RestoreTimeline;
use self::view::View;
use super::criu::{Criu, CriuInvocation, CriuOptions};
use super::directory;
use crate::cli::{RestoreArgs, WaitFor};
use rewake_criu_images::amdgpu::image_has_gpu;
use rewake_criu_images::{ImageDir, ImageLease};
use rewake_manifest::WORKING_SET_NAME;
use rewake_streamer::control::proto::Streaming;
use rewake_streamer::control::streamer;
use rewake_streamer::supervise::launch::LaunchPlan;
use rewake_streamer::working_set::{LoadingOptions, WorkingSet, file};

/// Options that are for `rewake restore` itself, not for CRIU.
const OURS: [&str; 4] = ["-D", "--images-dir", "-W", "--work-dir"];
/// How a user gives CRIU's plugin.
const PLUGIN_REMEDY: &str = "name ours with --plugin-dir";

/// The image of a restore, and its options.
#[derive(Debug, Clone, Copy)]
struct RestoreRequest<'a> {
    options: &'a RestoreArgs,
    given: &'a CriuOptions,
    images: &'a Path,
    /// The image has GPU state.
    gpus: bool,
    plugins: Option<&'a Path>,
    /// How the image is served while its memory arrives from another host.
    from: Option<&'a LaunchPlan>,
    /// The working set that earlier restores recorded, where this one records, too.
    earlier: &'a WorkingSet,
}

impl RestoreRequest<'_> {
    /// Starts CRIU, with these options in addition to the user's.
    fn start(&self, work: &Path, ours: &[&str], generation: &str) -> anyhow::Result<Criu> {
        generation::write(work, generation)?;
        let act = CriuInvocation {
            name: "restore",
            images: self.images,
            work,
            ours,
            plugins: self.plugins,
            given: &self.options.criu_options,
            options: self.given,
            environment: &[(generation::VARIABLE, generation)],
        };
        Criu::start(&self.options.programs.criu(), &act, !self.options.json)
    }
}

/// Runs the command; gives the exit code: CRIU's own once the tree ran, 1 before.
///
/// # Errors
/// The image cannot be served, there is no agent or no CRIU: nothing was started. Or the restore failed.
pub fn run(options: &RestoreArgs) -> anyhow::Result<u8> {
    let given = CriuOptions::read(&options.criu_options, &OURS)?;
    check_wait(options, given.detached)?;
    let plugins = |gpus| options.programs.plugins(gpus, &given);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    ensure!(
        options.source.id.is_none() || options.source.from.is_some() || options.image.is_some(),
        "--id: it is for an image of another host (--from) or of a store"
    );
    let from = source::prepare(options, options.images_dir.as_deref(), plugins)?;
    let (images, _lease) = match (&options.image, &options.images_dir) {
        (Some(url), _) => {
            let CacheLease { directory, lease } = runtime.block_on(cached::acquire(options, url, plugins))?;
            (directory, Some(lease))
        }
        (None, given) => leased(given.as_deref().unwrap_or_else(|| Path::new(".")))?,
    };
    let gpus = image_has_gpu(&images).with_context(|| format!("reading {}", images.display()))?;
    loading_options(options).check(gpus)?;
    if options.wait == WaitFor::WorkingSet {
        check_working_set(&images)?;
    }
    let earlier = if options.record { earlier_working_set(&images)? } else { WorkingSet::default() };
    let (plugins, earlier) = (plugins(gpus)?, &earlier);
    let (given, images, plugins) = (&given, &*images, plugins.as_deref());
    let request = RestoreRequest { options, given, images, gpus, plugins, from: from.as_ref(), earlier };
    runtime.block_on(restore(&request))
}

/// What is wanted of the load.
fn loading_options(options: &RestoreArgs) -> LoadingOptions {
    let RestoreArgs { record, on_demand_only, .. } = options;
    LoadingOptions { record: *record, on_demand_only: on_demand_only.map(Duration::from_secs) }
}

/// The absolute paths of `--signers`: the agent and the streamer may have another working directory.
fn signers(options: &RestoreArgs) -> anyhow::Result<Vec<PathBuf>> {
    let given = options.source.signers.iter();
    given.map(|file| absolute(file).with_context(|| file.display().to_string())).collect()
}

/// Checks that what this command waits for happens.
fn check_wait(options: &RestoreArgs, detached: bool) -> anyhow::Result<()> {
    let Some(wait) = options.wait.to_possible_value().filter(|_| options.wait != WaitFor::Resident) else {
        return Ok(());
    };
    ensure!(
        detached,
        "--wait={}: this command ends with the restored processes; add `-- -d` to restore them in the \
         background",
        wait.get_name()
    );
    ensure!(
        options.wait != WaitFor::WorkingSet || !options.record && options.on_demand_only.is_none(),
        "--wait=working-set: nothing is loaded first with --record or --on-demand-only"
    );
    Ok(())
}

/// Checks that an image has a working set to wait for.
fn check_working_set(images: &Path) -> anyhow::Result<()> {
    let path = images.join(WORKING_SET_NAME);
    let found = file::of_image(&ImageDir::open(images)?).with_context(|| path.display().to_string())?;
    ensure!(
        found.is_some_and(|found| !found.is_empty()),
        "--wait=working-set: {}: no working set was recorded; record one with `rewake restore --record`",
        path.display()
    );
    Ok(())
}

/// Checks that a working set can be recorded. Returns the one that the image has; an unusable one is
/// replaced.
fn earlier_working_set(images: &Path) -> anyhow::Result<WorkingSet> {
    access(images, AccessFlags::W_OK).with_context(|| {
        format!("--record: {}, where {WORKING_SET_NAME} is written; make it writable", images.display())
    })?;
    Ok(file::of_image(&ImageDir::open(images)?).ok().flatten().unwrap_or_default())
}

/// The images directory that was given, and a lease of it. A dump that replaces the image keeps the old one
/// for as long as its files are being opened. Remote file systems may have no such locks.
fn leased(given: &Path) -> anyhow::Result<(PathBuf, Option<ImageLease>)> {
    let images = directory(given, "-D")?;
    let lease = ImageLease::shared(&images);
    ensure!(
        !matches!(lease, Ok(None)),
        "-D {}: another image is taking its place; try again",
        images.display()
    );
    Ok((images, lease.ok().flatten()))
}

async fn restore(request: &RestoreRequest<'_>) -> anyhow::Result<u8> {
    let mut signals = signals()?;
    let view = View::new(request.options.quiet);
    let waiting = WaitingStreamer::make(request, &view).await?;
    if request.options.wait == WaitFor::WorkingSet && !waiting.lazy_pages {
        streamer::ask_to_end(&waiting.work).await;
        bail!(
            "--wait=working-set: all CPU memory of this image is loaded before its processes run, so nothing \
             is loaded first; use --wait=alive"
        );
    }
    // Followed from the beginning: a streamer that has ended answers no client.
    let (sender, latest) = watch::channel(Streaming::default());
    let (work, successor) = (waiting.work.clone(), waiting.successor_limit());
    let mut followed = tokio::spawn(async move {
        streamer::follow(&work, successor, |now| drop(sender.send_replace(now))).await
    });
    let generation_id = generation::generation_id()?;
    let started = Instant::now();
    let lazy: &[&str] = if waiting.lazy_pages { &["--lazy-pages"] } else { &[] };
    let criu = match request.start(&waiting.work, lazy, &generation_id) {
        Ok(criu) => criu,
        Err(error) => {
            streamer::ask_to_end(&waiting.work).await;
            return Err(error);
        }
    };
    let session = waiting.session;
    let timeline = RestoreTimeline { session, generation_id, ..RestoreTimeline::default() };
    let run = RestoreRun { request, waiting, started, criu, latest, view, timeline, exit: None, ended: None };
    run.follow_to_the_end(&mut followed, &mut signals).await
}

/// Receives SIGINT and SIGTERM.
fn signals() -> anyhow::Result<mpsc::Receiver<Signal>> {
    let (sender, receiver) = mpsc::channel(1);
    for (kind, number) in
        [(SignalKind::interrupt(), Signal::SIGINT), (SignalKind::terminate(), Signal::SIGTERM)]
    {
        let (mut requests, sender) = (signal(kind).context("watching signals")?, sender.clone());
        tokio::spawn(
            async move { while requests.recv().await.is_some() && sender.send(number).await.is_ok() {} },
        );
    }
    Ok(receiver)
}
