// SPDX-License-Identifier: MIT OR Apache-2.0
//! The agent of the host that has the program.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use rewake_migration::message::{FromDestination, FromSource};
use rewake_migration::record::SourceRecord;
use rewake_migration::source::{MigrationSource, SourceInput, SourceOutcome, SourceOutput};

use crate::file_look::FILES_LIMIT;
use crate::folder::{self, MigrationFolder, SourceEntry, WrittenRecord};
use crate::frame::{Frame, FrameWriter, MAX_EVENTS};
use crate::frozen_wait::FrozenWait;
use crate::image_files::{self, SendFailure};
use crate::peer::DestinationPeer;
use crate::script::{AgentCall, CriuMoment, WaitingScript};
use crate::source_begin::{begin, earlier, forward_aborts, listen_to_scripts};
use crate::source_link::{SharedMemory, SourceEvent, keep_connected};
pub use crate::source_options::SourceOptions;
use crate::start_time::start_of;
use crate::tree_memory::TreeMemory;
use crate::waiting_dump::WaitingDump;

/// Time from the offer until the destination has answered it. It is longer than that of its own comparison.
const COMPARE_LIMIT: Duration = FILES_LIMIT.saturating_add(Duration::from_secs(40));
/// Time without a connection after GRANT, after which the program is given up.
pub(crate) const GIVE_UP_LIMIT: Duration = Duration::from_secs(300);
/// Time that a destination has to end the connection on which it gets the end of the migration.
const CONFIRMATION_LIMIT: Duration = Duration::from_secs(10);
/// The longest time without a look at children and limits, on either side. Events end the wait earlier.
pub(crate) const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// What a migration came to.
#[derive(Debug)]
pub struct SourceReport {
    /// Where the program is.
    pub outcome: SourceOutcome,
    /// From CRIU's start to the message that the program runs at the destination.
    pub downtime: Option<Duration>,
    /// Bytes that were sent.
    pub sent: u64,
    /// Rounds of pre-copy.
    pub rounds: u32,
    /// The tree should run here, and could not be thawed: why.
    pub stays_frozen: Option<String>,
}

/// Migrates a tree, or continues the migration of it that an agent has left.
///
/// `aborts` receives the user's wish to end the migration.
///
/// # Errors
/// Nothing was touched: the options are wrong, the tree has no cgroup, or another process migrates it.
pub fn migrate(options: &SourceOptions, aborts: Receiver<()>) -> anyhow::Result<SourceReport> {
    let mut peer = DestinationPeer::of(options)?;
    let start = start_of(options.tree)?;
    folder::remove_leftovers();
    let folder = MigrationFolder::open(&folder::source_name(options.tree, &start))?;
    let (sender, events) = sync_channel(MAX_EVENTS);
    listen_to_scripts(&folder, sender.clone())?;
    forward_aborts(aborts, sender.clone());
    let mut dialed = None;
    let mut owes_end = false;
    let (machine, outputs, entry) = match earlier(&folder)? {
        Some(entry) => {
            ensure!(
                entry.record == SourceRecord::Started || entry.to == options.to,
                "-t {}: it was given to {}, not to {}: continue with --to {}",
                options.tree,
                entry.to,
                options.to,
                entry.to
            );
            let (machine, outputs) = MigrationSource::restarted(entry.record);
            owes_end = !machine.has_granted();
            (machine, outputs, entry)
        }
        None => {
            // Nothing is touched before the destination has proved who it is, and admits this host.
            let begun =
                peer.dial().and_then(|stream| Ok((stream, begin(options, &folder, &sender, &events)?)));
            match begun {
                Ok((stream, (entry, offer))) => {
                    dialed = Some(stream);
                    (MigrationSource::new(offer), Vec::new(), entry)
                }
                Err(error) => {
                    folder.remove();
                    return Err(error).with_context(|| format!("-t {} was not touched", options.tree));
                }
            }
        }
    };
    let shared = SharedMemory::default();
    let mut agent = SourceAgent {
        machine,
        options,
        entry,
        shared: shared.clone(),
        sender: sender.clone(),
        events,
        link: None,
        dump: None,
        begun: Instant::now(),
        frozen_wait: None,
        lost_since: Some(Instant::now()),
        was_connected: false,
        owes_end,
        gpu_on_demand: false,
        downtime: None,
        sent: 0,
        outcome: None,
        aborts: Vec::new(),
        stays_frozen: None,
        folder,
    };
    if agent.machine.has_granted() {
        agent.open_memory()?;
    }
    agent.act(outputs);
    let id = agent.entry.id;
    thread::spawn(move || keep_connected(peer, dialed, &id, &sender, &shared));
    Ok(agent.run())
}

struct SourceAgent<'a> {
    machine: MigrationSource,
    options: &'a SourceOptions,
    entry: SourceEntry,
    shared: SharedMemory,
    sender: SyncSender<SourceEvent>,
    events: Receiver<SourceEvent>,
    link: Option<Arc<FrameWriter>>,
    dump: Option<WaitingDump>,
    begun: Instant,
    /// From the freeze to GRANT.
    frozen_wait: Option<FrozenWait>,
    lost_since: Option<Instant>,
    was_connected: bool,
    /// An agent was killed before GRANT, and its destination waits for a source: it is to get the end of the
    /// migration.
    owes_end: bool,
    /// The destination's GPU memory may arrive while the program runs there.
    gpu_on_demand: bool,
    downtime: Option<Duration>,
    /// Bytes of earlier connections.
    sent: u64,
    outcome: Option<SourceOutcome>,
    /// Callers that wait for the end of an abort.
    aborts: Vec<WaitingScript>,
    stays_frozen: Option<String>,
    /// Dropped last: its lock keeps other agents away.
    folder: MigrationFolder,
}

impl SourceAgent<'_> {
    fn run(mut self) -> SourceReport {
        let outcome = loop {
            if let Some(outcome) = self.outcome.take() {
                break outcome;
            }
            match self.events.recv_timeout(LOOK_INTERVAL) {
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => self.step(SourceInput::Disconnected),
            }
            self.look();
        };
        if self.owes_end || matches!(outcome, SourceOutcome::Lost(_)) {
            self.let_end_arrive();
        }
        self.use_link(None).inspect(|link| link.close());
        while let Ok(event) = self.events.try_recv() {
            if let SourceEvent::Called(AgentCall::Abort, caller) = event {
                self.aborts.push(caller);
            }
        }
        std::mem::take(&mut self.aborts).into_iter().for_each(|caller| self.answer_abort(caller));
        let (downtime, sent, stays_frozen) = (self.downtime, self.sent, self.stays_frozen);
        // The record of a frozen tree is for the next agent.
        if stays_frozen.is_none() && !matches!(outcome, SourceOutcome::Frozen(_)) {
            self.folder.remove();
        }
        SourceReport { outcome, downtime, sent, rounds: self.shared.pre_copy.rounds(), stays_frozen }
    }

    /// Waits until the destination ends the connection, which is to be made before. If this side ended it
    /// while page requests arrive, what it sent last could be lost.
    fn let_end_arrive(&mut self) {
        let start = Instant::now();
        while (self.owes_end || self.link.is_some()) && start.elapsed() < CONFIRMATION_LIMIT {
            if let Ok(event) = self.events.recv_timeout(LOOK_INTERVAL) {
                self.handle(event);
            }
        }
    }

    fn handle(&mut self, event: SourceEvent) {
        match event {
            SourceEvent::Connected(link) => {
                self.owes_end = false;
                self.use_link(Some(link));
                self.step(SourceInput::Connected);
            }
            SourceEvent::Disconnected => {
                self.use_link(None);
                self.lost_since.get_or_insert_with(Instant::now);
                self.step(SourceInput::Disconnected);
            }
            SourceEvent::Unreachable(reason) => {
                self.owes_end = false;
                if !self.was_connected && !self.machine.has_granted() {
                    self.step(SourceInput::TimedOut(reason));
                }
            }
            SourceEvent::Received(message) => {
                if let FromDestination::Hello { gpu_on_demand, .. } = message {
                    // A connection alone may be that of a tunnel, whose other end reaches no destination.
                    (self.lost_since, self.was_connected) = (None, true);
                    self.gpu_on_demand = gpu_on_demand;
                }
                if message == FromDestination::Running {
                    let started = self.dump.as_ref().map(|dump| dump.started);
                    self.downtime = started.map(|started| started.elapsed());
                }
                self.step(SourceInput::Received(message));
            }
            // Before the migration.
            SourceEvent::Described(_) => {}
            SourceEvent::PreCopied(Ok(true)) => self.step(SourceInput::PreCopied),
            SourceEvent::PreCopied(Ok(false)) => {}
            SourceEvent::PreCopied(Err(reason)) => self.step(SourceInput::PreCopyFailed(reason)),
            SourceEvent::ImageLost(reason) => self.step(SourceInput::FreezeFailed(reason)),
            SourceEvent::Called(AgentCall::Moment(moment), script) => self.criu_is_at(moment, script),
            SourceEvent::Called(AgentCall::Abort, caller) => {
                self.step(SourceInput::Abort);
                self.answer_abort(caller);
            }
            SourceEvent::Abort => self.step(SourceInput::Abort),
        }
    }

    /// Answers whether the program runs here.
    fn answer_abort(&self, caller: WaitingScript) {
        // The caller may have ended.
        let _ = caller.decide(!self.machine.has_granted() && self.stays_frozen.is_none());
    }

    fn criu_is_at(&mut self, moment: CriuMoment, script: WaitingScript) {
        match moment {
            CriuMoment::PreDump => {
                if let Some(dump) = &mut self.dump {
                    dump.started = Instant::now();
                }
            }
            CriuMoment::PostDump => self.dumped(script),
            CriuMoment::PostRestore | CriuMoment::PostResume => {}
        }
    }

    /// Uses a new connection, or none. Returns the one before.
    fn use_link(&mut self, link: Option<Arc<FrameWriter>>) -> Option<Arc<FrameWriter>> {
        self.shared.pre_copy.connect(link.clone());
        let before = std::mem::replace(&mut self.link, link);
        self.sent += before.as_ref().map_or(0, |before| before.sent());
        before
    }

    /// Looks at CRIU and at the limits.
    fn look(&mut self) {
        if !self.machine.has_granted()
            && let Some(reason) = self.dump.as_mut().and_then(WaitingDump::failure)
        {
            self.step(SourceInput::FreezeFailed(reason));
        }
        if let Some(reason) = self.passed_limit() {
            self.step(SourceInput::TimedOut(reason));
        }
    }

    fn passed_limit(&mut self) -> Option<String> {
        let has_granted = self.machine.has_granted();
        let before_grant = self.options.lost_limit();
        let limit = if has_granted { GIVE_UP_LIMIT } else { before_grant };
        if self.lost_since.is_some_and(|since| since.elapsed() > limit) {
            return Some(format!("no connection to {} for {} s", self.entry.to, limit.as_secs()));
        }
        if has_granted {
            return None;
        }
        if self.machine.is_comparing() && self.begun.elapsed() > COMPARE_LIMIT.max(before_grant) {
            return Some(format!("{} has not answered the offer", self.entry.to));
        }
        let sent = self.sent();
        if let Some(reason) = self.frozen_wait.as_mut().and_then(|wait| wait.look(sent)) {
            return Some(reason);
        }
        let (dump, accepted) = (self.dump.as_ref()?, self.options.goal.max_downtime?);
        (dump.started.elapsed() > accepted).then(|| {
            let accepted = accepted.as_millis();
            format!(
                "the restore was not ready {accepted} ms after the freeze began, which --max-downtime accepts"
            )
        })
    }

    fn step(&mut self, input: SourceInput) {
        let outputs = self.machine.step(input);
        self.act(outputs);
    }

    fn act(&mut self, outputs: Vec<SourceOutput>) {
        for output in outputs {
            match output {
                SourceOutput::Send(message) => self.send(message),
                SourceOutput::PreCopy => self.start_pre_copy(),
                SourceOutput::Freeze => self.start_dump(),
                SourceOutput::SendMetadata => self.send_metadata(),
                SourceOutput::WriteGrant => self.write_grant(),
                SourceOutput::Thaw => self.thaw(),
                SourceOutput::Kill => self.kill(),
                SourceOutput::AbortRefused => {
                    tracing::error!("the program may run at {} already: not ended", self.entry.to);
                }
                SourceOutput::End(outcome) => self.outcome = Some(outcome),
            }
        }
    }

    /// A message that is lost with its connection is due again on the next one.
    fn send(&mut self, message: FromSource) {
        if let Some(link) = &self.link
            && let Err(error) = link.send(&Frame::Source(message))
        {
            tracing::warn!("{error:#}");
        }
    }

    fn start_pre_copy(&self) {
        let (pre_copy, sender) = (Arc::clone(&self.shared.pre_copy), self.sender.clone());
        let (cgroup, goal) = (self.entry.cgroup.clone(), self.options.goal);
        thread::spawn(move || {
            // The agent may have ended.
            let _ = sender.send(SourceEvent::PreCopied(pre_copy.run(&cgroup, goal)));
        });
    }

    fn start_dump(&mut self) {
        match WaitingDump::start(&self.options.criu, self.options.tree, &self.folder) {
            Ok(dump) => self.dump = Some(dump),
            Err(error) => self.step(SourceInput::FreezeFailed(format!("{error:#}"))),
        }
    }

    /// CRIU has written the image, and its script waits. The tree is stopped by CRIU, and is frozen now.
    fn dumped(&mut self, script: WaitingScript) {
        let Some(dump) = &mut self.dump else { return };
        dump.hold(script);
        let frozen = self.freeze();
        match frozen {
            Ok(()) => self.step(SourceInput::Frozen),
            Err(error) => self.step(SourceInput::FreezeFailed(format!("{error:#}"))),
        }
    }

    fn freeze(&mut self) -> anyhow::Result<()> {
        self.entry.cgroup.freeze()?;
        self.entry.cgroup.expect_tree(self.options.tree)?;
        self.frozen_wait = Some(FrozenWait::begin(self.travels_frozen()?, self.sent()));
        self.open_memory()
    }

    /// Whether GPU memory travels while the program runs at the destination.
    fn gpu_is_later(&self) -> bool {
        self.gpu_on_demand && !self.options.goal.all_first
    }

    /// Bytes that travel before GRANT.
    fn travels_frozen(&self) -> anyhow::Result<u64> {
        let files = image_files::size(&self.folder.images(), self.gpu_is_later())?;
        Ok(files + if self.options.goal.all_first { self.shared.pre_copy.total() } else { 0 })
    }

    /// Bytes that were sent, and bytes of pages that need not travel.
    fn sent(&self) -> u64 {
        self.sent + self.link.as_ref().map_or(0, |link| link.sent()) + self.shared.spared()
    }

    fn open_memory(&self) -> anyhow::Result<()> {
        let mut processes = self.entry.cgroup.processes()?;
        // 0 stands for a process of another pid namespace, which has joined since the freeze.
        processes.retain(|pid| *pid > 0);
        let opened = TreeMemory::open(&processes, &self.folder.images())?;
        *self.shared.frozen() = Some(opened);
        Ok(())
    }

    /// Sends in another thread: an abort can end it.
    fn send_metadata(&mut self) {
        let Some(link) = self.link.clone() else { return };
        let (images, sender) = (self.folder.images(), self.sender.clone());
        let metadata = Frame::Source(FromSource::Metadata { all_first: self.options.goal.all_first });
        let (gpu_is_later, shared) = (self.gpu_is_later(), self.shared.clone());
        thread::spawn(move || {
            let arriving = gpu_is_later.then(|| shared.arriving_files()).transpose();
            let sent = arriving
                .map_err(SendFailure::Unreadable)
                .and_then(|arriving| image_files::send(&images, &link, arriving.as_deref()))
                .and_then(|()| link.send(&metadata).map_err(SendFailure::Disconnected));
            match sent {
                Ok(()) => {}
                Err(SendFailure::Unreadable(error)) => {
                    // The agent may have ended.
                    let _ = sender.send(SourceEvent::ImageLost(format!("sending the image: {error:#}")));
                }
                Err(SendFailure::Disconnected(error)) => {
                    tracing::warn!("sending the image: {error:#}");
                    // The rest would be taken for the whole.
                    link.close();
                }
            }
        });
    }

    fn write_grant(&mut self) {
        let input = match self.try_grant() {
            Ok(()) => SourceInput::GrantWritten,
            Err(error) => SourceInput::WriteFailed(format!("{error:#}")),
        };
        self.step(input);
    }

    /// Compares what is frozen with what was dumped once more, and writes GRANT.
    fn try_grant(&mut self) -> anyhow::Result<()> {
        if let Some(reason) = self.dump.as_mut().and_then(WaitingDump::failure) {
            bail!(reason);
        }
        self.entry.cgroup.expect_tree(self.options.tree)?;
        let entry = SourceEntry { record: SourceRecord::Granted, ..self.entry.clone() };
        self.folder.write(&WrittenRecord::Source(entry.clone()))?;
        self.entry = entry;
        Ok(())
    }

    /// Thaws the tree, and ends CRIU's command. The tree is stopped until CRIU releases it. In this order it
    /// runs on if this process is killed meanwhile.
    fn thaw(&mut self) {
        self.shared.pre_copy.end();
        *self.shared.frozen() = None;
        let thawed = self.entry.cgroup.thaw();
        if let Some(dump) = self.dump.take() {
            let aborts = &mut self.aborts;
            dump.release(|| match self.events.recv_timeout(LOOK_INTERVAL) {
                Ok(SourceEvent::Called(AgentCall::Moment(CriuMoment::PostDump), script)) => Some(script),
                Ok(SourceEvent::Called(AgentCall::Abort, caller)) => {
                    aborts.push(caller);
                    None
                }
                _ => None,
            });
        }
        match thawed {
            Ok(()) => self.entry.cgroup.release(),
            Err(error) => self.stays_frozen = Some(format!("{error:#}")),
        }
    }

    fn kill(&mut self) {
        self.entry.cgroup.kill();
        if let Some(dump) = self.dump.take() {
            dump.end();
        }
        self.entry.cgroup.release();
        self.step(SourceInput::Killed);
    }
}
