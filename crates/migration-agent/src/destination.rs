// SPDX-License-Identifier: MIT OR Apache-2.0
//! The agent of the host that the program moves to.

use std::env;
use std::fs::{self, File};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::Command;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use nix::fcntl::Flock;
use rewake_migration::destination::{
    DestinationInput, DestinationOutcome, DestinationOutput, MigrationDestination,
};
use rewake_migration::message::FromDestination;
use rewake_migration::record::DestinationRecord;
use rewake_peer_stream::Admission;

use crate::arriving_files;
use crate::criu::{CriuChoice, RunningCriu};
use crate::destination_link::{ConnectionState, DestinationEvent, accept};
use crate::destination_place::DestinationPlace;
use crate::dry_run;
use crate::earlier::EarlierMigration;
use crate::folder::{self, DestinationEntry, MigrationFolder, WrittenRecord};
use crate::frame::{Frame, FrameWriter, MAX_EVENTS};
use crate::host::HostOffer;
use crate::image_files;
use crate::intake::Intake;
use crate::lost_limit::{GIVE_UP_LIMIT, LOST_LIMIT, lost_limit};
use crate::page_client::{ClientProcess, PageClient};
use crate::relay::PageRelay;
use crate::script::{self, AgentCall, CriuMoment, WaitingScript};
use crate::source::LOOK_INTERVAL;
use crate::strangers::Strangers;
use crate::waiting_dump::CRIU_LIMIT;

/// Time that the lazy-pages client has to listen, or to end.
const CLIENT_LIMIT: Duration = Duration::from_secs(10);
/// Pause between two looks whether the lazy-pages client listens, which takes milliseconds.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// What a migration came to.
#[derive(Debug)]
pub struct DestinationReport {
    /// Where the program is.
    pub outcome: DestinationOutcome,
}

/// Takes one program from an admitted source. With `gpu_on_demand` its GPU memory arrives while it runs.
///
/// `aborts` receives the user's wish to end the migration.
///
/// # Errors
/// Nothing was received: the host has no cgroups, or a folder cannot be made.
pub fn receive(
    listener: TcpListener,
    admission: Admission,
    criu: &CriuChoice,
    gpu_on_demand: bool,
    aborts: Receiver<()>,
) -> anyhow::Result<DestinationReport> {
    folder::remove_leftovers();
    let left = DestinationPlace::left()?;
    let earlier = EarlierMigration::end_all();
    let is_left = left.is_some();
    let place = left.map_or_else(DestinationPlace::new, Ok)?;
    let (sender, events) = sync_channel(MAX_EVENTS);
    let state = Arc::new(ConnectionState {
        admission,
        id: Mutex::new(place.entry.id.map(|id| (id, place.entry.peer))),
        earlier: Mutex::new(earlier),
        strangers: Strangers::default(),
        newest: Mutex::default(),
        images: place.folder.images(),
        criu: criu.clone(),
        store: Arc::new(place.store),
        intake: Mutex::default(),
        relay: Mutex::default(),
    });
    let scripts = place.scripts;
    let (to_scripts, to_aborts, to_links) = (sender.clone(), sender.clone(), sender.clone());
    thread::spawn(move || {
        script::receive(&scripts, |call, script| match call {
            AgentCall::Moment(moment) => to_scripts.send(DestinationEvent::Script(moment, script)).is_ok(),
            // For a source.
            AgentCall::Abort => true,
        });
    });
    thread::spawn(move || while aborts.recv().is_ok() && to_aborts.send(DestinationEvent::Abort).is_ok() {});
    let machine = match is_left {
        true => MigrationDestination::restarted(place.entry.record, true).0,
        false => MigrationDestination::new().with_gpu_on_demand(gpu_on_demand),
    };
    let client = place.entry.client.clone().map(PageClient::Left);
    let agent = DestinationAgent {
        machine,
        criu,
        entry: place.entry,
        _cgroup_lock: place.cgroup_lock,
        state: Arc::clone(&state),
        sender,
        events,
        link: None,
        link_number: 0,
        lost_since: is_left.then(Instant::now),
        lost_limit: LOST_LIMIT,
        restore: None,
        is_reserving: false,
        gpu_on_demand,
        client,
        script: None,
        may_be_granted: is_left,
        is_released: is_left,
        outcome: None,
        ends_wait: false,
        work: place.work,
        folder: place.folder,
    };
    if is_left {
        let listener = agent.bind_pages()?;
        agent.serve_pages(listener);
        tracing::warn!("an earlier agent was killed: its program runs here, and this one continues");
    }
    thread::spawn(move || accept(&listener, &state, &to_links));
    Ok(agent.run())
}

struct DestinationAgent<'a> {
    machine: MigrationDestination,
    criu: &'a CriuChoice,
    entry: DestinationEntry,
    _cgroup_lock: Flock<File>,
    state: Arc<ConnectionState>,
    sender: SyncSender<DestinationEvent>,
    events: Receiver<DestinationEvent>,
    link: Option<Arc<FrameWriter>>,
    link_number: usize,
    lost_since: Option<Instant>,
    lost_limit: Duration,
    restore: Option<RunningCriu>,
    /// Space is being reserved for files that arrive later: GRANT waits for it.
    is_reserving: bool,
    /// GPU memory may arrive here while the program runs.
    gpu_on_demand: bool,
    /// The lazy-pages client, until all memory is resident.
    client: Option<PageClient>,
    script: Option<WaitingScript>,
    /// GRANT was asked for: the source may have given it.
    may_be_granted: bool,
    is_released: bool,
    outcome: Option<DestinationOutcome>,
    /// The user ends the wait for a source that is to be answered.
    ends_wait: bool,
    /// CRIU's work directory.
    work: PathBuf,
    /// Dropped last.
    folder: MigrationFolder,
}

impl DestinationAgent<'_> {
    fn run(mut self) -> DestinationReport {
        let outcome = loop {
            if let Some(outcome) = &self.outcome {
                break outcome.clone();
            }
            self.take_event();
            self.look();
        };
        if let Err(error) = fs::remove_dir_all(&self.work) {
            tracing::warn!(%error, "removing {}", self.work.display());
        }
        let is_known = matches!(outcome, DestinationOutcome::Restored { .. }) || self.answer_source();
        if let Some(link) = &self.link {
            link.close();
        }
        // A later agent answers the source by what is recorded.
        if is_known {
            self.folder.remove();
        }
        DestinationReport { outcome }
    }

    /// Ends what the program had here, and answers a source that may have given GRANT until it confirms that.
    /// False: it may not have the answer.
    fn answer_source(&mut self) -> bool {
        self.entry.cgroup.release();
        self.folder.remove_images();
        if !self.may_be_granted {
            return true;
        }
        if let Err(reason) = self.write(DestinationEntry { has_ended: true, ..self.entry.clone() }) {
            tracing::warn!("{reason}");
        }
        if self.link.is_none() && !self.machine.is_confirmed() {
            tracing::warn!("the source has no connection: this agent waits to answer it");
        }
        while !self.machine.is_confirmed()
            && !self.ends_wait
            && self.lost_since.is_none_or(|since| since.elapsed() < GIVE_UP_LIMIT)
        {
            self.take_event();
        }
        self.machine.is_confirmed()
    }

    fn take_event(&mut self) {
        match self.events.recv_timeout(LOOK_INTERVAL) {
            Ok(event) => self.handle(event),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
    }

    fn handle(&mut self, event: DestinationEvent) {
        match event {
            DestinationEvent::Connected(number, link) => {
                // Pages of a program that was killed are not requested again.
                if self.outcome.is_none()
                    && let Some(relay) = self.state.relay()
                {
                    relay.connect(Some(Arc::clone(&link)));
                }
                (self.link, self.link_number, self.lost_since) = (Some(link), number, None);
                self.note_source();
                self.step(DestinationInput::Connected);
            }
            DestinationEvent::Disconnected(number) if number == self.link_number => {
                self.link = None;
                if let Some(relay) = self.state.relay() {
                    relay.connect(None);
                }
                self.lost_since = Some(Instant::now());
                self.step(DestinationInput::Disconnected);
            }
            DestinationEvent::Received(number, message) if number == self.link_number => {
                self.step(DestinationInput::Received(message));
            }
            // Of a connection that another one has replaced.
            DestinationEvent::Disconnected(_) | DestinationEvent::Received(..) => {}
            DestinationEvent::Script(CriuMoment::PostRestore, script) => {
                self.script = Some(script);
                self.ask_for_grant();
            }
            DestinationEvent::Script(CriuMoment::PostResume, _) => self.step(DestinationInput::Running),
            DestinationEvent::Script(CriuMoment::PreDump | CriuMoment::PostDump, _) => {}
            DestinationEvent::Compared(offer, refusals) => self.compared(&offer, &refusals),
            DestinationEvent::MemoryLost(reason) => self.step(DestinationInput::MemoryLost(reason)),
            DestinationEvent::AllArrived => self.step(DestinationInput::AllArrived),
            DestinationEvent::Reserved => {
                self.is_reserving = false;
                self.ask_for_grant();
            }
            DestinationEvent::Abort if self.outcome.is_some() => self.ends_wait = true,
            DestinationEvent::Abort => self.step(DestinationInput::Abort),
        }
    }

    /// Whether a restore of an agent that was killed is in its last step. It is in the group of its tasks,
    /// and ends by itself when the program runs, or when its memory does not arrive: only then do the group's
    /// processes show which.
    fn has_left_restore(&self) -> bool {
        self.restore.is_none() && self.entry.restore.as_ref().is_some_and(ClientProcess::lives)
    }

    /// Reports that the restore waits at its last step, and that files have their space.
    fn ask_for_grant(&mut self) {
        if self.script.is_some() && !self.is_reserving {
            self.step(DestinationInput::RestoreWaits);
        }
    }

    /// Looks at the children and at the limits.
    fn look(&mut self) {
        if let Some(restore) = &mut self.restore
            && let Ok(Some(status)) = restore.ended()
        {
            let failure = restore.failure(status);
            self.restore = None;
            match status.success() {
                // CRIU's script may not have reported it.
                true if self.is_released => self.step(DestinationInput::Running),
                true => self.step(DestinationInput::RestoreFailed("restore ended before RELEASE".to_owned())),
                false => self.step(DestinationInput::RestoreFailed(failure)),
            }
        }
        if !self.has_left_restore()
            && let Some(input) =
                self.client.as_mut().and_then(|client| client.end(&self.entry.cgroup, &self.work))
        {
            self.client = None;
            self.step(input);
        }
        let limit = if self.may_be_granted { GIVE_UP_LIMIT } else { self.lost_limit };
        if self.lost_since.is_some_and(|since| since.elapsed() > limit) {
            self.step(DestinationInput::TimedOut(format!("no connection for {} s", limit.as_secs())));
        }
    }

    fn step(&mut self, input: DestinationInput) {
        let outputs = self.machine.step(input);
        self.act(outputs);
    }

    fn act(&mut self, outputs: Vec<DestinationOutput>) {
        for output in outputs {
            match output {
                DestinationOutput::Send(message) => {
                    self.may_be_granted |= message == FromDestination::Ready;
                    self.send(message);
                }
                DestinationOutput::Compare(offer) => self.compare(offer),
                DestinationOutput::Restore => {
                    if let Err(error) = self.start_restore() {
                        self.step(DestinationInput::RestoreFailed(format!("{error:#}")));
                    }
                }
                DestinationOutput::FetchAll => self.fetch_all(),
                DestinationOutput::WriteRelease => self.write_release(),
                DestinationOutput::Release => {
                    self.is_released = true;
                    // A script that has died left a CRIU that fails.
                    self.script.take().map(|script| script.decide(true));
                }
                DestinationOutput::Kill => self.kill(),
                DestinationOutput::AbortRefused => tracing::error!("the program runs here only: not ended"),
                DestinationOutput::End(outcome) => self.outcome = Some(outcome),
            }
        }
    }

    /// A message that is lost with its connection is due again on the next one.
    fn send(&mut self, message: FromDestination) {
        if let Some(link) = &self.link
            && let Err(error) = link.send(&Frame::Destination(message))
        {
            tracing::warn!("{error:#}");
        }
    }

    /// Compares in another thread: a file system may not answer, and an abort can end the migration
    /// meanwhile.
    fn compare(&mut self, offer: String) {
        self.lost_limit = lost_limit(&offer);
        let (criu, sender) = (self.criu.clone(), self.sender.clone());
        thread::spawn(move || {
            let refusals = HostOffer::refused_there(&offer, &criu);
            // The agent may have ended.
            let _ = sender.send(DestinationEvent::Compared(offer, refusals));
        });
    }

    fn compared(&mut self, offer: &str, refusals: &[String]) {
        if let Ok(offer) = HostOffer::read(offer)
            && refusals.is_empty()
        {
            *self.state.intake() = Intake::open(offer.size, offer.uses_gpus(), self.gpu_on_demand);
        }
        self.step(DestinationInput::Compared(dry_run::as_result(refusals)));
    }

    fn start_restore(&mut self) -> anyhow::Result<()> {
        self.reserve();
        self.start_client()?;
        let criu = self.criu.command("restore", &self.folder.images(), &self.work);
        let mut command = Command::new("/bin/sh");
        // CRIU's tasks are in the group from the beginning.
        command.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(self.entry.cgroup.entrance());
        command.arg(criu.get_program()).args(criu.get_args());
        command.args(["-d", "--lazy-pages", "--manage-cgroups=ignore"]);
        script::add_to(&mut command, self.folder.path())?;
        command.args(&self.criu.options);
        let restore = RunningCriu::start(&mut command, "restore", &self.work)?;
        let process = Some(ClientProcess::of(restore.pid())?);
        self.restore = Some(restore);
        self.write(DestinationEntry { restore: process, ..self.entry.clone() }).map_err(anyhow::Error::msg)
    }

    /// Reserves the space of files that arrive later, in another thread: that can take longer than a
    /// connection waits.
    fn reserve(&mut self) {
        self.is_reserving = true;
        let (images, sender) = (self.folder.images(), self.sender.clone());
        thread::spawn(move || {
            // The agent may have ended.
            let _ = sender.send(match arriving_files::reserve(&images) {
                Ok(()) => DestinationEvent::Reserved,
                Err(error) => DestinationEvent::MemoryLost(format!("{error:#}")),
            });
        });
    }

    /// Starts the process that serves the restore's page faults, with this agent as its page server. If it or
    /// this agent is killed, no page reads as zeros: the userfaultfds are parked in the tree.
    fn start_client(&mut self) -> anyhow::Result<()> {
        let listener = self.bind_pages()?;
        let program = env::current_exe().context("finding this program")?;
        let this = CriuChoice { program, options: Vec::new(), plugins: None };
        let mut command = this.command("lazy-pages", &self.folder.images(), &self.work);
        command.args(["--page-server", "--address"]).arg(self.pages());
        let mut client = RunningCriu::start(&mut command, "lazy-pages", &self.work)?;
        let socket = self.work.join("lazy-pages.socket");
        let start = Instant::now();
        while !socket.exists() {
            if let Some(status) = client.ended()? {
                bail!("{}", client.failure(status));
            }
            ensure!(start.elapsed() < CLIENT_LIMIT, "lazy-pages does not listen");
            sleep(POLL_INTERVAL);
        }
        let process = Some(ClientProcess::of(client.pid())?);
        self.client = Some(PageClient::Started(client));
        let entry = DestinationEntry { client: process, ..self.entry.clone() };
        self.write(entry).map_err(anyhow::Error::msg)?;
        self.serve_pages(listener);
        Ok(())
    }

    fn pages(&self) -> PathBuf {
        self.work.join("pages.socket")
    }

    /// Listens for the process that serves page faults. An agent that was killed has left its socket.
    fn bind_pages(&self) -> anyhow::Result<UnixListener> {
        let pages = self.pages();
        let _ = fs::remove_file(&pages);
        UnixListener::bind(&pages).with_context(|| format!("binding {}", pages.display()))
    }

    fn serve_pages(&self, listener: UnixListener) {
        let relay = Arc::new(PageRelay::new(Arc::clone(&self.state.store)));
        relay.connect(self.link.clone());
        *self.state.relay.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&relay));
        let sender = self.sender.clone();
        thread::spawn(move || {
            if let Err(error) = relay.run(&listener) {
                // The agent may have ended.
                let _ = sender.send(DestinationEvent::MemoryLost(format!("{error:#}")));
            }
        });
    }

    /// Brings all lazy pages to this host, in another thread.
    fn fetch_all(&self) {
        // Without a relay the restore has failed.
        let Some(relay) = self.state.relay() else { return };
        let (images, sender) = (self.folder.images(), self.sender.clone());
        thread::spawn(move || {
            let fetched = image_files::lazy_runs(&images).and_then(|runs| relay.fetch_all(&runs));
            // The agent may have ended.
            let _ = sender.send(match fetched {
                Ok(()) => DestinationEvent::AllArrived,
                Err(error) => DestinationEvent::MemoryLost(format!("{error:#}")),
            });
        });
    }

    /// Writes down which migration this is: a later agent then answers its source.
    fn note_source(&mut self) {
        let known = *self.state.id.lock().unwrap_or_else(PoisonError::into_inner);
        let (id, peer) = known.map_or((None, None), |(id, peer)| (Some(id), peer));
        if self.entry.id != id
            && let Err(reason) = self.write(DestinationEntry { id, peer, ..self.entry.clone() })
        {
            self.step(DestinationInput::WriteFailed(reason));
        }
    }

    fn write_release(&mut self) {
        let input = match self
            .write(DestinationEntry { record: DestinationRecord::Released, ..self.entry.clone() })
        {
            Ok(()) => DestinationInput::ReleaseWritten,
            Err(reason) => DestinationInput::WriteFailed(reason),
        };
        self.step(input);
    }

    fn write(&mut self, entry: DestinationEntry) -> Result<(), String> {
        let written = self.folder.write(&WrittenRecord::Destination(entry.clone()));
        self.entry = written.map(|()| entry).map_err(|error| format!("{error:#}"))?;
        Ok(())
    }

    /// Kills the restored tasks first: without the lazy-pages client their missing memory would be zeros.
    fn kill(&mut self) {
        self.entry.cgroup.kill();
        self.script = None;
        if let Some(mut restore) = self.restore.take() {
            restore.end_within(CRIU_LIMIT);
        }
        if let Some(mut client) = self.client.take() {
            client.stop_within(CRIU_LIMIT);
        }
    }
}
