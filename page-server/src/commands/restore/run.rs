// SPDX-License-Identifier: MIT OR Apache-2.0
//! One restore that runs: waits for CRIU and for the streamer, passes signals on, and says how both ended.

use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::sys::signal::Signal;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant as Deadline, interval, sleep, sleep_until, timeout};

use super::super::criu::{self, Criu};
use super::super::print;
use super::RestoreRequest;
use super::place::WaitingStreamer;
use super::timeline::{Clock, EndedEarly, RestoreTimeline};
use super::view::View;
use crate::cli::WaitFor;
use rewake_criu_images::ImageDir;
use rewake_manifest::WORKING_SET_NAME;
use rewake_streamer::control::REPORT_INTERVAL;
use rewake_streamer::control::client::ClientError;
use rewake_streamer::control::proto::{Ended, State, Streaming};
use rewake_streamer::control::streamer::{self, ABANDONED};
use rewake_streamer::record::{files, text};
use rewake_streamer::units;
use rewake_streamer::working_set::file;

/// Time limit for CRIU to notice that its streamer ended, and for a streamer to notice that its CRIU did.
const END_LIMIT: Duration = Duration::from_secs(10);
/// The exit code when the program was killed, or failed, before all its memory was resident: with CRIU's
/// `-d`, no other process waits for it.
const PROGRAM_ENDED: u8 = 3;
/// Time between two checks of whether CRIU has let the tree run.
const RESUME_INTERVAL: Duration = Duration::from_millis(5);

/// A running restore.
pub(super) struct RestoreRun<'a> {
    pub(super) request: &'a RestoreRequest<'a>,
    pub(super) waiting: WaitingStreamer,
    pub(super) started: Instant,
    pub(super) criu: Criu,
    pub(super) latest: watch::Receiver<Streaming>,
    pub(super) view: View,
    pub(super) timeline: RestoreTimeline,
    /// How CRIU ended.
    pub(super) exit: Option<ExitStatus>,
    /// How the streamer ended.
    pub(super) ended: Option<Result<Ended, ClientError>>,
}

pub(super) type Followed = tokio::task::JoinHandle<Result<Ended, ClientError>>;

impl RestoreRun<'_> {
    /// Follows the restore until CRIU and the streamer have ended, the user waits for nothing else, or a
    /// signal ends this command. Gives the exit code.
    pub(super) async fn follow_to_the_end(
        mut self,
        followed: &mut Followed,
        signals: &mut mpsc::Receiver<Signal>,
    ) -> anyhow::Result<u8> {
        loop {
            if let Some(signal) = self.step(followed, signals).await? {
                return self.interrupted(signal).await;
            }
            if self.exit.is_some() && (self.ended.is_some() || self.waits_no_longer()) {
                return self.conclude().await;
            }
        }
    }

    /// Waits for the end of the streamer or of CRIU, and shows the progress meanwhile. Returns a signal that
    /// ends this command.
    async fn step(
        &mut self,
        followed: &mut Followed,
        signals: &mut mpsc::Receiver<Signal>,
    ) -> anyhow::Result<Option<Signal>> {
        let mut redraw = interval(REPORT_INTERVAL);
        let deadline = self.deadline();
        loop {
            tokio::select! {
                ended = &mut *followed, if self.ended.is_none() => {
                    self.streamer_ended(ended.context("following the streamer")?);
                    return Ok(None);
                }
                exit = self.criu.ended(), if self.exit.is_none() => {
                    self.criu_ended(exit?).await;
                    return Ok(None);
                }
                _ = redraw.tick(), if self.ended.is_none() => {
                    self.view.show(&self.latest.borrow());
                    if self.waits_no_longer() {
                        return Ok(None);
                    }
                }
                Some(signal) = signals.recv() => return Ok(Some(signal)),
                () = until(deadline) => {
                    if !self.has_no_work() {
                        return Ok(None);
                    }
                    if self.exit.is_some() {
                        bail!("criu ended, and its streamer did not: see `rewake status`");
                    }
                    self.criu.kill_tree();
                    self.exit = Some(self.criu.ended().await?);
                    return Ok(None);
                }
            }
        }
    }

    /// The time that CRIU or the streamer has left when the other's end leaves it no work.
    fn deadline(&self) -> Option<Deadline> {
        self.has_no_work().then(|| Deadline::now() + END_LIMIT)
    }

    /// Whether the end of the streamer leaves CRIU no work, or CRIU's end the streamer.
    fn has_no_work(&self) -> bool {
        match (&self.exit, &self.ended) {
            (None, Some(Ok(ended))) if ended.ok => false,
            (None, Some(Ok(ended))) => match end_state(ended) {
                // It has killed those whose memory is lost.
                State::Failed => true,
                // CRIU waits for what is left of the tree.
                State::Ended => false,
                _ => !self.criu.has_resumed(),
            },
            // Processes that run wait for `rewake recover`.
            (None, Some(Err(_))) => !self.criu.has_resumed(),
            (Some(exit), None) => !exit.success() && !self.criu.has_resumed(),
            _ => false,
        }
    }

    /// Whether the restored processes run at this moment. Reports of the streamer are older: a tree may run,
    /// and all its memory be resident, before the first of them shows that.
    async fn tree_runs(&mut self) -> bool {
        let asked = async { streamer::connect(&self.waiting.work).await?.streaming().await };
        let before = || self.latest.borrow().state();
        let state = match (asked.await, &self.ended) {
            (Ok(now), _) => now.state(),
            (Err(_), Some(Ok(ended))) => end_state(ended),
            (Err(_), _) => before(),
        };
        if self.criu.has_resumed() || self.exit.is_some() {
            return self.criu.has_resumed() || self.exit.is_some_and(|exit| exit.success());
        }
        if !matches!(state, State::Running | State::Complete | State::Ended) {
            return false;
        }
        // All processes are in place, and CRIU is about to let them run.
        let resumed = async {
            while !self.criu.has_resumed() && self.exit.is_none() {
                tokio::select! {
                    exit = self.criu.ended() => self.exit = exit.ok(),
                    () = sleep(RESUME_INTERVAL) => {}
                }
            }
            self.criu.has_resumed()
        };
        // A CRIU without room for its statistics writes none, and lets them run all the same.
        timeout(END_LIMIT, resumed).await.unwrap_or(true)
    }

    /// The processes run, and the user waits for nothing else.
    fn waits_no_longer(&self) -> bool {
        let has_waited = match self.request.options.wait {
            WaitFor::Alive => true,
            WaitFor::WorkingSet => self.latest.borrow().working_set_us > 0,
            WaitFor::Resident => false,
        };
        has_waited && self.timeline.alive_ms.is_some()
    }

    fn streamer_ended(&mut self, ended: Result<Ended, ClientError>) {
        let last = ended.as_ref().ok().and_then(|ended| ended.last.as_ref());
        let clock = last.map(|last| Clock::new(self.started, last));
        // CRIU loads all memory itself, so its exit code says how the restore went.
        let not_needed = |ended: &Ended| !self.waiting.lazy_pages && end_state(ended) == State::Listening;
        let ok = |ended: &Ended| ended.ok || not_needed(ended);
        self.timeline.ok = ended.as_ref().is_ok_and(ok);
        self.timeline.reason = match &ended {
            Ok(ended) => (!ok(ended)).then(|| ended.reason.clone()),
            Err(ClientError::NotServed(_)) => Some(ABANDONED.to_owned()),
            Err(error) => Some(format!("following the streamer: {error}")),
        };
        self.view.clear();
        match files::read(&self.waiting.work) {
            Ok(Some(record)) => {
                if let Some(clock) = clock {
                    self.timeline.add(&record, clock);
                    self.view.say(&text::text(&record, Duration::from_micros(clock.before_us())));
                }
            }
            // It had nothing to load, or was killed.
            Ok(None) => {}
            Err(error) => self.view.say(&format!("rewake: {error:#}\n")),
        }
        if self.request.options.record && self.timeline.ok {
            self.show_working_set();
        }
        self.ended = Some(ended);
    }

    /// Shows what was recorded. The streamer logs it when it could not be written.
    fn show_working_set(&self) {
        let images = ImageDir::open(self.request.images).map_err(anyhow::Error::from);
        let recorded = images.and_then(|images| file::of_image(&images)).ok().flatten().unwrap_or_default();
        let earlier = self.request.earlier;
        if recorded == *earlier {
            self.view.say(&format!("{WORKING_SET_NAME}: this restore added nothing\n"));
            return;
        }
        let parts =
            |bytes, buffers| format!("{} of CPU memory, {buffers} buffers of GPUs", units::bytes(bytes));
        let all = parts(recorded.bytes(), recorded.buffers.len());
        let added = parts(
            recorded.bytes().saturating_sub(earlier.bytes()),
            recorded.buffers.len().saturating_sub(earlier.buffers.len()),
        );
        self.view.say(&format!("{WORKING_SET_NAME}: {all}; this restore added {added}\n"));
    }

    async fn criu_ended(&mut self, exit: ExitStatus) {
        let now = self.started.elapsed().as_secs_f64() * 1e3;
        self.exit = Some(exit);
        self.timeline.criu_exit_code = exit.code();
        self.timeline.criu_ended_ms = Some(now);
        if exit.success() && self.request.given.detached {
            self.timeline.alive_ms = Some(now);
            self.view.say(&format!("     0.0 ms  restore started\n{now:8.1} ms  process is alive\n"));
        }
        // A streamer that nothing depends on ends now.
        streamer::ask_to_end(&self.waiting.work).await;
    }

    /// Ends this command at a signal, and the tree if it does not run yet. Gives the exit code.
    async fn interrupted(&mut self, signal: Signal) -> anyhow::Result<u8> {
        let runs = self.tree_runs().await;
        if !runs && self.exit.is_none() {
            self.criu.kill_tree();
            // One that does not end takes no notice of this command.
            let _ = timeout(END_LIMIT, self.criu.ended()).await;
            streamer::ask_to_end(&self.waiting.work).await;
        }
        if runs && !matches!(self.ended, Some(Ok(_))) {
            self.waiting.leave_work().await;
        }
        let fate = if runs { "continue; so does their streamer" } else { "were killed" };
        print::say(format!("{signal}: the restored processes {fate}"));
        Ok(128 + u8::try_from(signal as i32).unwrap_or(0))
    }

    /// Writes the timeline; gives the exit code, or the error that the command ends with.
    async fn conclude(&mut self) -> anyhow::Result<u8> {
        let exit = self.exit.unwrap_or_default();
        if !matches!(self.ended, Some(Ok(_))) {
            // Without a streamer, `rewake recover` is to serve the session.
            self.waiting.leave_work().await;
        }
        if self.ended.is_none() {
            let latest = self.latest.borrow();
            let clock = Clock::new(self.started, &latest);
            self.timeline.working_set_ms =
                Some(latest.working_set_us).filter(|at| *at > 0).map(|at| clock.at(at));
        }
        let (detached, succeeded) = (self.request.given.detached, exit.success());
        if succeeded && !detached && matches!(self.ended, Some(Err(_))) {
            // The tree has ended, and needs no memory any more.
            self.timeline.reason = None;
        }
        if self.timeline.ok && self.timeline.all_resident_ms.is_none() && self.timeline.ended_early.is_empty()
        {
            // Nothing was missing.
            self.timeline.all_resident_ms = self.timeline.alive_ms;
        }
        let ran = succeeded || !detached && self.criu.has_resumed();
        self.timeline.ok = ran && (self.timeline.ok || self.ended.is_none());
        if self.request.options.json {
            let text = serde_json::to_string_pretty(&self.timeline)?;
            print::done(text);
        }
        if !succeeded {
            self.criu.show_errors();
        }
        let reason = self.timeline.reason.as_deref();
        if !ran {
            let reason = reason.map(|reason| format!("; the streamer: {reason}")).unwrap_or_default();
            let RestoreRequest { gpus, plugins, given, .. } = *self.request;
            let hint = if gpus && plugins.is_none() && !given.plugins { criu::NO_PLUGIN } else { "" };
            bail!("criu restore failed ({exit}); nothing was restored{reason}{hint}");
        }
        match reason {
            Some(reason) if matches!(self.ended, Some(Err(ClientError::NotServed(_)))) => bail!("{reason}"),
            Some(reason) if self.ended.iter().flatten().any(|ended| end_state(ended) == State::Ended) => {
                print::say(reason);
                return Ok(if detached { PROGRAM_ENDED } else { criu::code(exit) });
            }
            Some(reason) => bail!("the restored processes were killed: {reason}"),
            None => {}
        }
        for EndedEarly { pid, name, missing_bytes } in &self.timeline.ended_early {
            let missing = units::bytes(*missing_bytes);
            self.view.say(&format!("{pid} {name} ended while {missing} of its memory were missing\n"));
        }
        if let Some(resident) = self.timeline.all_resident_ms {
            let last = self.ended.as_ref().and_then(|ended| ended.as_ref().ok()?.last.as_ref());
            let any_gate = last.is_some_and(|last| last.processes.iter().any(|of| !of.without_gate));
            let gpus = if any_gate { "GPUs run; " } else { "" };
            self.view.say(&format!("{resident:8.1} ms  {gpus}all memory resident\n"));
        }
        Ok(criu::code(exit))
    }
}

/// How far the restore was when its streamer ended.
fn end_state(ended: &Ended) -> State {
    ended.last.as_ref().map_or(State::Unknown, Streaming::state)
}

async fn until(deadline: Option<Deadline>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
