// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds what a render node has besides buffers and contexts. No call lists it, so each number is tried.

use std::time::Instant;

use rewake_amdgpu_uapi::abi::{
    AMDGPU_CTX_QUERY2_FLAGS_GUILTY, AMDGPU_CTX_QUERY2_FLAGS_RESET, AMDGPU_CTX_QUERY2_FLAGS_VRAMLOST,
    AMDGPU_CTX_STABLE_PSTATE_NONE, AMDGPU_HW_IP_COMPUTE, AMDGPU_HW_IP_DMA, AMDGPU_HW_IP_GFX,
    AMDGPU_HW_IP_NUM,
};
use rewake_amdgpu_uapi::render::{ContextRing, Render};
use rewake_amdgpu_uapi::render_state::SyncobjState;
use rewake_criu_images::rewake::{
    BufferMetadata, MAX_SUBMISSIONS, MAX_SYNCOBJS, RenderState, StablePstate, Submissions, Syncobj,
};
use rewake_criu_plugin::{Answer, Refusal};

use super::listing::{IDLE_LIMIT, Listing};
use crate::polling::until;

/// One more than the highest id of a context (`AMDGPU_VM_MAX_NUM_CTX`).
const CONTEXT_LIMIT: u32 = 4096;
/// Handles without a syncobj in a row after which no higher ones are tried.
///
/// The kernel gives the lowest free handle. A syncobj beyond the row exists only if the program has had all
/// of the row's syncobjs at once, and destroyed every one of them and not that one.
const FREE_IN_A_ROW: u32 = 16_384;
/// Rings of an engine in a context that are tried; the driver has at most four.
const RINGS: u32 = 8;
/// Engines whose submissions a restore makes again, as it knows a command of theirs that does nothing.
const WITH_NOPS: [u32; 3] = [AMDGPU_HW_IP_GFX, AMDGPU_HW_IP_COMPUTE, AMDGPU_HW_IP_DMA];
/// The engines by `AMDGPU_HW_IP_*`.
const ENGINES: [&str; AMDGPU_HW_IP_NUM as usize] =
    ["GFX", "COMPUTE", "SDMA", "UVD", "VCE", "UVD_ENC", "VCN_DEC", "VCN_ENC", "VCN_JPEG", "VPE"];

/// State that a restore could not make again.
#[derive(Debug, thiserror::Error)]
enum LostState {
    #[error(
        "file {id:#x}, a render node, has a syncobj with number {number}, and no higher number is tried: \
         close some of the program's syncobjs before the dump"
    )]
    TooMany { id: u32, number: u32 },
    #[error(
        "syncobj {handle} of file {id:#x}, a render node, has been pending for {IDLE_LIMIT:?}: what it \
         waits for must end before the dump"
    )]
    Pending { id: u32, handle: u32 },
    #[error(
        "{work} of file {id:#x}, a render node, has been running for {IDLE_LIMIT:?}: submitted work must \
         end before the dump"
    )]
    Running { id: u32, work: Work },
    #[error(
        "file {id:#x}, a render node, has had more than {MAX_SUBMISSIONS} submissions, up to {work}, and a \
         restore makes each of them again, so that the program's fences keep their numbers: free contexts of \
         the program that have ended their work before the dump"
    )]
    ManySubmissions { id: u32, work: Work },
    #[error(
        "{work} of file {id:#x}, a render node: this engine keeps sessions that no call reports; end the \
         program's video work, and free the context, before the dump"
    )]
    Video { id: u32, work: Work },
    #[error(
        "context {context} of file {id:#x}, a render node, was lost in a reset of the GPU, which a restored \
         context would not report: the program has to free it before the dump"
    )]
    Reset { id: u32, context: u32 },
}

/// A ring of a context, in messages.
#[derive(Debug)]
struct Work(ContextRing);

impl std::fmt::Display for Work {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ContextRing { context, engine, ring } = self.0;
        let engine = ENGINES.get(engine as usize).copied().unwrap_or("an unknown engine");
        write!(out, "work of context {context} on {engine} ring {ring}")
    }
}

/// Returns the ids of submission contexts.
pub(super) fn contexts(render: &Render) -> Answer<Vec<u32>> {
    let mut found = Vec::new();
    for context in 1..CONTEXT_LIMIT {
        if render.has_context(context)? {
            found.push(context);
        }
    }
    Ok(found)
}

/// Returns the rest of a file's state, once all of its work has ended: by `end`, or the dump fails.
pub(super) fn read(render: &Render, id: u32, listing: &Listing, end: Instant) -> Answer<RenderState> {
    Ok(RenderState {
        syncobjs: syncobjs(render, id, end)?,
        metadata: metadata(render, listing)?,
        submissions: submissions(render, id, &listing.contexts, end)?,
        pstate: pstate(render, &listing.contexts)?,
    })
}

/// Returns the handles of a file's syncobjs.
fn handles(id: u32, exists: impl Fn(u32) -> Answer<bool>) -> Answer<Vec<u32>> {
    let mut found = Vec::new();
    let mut last = 0;
    for number in 1..=MAX_SYNCOBJS {
        if exists(number)? {
            found.push(number);
            last = number;
        } else if number - last >= FREE_IN_A_ROW {
            return Ok(found);
        }
    }
    Err(LostState::TooMany { id, number: last }.into())
}

fn syncobjs(render: &Render, id: u32, end: Instant) -> Answer<Vec<Syncobj>> {
    let found = handles(id, |handle| Ok(render.syncobj(handle)?.is_some()))?;
    let idle = |handle| -> Answer<Syncobj> {
        let point = until(end, || {
            Ok(match render.syncobj(handle)? {
                Some(SyncobjState::Pending) => None,
                Some(SyncobjState::Signalled(point)) => Some(Some(point)),
                Some(SyncobjState::Empty) | None => Some(None),
            })
        })?;
        Ok(Syncobj { handle, point: point.ok_or(LostState::Pending { id, handle })? })
    };
    found.into_iter().map(idle).collect()
}

fn metadata(render: &Render, listing: &Listing) -> Answer<Vec<BufferMetadata>> {
    let mut all = Vec::new();
    for buffer in &listing.buffers {
        let handle = buffer.image.handle;
        let found = render.metadata(handle)?;
        let metadata =
            BufferMetadata { handle, tiling_info: found.tiling_info, flags: found.flags, data: found.data };
        if metadata != (BufferMetadata { handle, ..BufferMetadata::default() }) {
            all.push(metadata);
        }
    }
    all.sort_unstable_by_key(|metadata| metadata.handle);
    Ok(all)
}

fn submissions(render: &Render, id: u32, contexts: &[u32], end: Instant) -> Answer<Vec<Submissions>> {
    const LOST: u32 =
        AMDGPU_CTX_QUERY2_FLAGS_RESET | AMDGPU_CTX_QUERY2_FLAGS_VRAMLOST | AMDGPU_CTX_QUERY2_FLAGS_GUILTY;
    let mut all = Vec::new();
    if contexts.is_empty() {
        return Ok(all);
    }
    let mut engines = Vec::new();
    for engine in 0..AMDGPU_HW_IP_NUM {
        match render.engine_info(engine) {
            Ok(info) if info.available_rings != 0 => engines.push(engine),
            Ok(_) => {}
            // An engine that this kernel does not know is one that the GPU does not have.
            Err(error) if error.errno() == Some(libc::EINVAL) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let mut left = MAX_SUBMISSIONS;
    for &context in contexts {
        if render.context_state(context)? & u64::from(LOST) != 0 {
            return Err(LostState::Reset { id, context }.into());
        }
        // The reset may come after that look.
        let lost = |error: rewake_amdgpu_uapi::Error| match error.errno() {
            Some(libc::ECANCELED) => Refusal::from(LostState::Reset { id, context }),
            _ => error.into(),
        };
        for &engine in &engines {
            for ring in 0..RINGS {
                let at = ContextRing { context, engine, ring };
                let Some(count) = render.submissions(at, left.into()).map_err(lost)? else { break };
                let work = Work(at);
                match u32::try_from(count) {
                    Ok(0) => {}
                    _ if !WITH_NOPS.contains(&engine) => return Err(LostState::Video { id, work }.into()),
                    Ok(count) if count <= left => {
                        left -= count;
                        let ended = until(end, || {
                            Ok(render.has_ended(at, count.into()).map_err(lost)?.then_some(()))
                        })?;
                        ended.ok_or(LostState::Running { id, work })?;
                        all.push(Submissions { context, engine, ring, count });
                    }
                    _ => return Err(LostState::ManySubmissions { id, work }.into()),
                }
            }
        }
    }
    Ok(all)
}

/// Returns which context has set the GPU's stable power state.
///
/// Every context reports the GPU's state. A context may set the state that the GPU has, without an effect,
/// unless another context has set it. So a new context of another file finds out whether any context has, and
/// each context of this file whether it was that one.
fn pstate(render: &Render, contexts: &[u32]) -> Answer<Option<StablePstate>> {
    let Some(first) = contexts.first() else { return Ok(None) };
    let state = render.stable_pstate(*first)?;
    if state == AMDGPU_CTX_STABLE_PSTATE_NONE {
        return Ok(None);
    }
    let other = Render::open(render.minor())?;
    if other.set_stable_pstate(other.context()?, state)? {
        return Ok(None);
    }
    for &context in contexts {
        if render.set_stable_pstate(context, state)? {
            return Ok(Some(StablePstate { context, state }));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(numbers: &[u32]) -> Answer<Vec<u32>> {
        handles(9, |number| Ok(numbers.contains(&number)))
    }

    #[test]
    fn numbers_are_tested_until_many_in_a_row_are_free() {
        assert_eq!(found(&[]).unwrap(), []);
        let last = 7 + FREE_IN_A_ROW + 1;
        assert_eq!(found(&[1, 3, 7, last]).unwrap(), [1, 3, 7]);
        assert_eq!(found(&[1, 3, 7, last - 1]).unwrap(), [1, 3, 7, last - 1]);
    }

    #[test]
    fn a_number_at_the_limit_is_refused() {
        let all: Vec<u32> = (FREE_IN_A_ROW / 2..=MAX_SYNCOBJS).step_by(FREE_IN_A_ROW as usize / 2).collect();
        let error = found(&all).unwrap_err();
        assert!(format!("{error:?}").contains("number: 1048576"), "{error:?}");
    }
}
