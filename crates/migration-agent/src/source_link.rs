// SPDX-License-Identifier: MIT OR Apache-2.0
//! The connection of a source: it is made again when it is lost, and page requests are answered on it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, bail};
use rewake_migration::message::FromDestination;
use rewake_peer_stream::PeerStream;

use crate::frame::{Frame, FrameWriter, MigrationId, PagePart, greet};
use crate::host::HostOffer;
use crate::peer::DestinationPeer;
use crate::pre_copy::PreCopy;
use crate::script::{AgentCall, WaitingScript};
use crate::tree_memory::TreeMemory;

/// Pause between two connections to the destination: short against
/// [`LOST_LIMIT`](crate::source_options::LOST_LIMIT), after which the program runs on here.
const CONNECT_INTERVAL: Duration = Duration::from_millis(200);

/// What an agent is waiting for.
pub(crate) enum SourceEvent {
    Connected(Arc<FrameWriter>),
    Disconnected,
    Unreachable(String),
    Received(FromDestination),
    /// The tree was looked at, before the migration begins.
    Described(Box<anyhow::Result<HostOffer>>),
    /// Pre-copy has ended: false if the migration had, or why the program cannot move.
    PreCopied(Result<bool, String>),
    /// The files of the image cannot be read.
    ImageLost(String),
    Called(AgentCall, WaitingScript),
    Abort,
}

/// What threads of the connection share with the agent.
#[derive(Debug, Default, Clone)]
pub(crate) struct SharedMemory {
    /// The memory of the frozen tree.
    frozen: Arc<Mutex<Option<TreeMemory>>>,
    pub(crate) pre_copy: Arc<PreCopy>,
    /// Bytes of requested pages that did not travel.
    spared: Arc<AtomicU64>,
}

impl SharedMemory {
    pub(crate) fn frozen(&self) -> MutexGuard<'_, Option<TreeMemory>> {
        self.frozen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what names files with GPU memory that arrive later.
    pub(crate) fn arriving_files(&self) -> anyhow::Result<Vec<Frame>> {
        self.frozen().as_ref().context("the tree is not frozen")?.arriving_files()
    }

    /// Bytes of pages that were answered by their digests, or as zeros.
    pub(crate) fn spared(&self) -> u64 {
        self.spared.load(Ordering::Relaxed)
    }

    fn note(&self, answer: &Frame) {
        if let Frame::Pages { parts, .. } = answer {
            self.spared.fetch_add(parts.iter().map(PagePart::spared).sum(), Ordering::Relaxed);
        }
    }
}

/// Connects if it is not connected, answers page requests, and connects again, until the agent has ended.
pub(crate) fn keep_connected(
    mut peer: DestinationPeer,
    mut dialed: Option<PeerStream>,
    id: &MigrationId,
    sender: &SyncSender<SourceEvent>,
    shared: &SharedMemory,
) {
    loop {
        let connected = dialed.take().map_or_else(|| peer.dial(), Ok).and_then(|stream| connect(stream, id));
        let event = match connected {
            Ok((stream, writer)) => {
                if sender.send(SourceEvent::Connected(Arc::clone(&writer))).is_err() {
                    return;
                }
                if let Err(error) = serve(stream, &writer, sender, shared) {
                    tracing::warn!("the destination: {error:#}");
                }
                SourceEvent::Disconnected
            }
            Err(error) => SourceEvent::Unreachable(format!("{error:#}")),
        };
        if sender.send(event).is_err() {
            return;
        }
        sleep(CONNECT_INTERVAL);
    }
}

/// Greets the destination on a new connection.
pub(crate) fn connect(
    mut stream: PeerStream,
    id: &MigrationId,
) -> anyhow::Result<(PeerStream, Arc<FrameWriter>)> {
    greet(&mut stream, id).context("sending the greeting")?;
    let writer = FrameWriter::new(stream.clone());
    Ok((stream, Arc::new(writer)))
}

/// Takes frames of one connection to its end.
fn serve(
    mut stream: PeerStream,
    writer: &FrameWriter,
    sender: &SyncSender<SourceEvent>,
    shared: &SharedMemory,
) -> anyhow::Result<()> {
    while let Some(frame) = Frame::read(&mut stream)? {
        match frame {
            Frame::Destination(message) => {
                if sender.send(SourceEvent::Received(message)).is_err() {
                    return Ok(());
                }
            }
            Frame::PageRequest { pid, run, wants_bytes } => {
                // Not sent under the lock: an abort takes the memory away.
                let answer = {
                    let memory = shared.frozen();
                    let memory = memory.as_ref();
                    memory.context("the destination requests pages of a tree that is not frozen")?.answer(
                        pid,
                        run,
                        wants_bytes,
                        || shared.pre_copy.blocks(),
                    )
                };
                writer.send(&answer)?;
                shared.note(&answer);
            }
            Frame::RoundStored(round) => shared.pre_copy.stored(round),
            _ => bail!("the destination sent a frame of a source"),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_need_not_travel_count_as_sent() {
        let shared = SharedMemory::default();
        let unchanged = PagePart::Unchanged { pages: 3, digest: [0; 32] };
        let parts = vec![PagePart::Zeros(2), PagePart::Bytes(vec![1; 4096]), unchanged];
        shared.note(&Frame::Pages { pid: 1, vaddr: 0, parts });
        shared.note(&Frame::PagesLost(String::new()));
        assert_eq!(shared.spared(), 5 * 4096);
    }
}
