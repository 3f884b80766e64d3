// SPDX-License-Identifier: MIT OR Apache-2.0
//! The agent of the host that has the program.

use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use rewake_criu_tls::TlsClient;
use rewake_migration::message::{FromDestination, FromSource};
use rewake_migration::record::SourceRecord;
use rewake_migration::source::{MigrationSource, SourceInput, SourceOutcome, SourceOutput};
use rewake_peer_stream::PeerStream;
use rewake_process::proc;

use crate::cgroup::TreeCgroup;
use crate::criu::{CriuChoice, CriuReports, RunningCriu, page_socket};
use crate::folder::{self, MigrationFolder, SourceEntry, WrittenRecord};
use crate::frame::{Frame, FrameWriter, MigrationId, greet, new_id};
use crate::frozen_memory::FrozenMemory;
use crate::host::HostOffer;
use crate::image_files;
use crate::peer::DestinationPeer;
use crate::script::{self, CriuMoment, WaitingScript};

/// Time without a connection before GRANT, after which the program runs on here.
const LOST_LIMIT: Duration = Duration::from_secs(5);
/// Time from the freeze until GRANT is asked for.
const FROZEN_LIMIT: Duration = Duration::from_secs(60);
/// Time without a connection after GRANT, after which the program is given up.
const GIVE_UP_LIMIT: Duration = Duration::from_secs(300);
/// Time that a CRIU has to end once its tree is killed.
const CRIU_LIMIT: Duration = Duration::from_secs(10);
const CONNECT_PAUSE: Duration = Duration::from_millis(200);
/// Time between two looks at children and limits.
const TICK: Duration = Duration::from_millis(20);

/// A migration that a user wants.
#[derive(Debug)]
pub struct SourceOptions {
    /// The root of the tree.
    pub tree: i32,
    /// The destination's agent, `ADDRESS:PORT`.
    pub to: String,
    /// Whether memory may travel unencrypted to another host.
    pub insecure: bool,
    /// This host's certificate, and which destination it accepts; none: in clear.
    pub tls: Option<TlsClient>,
    /// For `criu dump`.
    pub criu: CriuChoice,
}

/// What a migration came to.
#[derive(Debug)]
pub struct SourceReport {
    /// Where the program is.
    pub outcome: SourceOutcome,
    /// From CRIU's start to the message that the program runs at the destination.
    pub downtime: Option<Duration>,
    /// The tree should run here, and could not be thawed: why.
    pub stays_frozen: Option<String>,
}

/// What an agent is waiting for.
enum SourceEvent {
    Connected(Arc<FrameWriter>),
    Disconnected,
    Unreachable(String),
    Received(FromDestination),
    Script(CriuMoment, WaitingScript),
    Abort,
}

type SharedMemory = Arc<Mutex<Option<FrozenMemory>>>;

/// Migrates a tree, or continues the migration of it that an agent has left.
///
/// `aborts` receives the user's wish to end the migration.
///
/// # Errors
/// Nothing was touched: the options are wrong, the tree has no cgroup, or another process migrates it.
pub fn migrate(options: &SourceOptions, aborts: Receiver<()>) -> anyhow::Result<SourceReport> {
    let mut peer = DestinationPeer::of(options)?;
    let start = proc::stat(options.tree).ok().and_then(|fields| fields.get(19).cloned());
    let start = start.with_context(|| format!("-t {}: no such process", options.tree))?;
    folder::remove_leftovers();
    let folder = MigrationFolder::open(&folder::source_name(options.tree, &start))?;
    let earlier = match folder.read()? {
        Some(WrittenRecord::Source(entry)) => Some(entry),
        Some(WrittenRecord::Destination(_)) => {
            bail!("{}: the record of a destination", folder.path().display())
        }
        None => None,
    };
    let mut dialed = None;
    let (machine, outputs, entry) = match earlier {
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
            (machine, outputs, entry)
        }
        None => {
            // Nothing is touched before the destination has proved who it is, and admits this host.
            match peer.dial() {
                Ok(stream) => dialed = Some(stream),
                Err(error) => {
                    folder.remove();
                    return Err(error).with_context(|| format!("-t {} was not touched", options.tree));
                }
            }
            let cgroup = TreeCgroup::of_tree(options.tree)?;
            let offer = serde_json::to_string(&HostOffer::of(&cgroup.processes()?)?)?;
            let entry =
                SourceEntry { record: SourceRecord::Started, id: new_id()?, to: options.to.clone(), cgroup };
            folder.write(&WrittenRecord::Source(entry.clone()))?;
            (MigrationSource::new(offer), Vec::new(), entry)
        }
    };
    let (sender, events) = channel();
    let memory = SharedMemory::default();
    listen_to_scripts(&folder, sender.clone())?;
    forward_aborts(aborts, sender.clone());
    let mut agent = SourceAgent {
        machine,
        options,
        entry,
        memory: Arc::clone(&memory),
        events,
        link: None,
        dump: None,
        frozen_since: None,
        lost_since: Some(Instant::now()),
        was_connected: false,
        downtime: None,
        outcome: None,
        stays_frozen: None,
        folder,
    };
    if agent.machine.has_granted() {
        agent.open_memory()?;
    }
    agent.act(outputs);
    let id = agent.entry.id;
    thread::spawn(move || keep_connected(peer, dialed, &id, &sender, &memory));
    Ok(agent.run())
}

fn listen_to_scripts(folder: &MigrationFolder, sender: Sender<SourceEvent>) -> anyhow::Result<()> {
    let listener = folder.listen()?;
    thread::spawn(move || {
        script::receive(&listener, |moment, script| sender.send(SourceEvent::Script(moment, script)).is_ok());
    });
    Ok(())
}

fn forward_aborts(aborts: Receiver<()>, sender: Sender<SourceEvent>) {
    thread::spawn(move || while aborts.recv().is_ok() && sender.send(SourceEvent::Abort).is_ok() {});
}

/// Connects if it is not connected, answers page requests, and connects again, until the agent has ended.
fn keep_connected(
    mut peer: DestinationPeer,
    mut dialed: Option<PeerStream>,
    id: &MigrationId,
    sender: &Sender<SourceEvent>,
    memory: &SharedMemory,
) {
    loop {
        let connected = dialed.take().map_or_else(|| peer.dial(), Ok).and_then(|stream| connect(stream, id));
        let event = match connected {
            Ok((stream, writer)) => {
                if sender.send(SourceEvent::Connected(Arc::clone(&writer))).is_err() {
                    return;
                }
                if let Err(error) = serve(stream, &writer, sender, memory) {
                    tracing::warn!("the destination: {error:#}");
                }
                SourceEvent::Disconnected
            }
            Err(error) => SourceEvent::Unreachable(format!("{error:#}")),
        };
        if sender.send(event).is_err() {
            return;
        }
        sleep(CONNECT_PAUSE);
    }
}

fn connect(mut stream: PeerStream, id: &MigrationId) -> anyhow::Result<(PeerStream, Arc<FrameWriter>)> {
    greet(&mut stream, id).context("sending the greeting")?;
    let writer = FrameWriter::new(stream.clone());
    Ok((stream, Arc::new(writer)))
}

/// Takes frames of one connection to its end.
fn serve(
    mut stream: PeerStream,
    writer: &FrameWriter,
    sender: &Sender<SourceEvent>,
    memory: &SharedMemory,
) -> anyhow::Result<()> {
    while let Some(frame) = Frame::read(&mut stream)? {
        match frame {
            Frame::Destination(message) => {
                if sender.send(SourceEvent::Received(message)).is_err() {
                    return Ok(());
                }
            }
            Frame::PageRequest { pid, run } => {
                // Not sent under the lock: an abort takes the memory away.
                let answer = {
                    let memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
                    let memory = memory.as_ref();
                    memory
                        .context("the destination requests pages of a tree that is not frozen")?
                        .answer(pid, run)
                };
                writer.send(&answer)?;
            }
            _ => bail!("the destination sent a frame of a source"),
        }
    }
    Ok(())
}

/// A dump, up to the end of the migration.
struct HeldDump {
    criu: RunningCriu,
    started: Instant,
    script: Option<WaitingScript>,
    /// CRIU's client of lazy pages. CRIU ends when it is closed; it has no other client and no port.
    _pages: UnixStream,
}

struct SourceAgent<'a> {
    machine: MigrationSource,
    options: &'a SourceOptions,
    entry: SourceEntry,
    memory: SharedMemory,
    events: Receiver<SourceEvent>,
    link: Option<Arc<FrameWriter>>,
    dump: Option<HeldDump>,
    frozen_since: Option<Instant>,
    lost_since: Option<Instant>,
    was_connected: bool,
    downtime: Option<Duration>,
    outcome: Option<SourceOutcome>,
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
            match self.events.recv_timeout(TICK) {
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => self.step(SourceInput::Disconnected),
            }
            self.look();
        };
        if let Some(link) = &self.link {
            link.close();
        }
        let (downtime, stays_frozen) = (self.downtime, self.stays_frozen);
        // The record of a frozen tree is for the next agent.
        if stays_frozen.is_none() && !matches!(outcome, SourceOutcome::Frozen(_)) {
            self.folder.remove();
        }
        SourceReport { outcome, downtime, stays_frozen }
    }

    fn handle(&mut self, event: SourceEvent) {
        match event {
            SourceEvent::Connected(link) => {
                self.link = Some(link);
                self.step(SourceInput::Connected);
            }
            SourceEvent::Disconnected => {
                self.link = None;
                self.lost_since.get_or_insert_with(Instant::now);
                self.step(SourceInput::Disconnected);
            }
            SourceEvent::Unreachable(reason) if !self.was_connected && !self.machine.has_granted() => {
                self.step(SourceInput::TimedOut(reason));
            }
            SourceEvent::Unreachable(_) => {}
            SourceEvent::Received(message) => {
                if let FromDestination::Hello { .. } = message {
                    // A connection alone may be that of a tunnel, whose other end reaches no destination.
                    (self.lost_since, self.was_connected) = (None, true);
                }
                if message == FromDestination::Running {
                    let started = self.dump.as_ref().map(|dump| dump.started);
                    self.downtime = started.map(|started| started.elapsed());
                }
                self.step(SourceInput::Received(message));
            }
            SourceEvent::Script(CriuMoment::PreDump, _) => {
                if let Some(dump) = &mut self.dump {
                    dump.started = Instant::now();
                }
            }
            SourceEvent::Script(CriuMoment::PostDump, script) => self.dumped(script),
            SourceEvent::Script(CriuMoment::PostRestore | CriuMoment::PostResume, _) => {}
            SourceEvent::Abort => self.step(SourceInput::Abort),
        }
    }

    /// Looks at CRIU and at the limits.
    fn look(&mut self) {
        if let Some(dump) = &mut self.dump
            && dump.script.is_none()
            && let Ok(Some(status)) = dump.criu.ended()
        {
            let reason = dump.criu.failure(status);
            self.step(SourceInput::FreezeFailed(reason));
        }
        let lost = self.lost_since.map_or(Duration::ZERO, |since| since.elapsed());
        let frozen = self.frozen_since.map_or(Duration::ZERO, |since| since.elapsed());
        let limit = if self.machine.has_granted() { GIVE_UP_LIMIT } else { LOST_LIMIT };
        if lost > limit {
            let reason = format!("no connection to {} for {} s", self.entry.to, limit.as_secs());
            self.step(SourceInput::TimedOut(reason));
        } else if frozen > FROZEN_LIMIT && !self.machine.has_granted() {
            let limit = FROZEN_LIMIT.as_secs();
            self.step(SourceInput::TimedOut(format!("the restore was not ready {limit} s after the freeze")));
        }
    }

    fn step(&mut self, input: SourceInput) {
        let outputs = self.machine.step(input);
        self.act(outputs);
    }

    fn act(&mut self, outputs: Vec<SourceOutput>) {
        for output in outputs {
            match output {
                SourceOutput::Send(message) => self.send(message),
                // Post-copy only: all memory is sent after the freeze.
                SourceOutput::PreCopy => self.step(SourceInput::PreCopied),
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

    fn start_dump(&mut self) {
        if let Err(error) = self.try_start_dump() {
            self.step(SourceInput::FreezeFailed(format!("{error:#}")));
        }
    }

    fn try_start_dump(&mut self) -> anyhow::Result<()> {
        let (ours, criu_end, number) = page_socket()?;
        let mut command = self.options.criu.command("dump", &self.folder.images(), self.folder.path());
        command.arg("-t").arg(self.options.tree.to_string());
        command.args(["--lazy-pages", "--ps-socket", &number, "--manage-cgroups=ignore"]);
        script::add_to(&mut command, self.folder.path())?;
        command.args(&self.options.criu.options);
        let criu = RunningCriu::start(&mut command, "dump", self.folder.path())?;
        drop(criu_end);
        self.dump = Some(HeldDump { criu, started: Instant::now(), script: None, _pages: ours });
        Ok(())
    }

    /// CRIU has written the image, and its script waits. The tree is stopped by CRIU, and is frozen now.
    fn dumped(&mut self, script: WaitingScript) {
        let Some(dump) = &mut self.dump else { return };
        dump.script = Some(script);
        let frozen = self.freeze();
        match frozen {
            Ok(()) => self.step(SourceInput::Frozen),
            Err(error) => self.step(SourceInput::FreezeFailed(format!("{error:#}"))),
        }
    }

    fn freeze(&mut self) -> anyhow::Result<()> {
        self.entry.cgroup.freeze()?;
        self.frozen_since = Some(Instant::now());
        self.open_memory()
    }

    fn open_memory(&self) -> anyhow::Result<()> {
        let opened = FrozenMemory::open(&self.entry.cgroup.processes()?)?;
        *self.memory.lock().unwrap_or_else(PoisonError::into_inner) = Some(opened);
        Ok(())
    }

    /// Sends in another thread: an abort can end it.
    fn send_metadata(&mut self) {
        let Some(link) = self.link.clone() else { return };
        let images = self.folder.images();
        thread::spawn(move || {
            let sent = image_files::send(&images, &link)
                .and_then(|()| link.send(&Frame::Source(FromSource::Metadata)));
            if let Err(error) = sent {
                tracing::warn!("sending the image: {error:#}");
                // The rest would be taken for the whole.
                link.close();
            }
        });
    }

    fn write_grant(&mut self) {
        let entry = SourceEntry { record: SourceRecord::Granted, ..self.entry.clone() };
        match self.folder.write(&WrittenRecord::Source(entry.clone())) {
            Ok(()) => {
                self.entry = entry;
                self.step(SourceInput::GrantWritten);
            }
            Err(error) => self.step(SourceInput::WriteFailed(format!("{error:#}"))),
        }
    }

    /// Ends CRIU's command, which releases the tree, and then lets it run.
    fn thaw(&mut self) {
        *self.memory.lock().unwrap_or_else(PoisonError::into_inner) = None;
        if let Some(mut dump) = self.dump.take() {
            // CRIU is in the middle of its dump: it is not killed before it has taken its code out of the tree.
            let mut reports = CriuReports::new("criu dump is in the middle of its dump, and is not killed");
            while dump.script.is_none() && matches!(dump.criu.ended(), Ok(None)) {
                reports.look();
                if let Ok(SourceEvent::Script(CriuMoment::PostDump, script)) = self.events.recv_timeout(TICK)
                {
                    dump.script = Some(script);
                }
            }
            release_criu(dump, false).wait("criu dump releases the tree, and is not killed");
        }
        match self.entry.cgroup.thaw() {
            Ok(()) => self.entry.cgroup.release(),
            Err(error) => self.stays_frozen = Some(format!("{error:#}")),
        }
    }

    fn kill(&mut self) {
        self.entry.cgroup.kill();
        if let Some(dump) = self.dump.take() {
            release_criu(dump, true).end_within(CRIU_LIMIT);
        }
        self.entry.cgroup.release();
        self.step(SourceInput::Killed);
    }
}

/// Lets a dump end: CRIU kills its tree if `succeeds`, and releases it otherwise.
fn release_criu(dump: HeldDump, succeeds: bool) -> RunningCriu {
    let HeldDump { criu, script, _pages: pages, .. } = dump;
    if let Some(script) = script {
        // CRIU may have died, and its script with it.
        let _ = script.decide(succeeds);
    }
    drop(pages);
    criu
}
