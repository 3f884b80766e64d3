// SPDX-License-Identifier: MIT OR Apache-2.0
//! Syncobjs, metadata, numbers of submissions and power states of a process, and objects that a dump refuses,
//! by role.

use std::fmt::Write as _;
use std::os::fd::OwnedFd;

use anyhow::{Context as _, bail, ensure};
use drm::control::Device as _;
use rewake_amdgpu_uapi::abi::drm::SubmissionChunk;
use rewake_amdgpu_uapi::abi::memory::{Mapping, PAGE};
use rewake_amdgpu_uapi::abi::{
    AMDGPU_CTX_STABLE_PSTATE_PEAK, AMDGPU_CTX_STABLE_PSTATE_STANDARD, AMDGPU_GEM_CREATE_CPU_ACCESS_REQUIRED,
    AMDGPU_GEM_DOMAIN_DOORBELL, AMDGPU_GEM_DOMAIN_GDS, AMDGPU_GEM_DOMAIN_GTT, AMDGPU_HW_IP_DMA,
    AMDGPU_HW_IP_VCN_DEC, drm_amdgpu_cs_chunk_fence, drm_amdgpu_cs_chunk_syncobj,
};
use rewake_amdgpu_uapi::packet::Sdma;
use rewake_amdgpu_uapi::render::{ContextRing, Render};
use rewake_amdgpu_uapi::render_state::Metadata;
use rewake_criu_images::rewake::MAX_SUBMISSIONS;
use rewake_testkit::soon;

/// Where a page of commands is mapped.
const COMMANDS: u64 = 9 << 40;
/// A packet that waits until a word of memory is 1: POLL_REGMEM, of memory, for equality.
const POLL: u32 = 8 | 3 << 28 | 1 << 31;
const TIMELINE: u64 = 1 << 40;

/// Numbers that are looked at.
const LOOKED_AT: std::ops::Range<u32> = 1..16;
const LOOKED_AT_CONTEXTS: std::ops::Range<u32> = 1..8;

/// A page of commands, which the process keeps.
struct Commands<'a> {
    render: &'a Render,
    view: Mapping,
    buffer: u32,
}

impl<'a> Commands<'a> {
    fn new(render: &'a Render) -> anyhow::Result<Self> {
        let buffer =
            render.create(PAGE, AMDGPU_GEM_DOMAIN_GTT, AMDGPU_GEM_CREATE_CPU_ACCESS_REQUIRED.into())?;
        render.map_gpu(buffer, COMMANDS, PAGE)?;
        Ok(Self { render, view: render.map(buffer, PAGE)?, buffer })
    }

    /// Submits packets, and returns the submission's number.
    fn submit(&self, ring: ContextRing, packets: Sdma, more: &[SubmissionChunk<'_>]) -> anyhow::Result<u64> {
        let mut packets = packets;
        while packets.bytes().is_empty() || !packets.bytes().len().is_multiple_of(32) {
            packets = packets.nop();
        }
        self.view.write(0, packets.bytes());
        let bytes = u32::try_from(packets.bytes().len())?;
        Ok(self.render.submit_to(ring, (COMMANDS, bytes), more)?)
    }

    /// Submits commands that do nothing, and waits until they have ended.
    fn run(&self, ring: ContextRing, more: &[SubmissionChunk<'_>]) -> anyhow::Result<u64> {
        let number = self.submit(ring, Sdma::new(), more)?;
        let ended = soon(|| self.render.has_ended(ring, number).unwrap_or(false));
        ensure!(ended, "a submission does not end");
        Ok(number)
    }

    /// Submits work that never ends.
    fn hang(&self, ring: ContextRing, more: &[SubmissionChunk<'_>]) -> anyhow::Result<u64> {
        let word = |address: u64| u32::try_from(address & 0xffff_ffff).unwrap_or_default();
        let at = COMMANDS + PAGE / 2;
        let packets =
            Sdma::new().word(POLL).word(word(at)).word(word(at >> 32)).word(1).word(u32::MAX).word(0);
        self.submit(ring, packets, more)
    }
}

fn sdma(context: u32, ring: u32) -> ContextRing {
    ContextRing { context, engine: AMDGPU_HW_IP_DMA, ring }
}

/// Syncobjs of every kind, with gaps among the handles.
pub(super) fn syncobjs(render: &Render) -> anyhow::Result<()> {
    for (wanted, point) in
        (1..).zip([None, None, Some(0), Some(7), Some(TIMELINE), None, None, None, Some(3)])
    {
        ensure!(render.syncobj_with(point)? == wanted);
    }
    let commands = Commands::new(render)?;
    let context = render.context()?;
    // Signalled by work: a binary one, and a point of a timeline.
    let point = [drm_amdgpu_cs_chunk_syncobj { handle: 7, flags: 0, point: 9 }];
    commands.run(sdma(context, 0), &[SubmissionChunk::SyncobjOut(&[6])])?;
    commands.run(sdma(context, 0), &[SubmissionChunk::TimelineSignal(&point)])?;
    let reset = drm::control::from_u32(9).context("a handle")?;
    render.syncobj_reset(&[reset])?;
    for gone in [2, 8] {
        render.close_syncobj(gone)?;
    }
    Ok(())
}

/// A syncobj in a file that has no buffer.
pub(super) fn syncobj_without_buffers(render: &Render) -> anyhow::Result<()> {
    render.syncobj_with(Some(5))?;
    Ok(())
}

/// Metadata of every form: all of it, flags whose bytes were removed, tiling alone, none.
pub(super) fn metadata(render: &Render) -> anyhow::Result<()> {
    let full = Metadata { tiling_info: 0x1234_5678_9abc_def0, flags: 5, data: (0..=255).collect() };
    let all = [
        full.clone(),
        Metadata { data: Vec::new(), ..full },
        Metadata { tiling_info: 77, ..Metadata::default() },
        Metadata::default(),
        Metadata { tiling_info: 0, flags: 1 << 63, data: vec![1, 2, 3] },
    ];
    for metadata in &all {
        let handle = render.create(PAGE, AMDGPU_GEM_DOMAIN_GTT, 0)?;
        render.set_metadata(handle, metadata)?;
        ensure!(render.metadata(handle)? == *metadata);
    }
    Ok(())
}

/// Two contexts that have submitted to two rings, with a user fence.
pub(super) fn submissions(render: &Render) -> anyhow::Result<()> {
    let commands = Commands::new(render)?;
    for wanted in 1..=3 {
        ensure!(render.context()? == wanted);
    }
    render.free_context(2)?;
    let fence = drm_amdgpu_cs_chunk_fence { handle: commands.buffer, offset: 2048 };
    for (ring, count) in [(sdma(1, 0), 70), (sdma(3, 0), 1), (sdma(3, 1), 5)] {
        for _ in 0..count {
            commands.run(ring, &[SubmissionChunk::Fence(&fence)])?;
        }
    }
    Ok(())
}

/// The second of three contexts has set the GPU's stable power state.
pub(super) fn pstate(render: &Render) -> anyhow::Result<()> {
    for _ in 0..3 {
        render.context()?;
    }
    ensure!(render.set_stable_pstate(2, AMDGPU_CTX_STABLE_PSTATE_PEAK)?);
    Ok(())
}

/// Makes an object that a dump refuses. Returns descriptors that the process keeps.
pub(super) fn refused(role: &str, render: &Render) -> anyhow::Result<Option<OwnedFd>> {
    match role {
        "doorbells" => drop(render.create(PAGE, AMDGPU_GEM_DOMAIN_DOORBELL, 0)?),
        "on-chip" => drop(render.create(PAGE, AMDGPU_GEM_DOMAIN_GDS, 0)?),
        "dma-buf" => {
            let buffer = render.create(PAGE, AMDGPU_GEM_DOMAIN_GTT, 0)?;
            return Ok(render.export(buffer)?);
        }
        "syncobj-file" | "sync-file" => {
            let syncobj = drm::control::from_u32(render.syncobj_with(Some(0))?).context("a handle")?;
            return Ok(Some(render.syncobj_to_fd(syncobj, role == "sync-file")?));
        }
        "pending" => {
            let syncobj = render.syncobj_with(None)?;
            let context = render.context()?;
            Commands::new(render)?.hang(sdma(context, 0), &[SubmissionChunk::SyncobjOut(&[syncobj])])?;
        }
        "running" => {
            let context = render.context()?;
            Commands::new(render)?.hang(sdma(context, 1), &[])?;
        }
        "video" => {
            let context = render.context()?;
            let ring = ContextRing { context, engine: AMDGPU_HW_IP_VCN_DEC, ring: 0 };
            Commands::new(render)?.run(ring, &[])?;
        }
        "many" => {
            let context = render.context()?;
            let (ring, commands) = (sdma(context, 0), Commands::new(render)?);
            for _ in 0..MAX_SUBMISSIONS {
                commands.submit(ring, Sdma::new(), &[])?;
            }
            commands.run(ring, &[])?;
        }
        "reset" => {
            let context = render.context()?;
            let ring = sdma(context, 0);
            let commands = Commands::new(render)?;
            let number = commands.submit(ring, Sdma::new().word(0xff), &[])?;
            ensure!(soon(|| render.has_ended(ring, number).is_err()), "the ring is not reset");
        }
        other => bail!("{other:?} is no role"),
    }
    Ok(None)
}

/// A text of a file's state.
pub(super) fn look(render: &Render) -> anyhow::Result<String> {
    let mut text = String::new();
    for handle in LOOKED_AT {
        if let Some(state) = render.syncobj(handle)? {
            write!(text, "; syncobj {handle} {state:?}")?;
        }
        if render.created_as(handle)?.is_some() {
            let metadata = render.metadata(handle)?;
            if metadata != Metadata::default() {
                write!(text, "; metadata {handle} {metadata:?}")?;
            }
        }
    }
    for context in LOOKED_AT_CONTEXTS {
        if !render.has_context(context)? {
            continue;
        }
        // The context of a ring that was reset has no numbers any more.
        for ring in 0..2 {
            if let Ok(Some(count)) = render.submissions(sdma(context, ring), 1000) {
                write!(text, "; submissions {context} {ring}: {count}")?;
            }
        }
        write!(text, "; power {}", render.stable_pstate(context)?)?;
    }
    Ok(text)
}

/// Checks that state can be used as before: new syncobjs get the lowest free handle, timelines continue, and
/// only the context that had set a power state may change it.
pub(super) fn use_all(render: &Render) -> anyhow::Result<()> {
    let mut handles = Vec::new();
    for handle in LOOKED_AT {
        if render.syncobj(handle)?.is_some() {
            handles.push(handle);
        }
    }
    let lowest = (1..).find(|handle| !handles.contains(handle)).context("a handle")?;
    ensure!(render.syncobj_with(None)? == lowest);
    render.close_syncobj(lowest)?;
    for handle in handles {
        let name = drm::control::from_u32(handle).context("a handle")?;
        render.syncobj_timeline_signal(&[name], &[TIMELINE + 9])?;
        render.syncobj_timeline_wait(&[name], &[TIMELINE + 9], 0, true, false, false)?;
    }
    if render.has_context(3)? && render.stable_pstate(3)? == AMDGPU_CTX_STABLE_PSTATE_PEAK {
        ensure!(!render.set_stable_pstate(3, AMDGPU_CTX_STABLE_PSTATE_STANDARD)?);
        ensure!(render.set_stable_pstate(2, AMDGPU_CTX_STABLE_PSTATE_STANDARD)?);
    }
    Ok(())
}
