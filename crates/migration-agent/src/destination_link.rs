// SPDX-License-Identifier: MIT OR Apache-2.0
//! Connections of a destination: the newest of the source's is used, others get an answer.

use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, sleep};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use rewake_migration::message::{FromDestination, FromSource, LinkRefusal};
use rewake_peer_stream::{Admission, PeerStream};

use crate::arriving_files;
use crate::candidates::CandidateStore;
use crate::criu::CriuChoice;
use crate::dry_run::{self, DRY_RUN};
use crate::earlier::EarlierMigration;
use crate::frame::{Frame, FrameWriter, MigrationId, greeted, set_limits};
use crate::image_files;
use crate::intake::Intake;
use crate::peer::{CertificateDigest, certificate_digest};
use crate::relay::PageRelay;
use crate::script::{CriuMoment, WaitingScript};
use crate::strangers::Strangers;

/// Time that a connection has for its greeting.
const GREETING_LIMIT: Duration = Duration::from_secs(10);
/// Pause after a connection that could not be accepted, because descriptors or memory are then used up for a
/// moment.
pub(crate) const ACCEPT_INTERVAL: Duration = Duration::from_millis(20);

/// What an agent is waiting for.
pub(crate) enum DestinationEvent {
    Connected(usize, Arc<FrameWriter>),
    Disconnected(usize),
    Received(usize, FromSource),
    Script(CriuMoment, WaitingScript),
    /// This host was compared with an offer: what it lacks.
    Compared(String, Vec<String>),
    MemoryLost(String),
    AllArrived,
    /// Files that arrive later have their space.
    Reserved,
    Abort,
}

/// What the threads of connections share with the agent.
#[derive(Debug)]
pub(crate) struct ConnectionState {
    pub(crate) admission: Admission,
    /// The migration that the first greeting named, and the certificate of its source, which has TLS.
    pub(crate) id: Mutex<Option<(MigrationId, Option<CertificateDigest>)>>,
    /// Migrations of agents that were killed.
    pub(crate) earlier: Mutex<Vec<EarlierMigration>>,
    pub(crate) strangers: Strangers,
    /// The number of the newest connection. Locked while a frame is handled: none of an earlier connection is
    /// handled after it.
    pub(crate) newest: Mutex<usize>,
    pub(crate) images: PathBuf,
    /// For comparisons.
    pub(crate) criu: CriuChoice,
    pub(crate) store: Arc<CandidateStore>,
    /// What may be stored. A connection uses it with `newest` locked.
    pub(crate) intake: Mutex<Intake>,
    pub(crate) relay: Mutex<Option<Arc<PageRelay>>>,
}

impl ConnectionState {
    pub(crate) fn relay(&self) -> Option<Arc<PageRelay>> {
        self.relay.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn intake(&self) -> MutexGuard<'_, Intake> {
        self.intake.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn earlier(&self) -> MutexGuard<'_, Vec<EarlierMigration>> {
        self.earlier.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the migration of this id, for its own source.
    fn take_earlier(
        &self,
        id: &MigrationId,
        peer: Option<CertificateDigest>,
    ) -> Result<Option<EarlierMigration>, LinkRefusal> {
        let mut earlier = self.earlier();
        let Some(index) = earlier.iter().position(|migration| migration.id == *id) else { return Ok(None) };
        if earlier[index].peer == peer {
            Ok(Some(earlier.remove(index)))
        } else {
            Err(LinkRefusal::OtherCertificate)
        }
    }

    /// Takes a connection for the migration of this id, which is the agent's own if it has none yet.
    fn take_own(&self, id: MigrationId, peer: Option<CertificateDigest>) -> Result<(), LinkRefusal> {
        let mut known = self.id.lock().unwrap_or_else(PoisonError::into_inner);
        match *known.get_or_insert((id, peer)) {
            (own, _) if own != id => Err(LinkRefusal::Busy),
            (_, first) if first != peer => Err(LinkRefusal::OtherCertificate),
            _ => Ok(()),
        }
    }
}

/// Takes connections until the process ends.
pub(crate) fn accept(
    listener: &TcpListener,
    state: &Arc<ConnectionState>,
    sender: &SyncSender<DestinationEvent>,
) {
    loop {
        let Ok((stream, peer)) = listener.accept() else {
            sleep(ACCEPT_INTERVAL);
            continue;
        };
        let Ok(stranger) = state.strangers.add(&stream, peer.ip()) else { continue };
        let (state, sender) = (Arc::clone(state), sender.clone());
        thread::spawn(move || {
            if let Err(error) = connection(stream, stranger, &state, &sender)
                && let Some(line) = state.strangers.refusals.line(|| format!("{peer}: {error:#}"))
            {
                tracing::warn!("{line}");
            }
        });
    }
}

/// Takes one connection from its greeting to its end.
fn connection(
    socket: TcpStream,
    stranger: u64,
    state: &ConnectionState,
    sender: &SyncSender<DestinationEvent>,
) -> anyhow::Result<()> {
    let admitted = admit(socket, state);
    state.strangers.remove(stranger);
    let Some(mut stream) = admitted? else { return Ok(()) };
    let number = {
        let mut newest = state.newest.lock().unwrap_or_else(PoisonError::into_inner);
        *newest += 1;
        state.intake().restart();
        *newest
    };
    let writer = Arc::new(FrameWriter::new(stream.clone()));
    sender.send(DestinationEvent::Connected(number, Arc::clone(&writer)))?;
    let ended = read_frames(&mut stream, &writer, number, state, sender);
    sender.send(DestinationEvent::Disconnected(number))?;
    ended
}

/// Admits a connection to the migration. None: it was a dry run, or of an earlier migration, and has its
/// answer.
fn admit(socket: TcpStream, state: &ConnectionState) -> anyhow::Result<Option<PeerStream>> {
    set_limits(&socket)?;
    let (mut stream, _) = state.admission.admit(socket)?;
    stream.socket().set_read_timeout(Some(GREETING_LIMIT))?;
    let id = greeted(&mut stream)?;
    if id == DRY_RUN {
        let is_taken = state.id.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        return dry_run::answer(stream, &state.criu, is_taken).map(|()| None);
    }
    let certificate = stream.peer().map(certificate_digest);
    let earlier = match state.take_earlier(&id, certificate) {
        Ok(earlier) => earlier,
        Err(refusal) => return refuse(stream, refusal),
    };
    if let Some(earlier) = earlier {
        let answered = earlier.answer(stream);
        match &answered {
            Ok(()) => earlier.forget(),
            Err(_) => state.earlier().push(earlier),
        }
        return answered.map(|()| None);
    }
    if let Err(refusal) = state.take_own(id, certificate) {
        return refuse(stream, refusal);
    }
    stream.socket().set_read_timeout(None)?;
    Ok(Some(stream))
}

/// Sends the source why its connection is refused, and ends the connection with this error.
fn refuse(stream: PeerStream, refusal: LinkRefusal) -> anyhow::Result<Option<PeerStream>> {
    FrameWriter::new(stream.clone()).send(&Frame::Destination(FromDestination::Refused(refusal)))?;
    stream.end_after_answer();
    bail!("refused: {refusal}")
}

fn read_frames(
    stream: &mut PeerStream,
    writer: &FrameWriter,
    number: usize,
    state: &ConnectionState,
    sender: &SyncSender<DestinationEvent>,
) -> anyhow::Result<()> {
    while let Some(frame) = Frame::read(stream)? {
        let newest = state.newest.lock().unwrap_or_else(PoisonError::into_inner);
        ensure!(*newest == number, "a newer connection has taken its place");
        let stored = match frame {
            Frame::Source(message) => {
                let taken = match message {
                    FromSource::Metadata { all_first } => state.intake().complete(all_first),
                    _ => Ok(()),
                };
                if taken.is_ok() {
                    sender.send(DestinationEvent::Received(number, message))?;
                }
                taken
            }
            Frame::File { name, offset, bytes } => {
                let taken = state.intake().file(bytes.len() as u64);
                taken.and_then(|()| image_files::store(&state.images, &name, offset, &bytes))
            }
            Frame::ArrivingFile { number, len, name, head } => {
                let taken = state.intake().arriving_file(len);
                taken.and_then(|()| arriving_files::make(&state.images, number, len, &name, &head))
            }
            Frame::Pages { pid, vaddr, parts } => {
                state.relay().context("the source sent pages without a request")?.answer(pid, vaddr, parts)
            }
            Frame::Candidate { pid, vaddr, pages, bytes } => {
                let taken = state.intake().candidate(state.store.size());
                taken.and_then(|()| state.store.candidate(pid, vaddr, pages, &bytes))
            }
            Frame::RoundEnd(round) => writer.send(&Frame::RoundStored(round)),
            Frame::PagesLost(reason) => Err(anyhow::anyhow!("the source: {reason}")),
            Frame::Destination(_) | Frame::PageRequest { .. } | Frame::RoundStored(_) => {
                bail!("the source sent a frame of a destination")
            }
        };
        if let Err(error) = stored {
            sender.send(DestinationEvent::MemoryLost(format!("{error:#}")))?;
        }
    }
    Ok(())
}
