// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake migrate --dry-run`: both hosts compare, and touch nothing. The destination stays free for a
//! migration.

use std::time::Duration;

use anyhow::{Context as _, bail};
use rewake_migration::destination::{DestinationInput, DestinationOutput, MigrationDestination};
use rewake_migration::message::{FromDestination, FromSource, LinkRefusal, VERSION};
use rewake_peer_stream::PeerStream;

use crate::cgroup::{self, TreeCgroup};
use crate::criu::CriuChoice;
use crate::file_look::FILES_LIMIT;
use crate::frame::{Frame, FrameWriter, MigrationId};
use crate::host::HostOffer;
use crate::peer::DestinationPeer;
use crate::source_link;
use crate::source_options::SourceOptions;

/// The id in the greeting of a connection that belongs to no migration.
pub(crate) const DRY_RUN: MigrationId = [0; 16];
/// Time that a peer has for each frame, also for its answer to an offer.
const ANSWER_LIMIT: Duration = FILES_LIMIT.saturating_add(Duration::from_secs(10));
/// The most frames of a source: Hello, an offer, and its end.
const MAX_FRAMES: usize = 3;

/// Compares both hosts for a tree. Returns what a migration would be refused for.
///
/// # Errors
/// The options are wrong, the tree does not exist, or the destination cannot be asked.
pub fn compare(options: &SourceOptions) -> anyhow::Result<Vec<String>> {
    let mut peer = DestinationPeer::of(options)?;
    crate::start_time::start_of(options.tree)?;
    let mut refusals = Vec::new();
    if let Err(error) = TreeCgroup::find(options.tree) {
        refusals.push(format!("{error:#}"));
    }
    let processes: Vec<i32> = cgroup::tree(options.tree)?.into_iter().collect();
    let offer = HostOffer::in_time(processes, &options.criu)?;
    refusals.extend(offer.refused_here(options));
    let (stream, writer) = source_link::connect(peer.dial()?, &DRY_RUN)?;
    let asked = ask(stream, &writer, serde_json::to_string(&offer)?);
    let answer = asked.with_context(|| format!("asking {}", options.to))?;
    refusals.extend(answer.map(|reason| format!("{}: {reason}", options.to)));
    Ok(refusals)
}

/// Gives the destination an offer. Returns why it refuses.
fn ask(mut stream: PeerStream, writer: &FrameWriter, offer: String) -> anyhow::Result<Option<String>> {
    stream.socket().set_read_timeout(Some(ANSWER_LIMIT))?;
    writer.send(&Frame::Source(FromSource::Hello { version: VERSION }))?;
    writer.send(&Frame::Source(FromSource::Offer(offer)))?;
    loop {
        match Frame::read(&mut stream)?.context("it ended the connection")? {
            Frame::Destination(FromDestination::Hello { version, .. }) if version != VERSION => {
                bail!("it speaks version {version} of the protocol, expected {VERSION}")
            }
            Frame::Destination(FromDestination::Hello { .. }) => {}
            Frame::Destination(FromDestination::Accept) => {
                let over = "this was a dry run".to_owned();
                writer.send(&Frame::Source(FromSource::Abort(over)))?;
                return Ok(None);
            }
            Frame::Destination(FromDestination::Abort(reason)) => return Ok(Some(reason)),
            other => bail!("it sent {other:?}, expected its answer to an offer"),
        }
    }
}

/// Answers a source's dry run. `is_taken`: this agent has a migration.
pub(crate) fn answer(mut stream: PeerStream, criu: &CriuChoice, is_taken: bool) -> anyhow::Result<()> {
    stream.socket().set_read_timeout(Some(ANSWER_LIMIT))?;
    let writer = FrameWriter::new(stream.clone());
    // A machine that is thrown away. Of its outputs, only messages are carried out.
    let mut machine = MigrationDestination::new();
    for _ in 0..=MAX_FRAMES {
        let Some(frame) = Frame::read(&mut stream)? else { return Ok(()) };
        let Frame::Source(message) = frame else { bail!("{frame:?} in a dry run: expected an offer") };
        let mut outputs = machine.step(DestinationInput::Received(message));
        while let Some(output) = outputs.pop() {
            match output {
                DestinationOutput::Send(message) => writer.send(&Frame::Destination(message))?,
                DestinationOutput::Compare(offer) => {
                    let mut refusals = HostOffer::refused_there(&offer, criu);
                    if is_taken {
                        refusals.push(LinkRefusal::Busy.to_string());
                    }
                    outputs = machine.step(DestinationInput::Compared(as_result(&refusals)));
                }
                _ => {}
            }
        }
    }
    bail!("more than {MAX_FRAMES} frames in a dry run")
}

/// What a machine is given.
pub(crate) fn as_result(refusals: &[String]) -> Result<(), String> {
    if refusals.is_empty() { Ok(()) } else { Err(refusals.join("; ")) }
}
