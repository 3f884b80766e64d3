// SPDX-License-Identifier: MIT OR Apache-2.0
//! Connections of a destination: the newest of the source's is used, others get an answer.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, sleep};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use rewake_criu_tls::PeerCertificate;
use rewake_migration::message::FromSource;
use rewake_peer_stream::{Admission, PeerStream};

use crate::candidates::CandidateStore;
use crate::criu::CriuChoice;
use crate::dry_run::{self, DRY_RUN};
use crate::earlier::EarlierMigration;
use crate::frame::{Frame, FrameWriter, MigrationId, greeted, set_limits};
use crate::image_files;
use crate::relay::PageRelay;
use crate::script::{CriuMoment, WaitingScript};

/// Time that a connection has for its greeting.
const GREETING_LIMIT: Duration = Duration::from_secs(10);
/// Connections without a greeting, at once.
const MAX_STRANGERS: usize = 16;
/// Time after a connection that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// What an agent is waiting for.
pub(crate) enum DestinationEvent {
    Connected(usize, Arc<FrameWriter>),
    Disconnected(usize),
    Received(usize, FromSource),
    Script(CriuMoment, WaitingScript),
    MemoryLost(String),
    AllArrived,
    Abort,
}

/// What the threads of connections share with the agent.
#[derive(Debug)]
pub(crate) struct ConnectionState {
    pub(crate) admission: Admission,
    /// The migration that the first greeting named, and the certificate of its source, which has TLS.
    pub(crate) id: Mutex<Option<(MigrationId, Option<PeerCertificate>)>>,
    /// Migrations of agents that were killed.
    pub(crate) earlier: Mutex<Vec<EarlierMigration>>,
    pub(crate) strangers: AtomicUsize,
    /// The number of the newest connection. Locked while a frame is handled: none of an earlier connection is handled
    /// after it.
    pub(crate) newest: Mutex<usize>,
    pub(crate) images: PathBuf,
    /// For comparisons.
    pub(crate) criu: CriuChoice,
    pub(crate) store: Arc<CandidateStore>,
    pub(crate) relay: Mutex<Option<Arc<PageRelay>>>,
}

impl ConnectionState {
    pub(crate) fn relay(&self) -> Option<Arc<PageRelay>> {
        self.relay.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn take_earlier(&self, id: &MigrationId) -> Option<EarlierMigration> {
        let mut earlier = self.earlier.lock().unwrap_or_else(PoisonError::into_inner);
        let index = earlier.iter().position(|migration| migration.id == *id)?;
        Some(earlier.remove(index))
    }
}

/// Takes connections until the process ends.
pub(crate) fn accept(
    listener: &TcpListener,
    state: &Arc<ConnectionState>,
    sender: &Sender<DestinationEvent>,
) {
    for stream in listener.incoming() {
        let Ok(stream) = stream else {
            sleep(ACCEPT_PAUSE);
            continue;
        };
        if state.strangers.fetch_add(1, Ordering::Relaxed) >= MAX_STRANGERS {
            state.strangers.fetch_sub(1, Ordering::Relaxed);
            tracing::error!("a connection was turned away: {MAX_STRANGERS} others have sent no greeting");
            continue;
        }
        let (state, sender) = (Arc::clone(state), sender.clone());
        thread::spawn(move || {
            let peer = stream
                .peer_addr()
                .map_or_else(|_| "a client".to_owned(), |peer: SocketAddr| peer.to_string());
            if let Err(error) = connection(stream, &state, &sender) {
                tracing::warn!("{peer}: {error:#}");
            }
        });
    }
}

/// Takes one connection from its greeting to its end.
fn connection(
    socket: TcpStream,
    state: &ConnectionState,
    sender: &Sender<DestinationEvent>,
) -> anyhow::Result<()> {
    let admitted = admit(socket, state);
    state.strangers.fetch_sub(1, Ordering::Relaxed);
    let Some(mut stream) = admitted? else { return Ok(()) };
    let number = {
        let mut newest = state.newest.lock().unwrap_or_else(PoisonError::into_inner);
        *newest += 1;
        *newest
    };
    let writer = Arc::new(FrameWriter::new(stream.clone()));
    sender.send(DestinationEvent::Connected(number, Arc::clone(&writer)))?;
    let ended = read_frames(&mut stream, &writer, number, state, sender);
    sender.send(DestinationEvent::Disconnected(number))?;
    ended
}

/// Admits a connection to the migration. None: it was a dry run, or of an earlier migration, and has its answer.
fn admit(socket: TcpStream, state: &ConnectionState) -> anyhow::Result<Option<PeerStream>> {
    set_limits(&socket)?;
    let (mut stream, _) = state.admission.admit(socket)?;
    stream.socket().set_read_timeout(Some(GREETING_LIMIT))?;
    let id = greeted(&mut stream)?;
    if id == DRY_RUN {
        let is_taken = state.id.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        return dry_run::answer(stream, &state.criu, is_taken).map(|()| None);
    }
    if let Some(earlier) = state.take_earlier(&id) {
        return earlier.answer(stream).map(|()| None);
    }
    let certificate = stream.peer();
    let mut known = state.id.lock().unwrap_or_else(PoisonError::into_inner);
    let (known, first) = known.get_or_insert_with(|| (id, certificate.cloned()));
    ensure!(*known == id, "another migration: this agent takes one program");
    ensure!(first.as_ref() == certificate, "its certificate is not that of the connection before");
    stream.socket().set_read_timeout(None)?;
    Ok(Some(stream))
}

fn read_frames(
    stream: &mut PeerStream,
    writer: &FrameWriter,
    number: usize,
    state: &ConnectionState,
    sender: &Sender<DestinationEvent>,
) -> anyhow::Result<()> {
    while let Some(frame) = Frame::read(stream)? {
        let newest = state.newest.lock().unwrap_or_else(PoisonError::into_inner);
        ensure!(*newest == number, "a newer connection has taken its place");
        let stored = match frame {
            Frame::Source(message) => {
                sender.send(DestinationEvent::Received(number, message))?;
                Ok(())
            }
            Frame::File { name, offset, bytes } => image_files::store(&state.images, &name, offset, &bytes),
            Frame::Pages { pid, vaddr, parts } => {
                state.relay().context("the source sent pages without a request")?.answer(pid, vaddr, parts)
            }
            Frame::Candidate { pid, vaddr, bytes } => {
                ensure!(state.relay().is_none(), "the source sent a candidate after the freeze");
                state.store.candidate(pid, vaddr, &bytes)
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
