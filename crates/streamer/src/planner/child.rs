// SPDX-License-Identifier: MIT OR Apache-2.0
//! The planner: the process that parses an image.
//!
//! Standard input is the socket to the streamer, standard output the memory file for the plan.

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rewake_criu_images::{ImageDir, Overcommit};
use rewake_image_signature::Signers;
use rewake_plugin_protocol::{Channel, MAX_DESCRIPTORS};
use rewake_process::{descriptors, oom_score};

use super::confine::confine;
use super::{PlannerReport, TIME_LIMIT, step};
use crate::failure::FailureCause;
use crate::session::image::draft::Draft;

/// Bytes of a reason that are sent: a message has 16 KiB at most.
const MAX_REASON: usize = 8 << 10;

/// What the planner reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlannedMemory {
    /// An image that has all of its memory.
    Whole,
    /// One whose lazy pages a page server has.
    Remote,
    /// One that is copied from an image server, without some of its blocks.
    Partial,
    /// One in the node's cache, which may lack some of its blocks.
    InCache,
}

/// Plans the restore of an image, and reports to the streamer. Returns the exit code. `signers`: files of
/// signers that the image needs a signature of, in addition to the node's own.
///
/// # Errors
/// The streamer cannot be reached.
pub fn run(images: &Path, memory: PlannedMemory, signers: &[PathBuf]) -> anyhow::Result<u8> {
    // SAFETY: this program has just started, and has opened nothing.
    unsafe { descriptors::close_inherited()? };
    oom_score::be_killed_as_usual();
    let channel = Channel::with_timeout(std::io::stdin().as_fd().try_clone_to_owned()?, TIME_LIMIT)?;
    let stdout = File::from(std::io::stdout().as_fd().try_clone_to_owned()?);
    let Err(error) = plan(images, memory, signers, &stdout, &channel) else { return Ok(0) };
    let mut reason = format!("{error:#}");
    reason.truncate(reason.floor_char_boundary(MAX_REASON));
    let is_damaged = FailureCause::of(&error) == FailureCause::DamagedImage;
    let step = if is_damaged { step::DAMAGED } else { step::REFUSED };
    channel.send(&PlannerReport { step, reason }, &[])?;
    Ok(1)
}

fn plan(
    images: &Path,
    memory: PlannedMemory,
    signers: &[PathBuf],
    out: &File,
    channel: &Channel,
) -> anyhow::Result<()> {
    let report = |step: u32, descriptors: &[BorrowedFd<'_>]| {
        channel.send(&PlannerReport { step, reason: String::new() }, descriptors).context("reporting a plan")
    };
    // Where the kernel does not say what it permits, CRIU finds out.
    let overcommit = Overcommit::now().unwrap_or(Overcommit::Always);
    // Also the time zone, which a confined process cannot read. Memory of a page server or of a migration is
    // no image, and its peer proves who it is.
    let signers = if memory == PlannedMemory::Remote { Vec::new() } else { Signers::all(signers)? };
    let images = ImageDir::open(images)?;
    let no_userfaultfd = images.userfaultfd_refusal();
    let parents = images.ancestors();
    let directories: Vec<_> = [&images].into_iter().chain(&parents).map(|of| of.as_fd()).collect();
    report(step::DIRECTORIES, &directories)?;
    let chain: Vec<&ImageDir> = [&images].into_iter().chain(&parents).collect();
    confine(&chain).context("confining the planner")?;
    let draft = match memory {
        PlannedMemory::Whole => Draft::read(&images),
        PlannedMemory::Remote => Draft::read_remote(&images),
        PlannedMemory::Partial => Draft::read_partial(&images),
        PlannedMemory::InCache => Draft::read_in_cache(&images),
    }?;
    // The id is of the manifest that the plan was made with.
    Signers::check_image(&signers, &images, draft.sealed, draft.covers_parents)?;
    draft.write(out).context("writing the plan")?;
    let leases = draft.leases.iter().map(|lease| lease.as_fd());
    let files: Vec<_> = draft.files.iter().map(|file| file.file.as_fd()).chain(leases).collect();
    files.chunks(MAX_DESCRIPTORS).try_for_each(|some| report(step::FILES, some))?;
    let reason = no_userfaultfd.or_else(|| overcommit.refusal(&draft.mappings)).unwrap_or_default();
    channel.send(&PlannerReport { step: step::DONE, reason }, &[]).context("reporting a plan")
}
