// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the kernel keeps of an open render node besides buffers and contexts.

use prost::Message;

use super::buffer_user::MAX_SHARED;
use crate::amdgpu::record::{Contents, MissingField};
use crate::error::Result;
use crate::generated::gpu as raw;

/// The highest handle of a syncobj, and the most of them, that a dump looks for and a restore makes.
pub const MAX_SYNCOBJS: u32 = 1 << 20;
/// The most submissions of one render node, in all of its rings, that a restore makes again: about 10 us
/// each.
pub const MAX_SUBMISSIONS: u32 = 100_000;
/// The most bytes of metadata that the driver keeps of a buffer.
const MAX_METADATA: usize = 256;
/// The last of `AMDGPU_CTX_STABLE_PSTATE_*`.
const LAST_PSTATE: u32 = 4;

/// State of an open render node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RenderState {
    /// By ascending handle.
    pub syncobjs: Vec<Syncobj>,
    /// By ascending handle of the buffer.
    pub metadata: Vec<BufferMetadata>,
    /// By ascending context, engine and ring.
    pub submissions: Vec<Submissions>,
    /// The context that has set the GPU's stable power state.
    pub pstate: Option<StablePstate>,
}

/// A syncobj, idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Syncobj {
    /// Its handle, from 1.
    pub handle: u32,
    /// The signalled point of its timeline; 0 for a binary syncobj that is signalled. `None`: it has no
    /// fence.
    pub point: Option<u64>,
}

/// Metadata of a buffer (GEM_METADATA).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BufferMetadata {
    /// The buffer's number, from 1.
    pub handle: u32,
    /// The driver's `tiling_info`.
    pub tiling_info: u64,
    /// The driver's `flags`.
    pub flags: u64,
    /// At most 256 bytes.
    pub data: Vec<u8>,
}

/// How many submissions a context has made to a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Submissions {
    /// The context.
    pub context: u32,
    /// `AMDGPU_HW_IP_*`
    pub engine: u32,
    /// The engine's ring.
    pub ring: u32,
    /// At least 1; all of a file's together are at most [`MAX_SUBMISSIONS`].
    pub count: u32,
}

/// The stable power state of a GPU, and the context that has set it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StablePstate {
    /// The context.
    pub context: u32,
    /// `AMDGPU_CTX_STABLE_PSTATE_*`, never NONE.
    pub state: u32,
}

impl RenderState {
    /// Returns whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let syncobj = |Syncobj { handle, point }: &Syncobj| {
            raw::Syncobj { handle: Some(*handle), point: *point }.encode_to_vec()
        };
        let metadata = |metadata: &BufferMetadata| {
            raw::BufferMetadata {
                handle: Some(metadata.handle),
                tiling_info: Some(metadata.tiling_info),
                flags: Some(metadata.flags),
                data: Some(metadata.data.clone()),
            }
            .encode_to_vec()
        };
        let submissions = |Submissions { context, engine, ring, count }: &Submissions| {
            raw::Submissions {
                context: Some(*context),
                engine: Some(*engine),
                ring: Some(*ring),
                count: Some(*count),
            }
            .encode_to_vec()
        };
        raw::RenderState {
            syncobjs: self.syncobjs.iter().map(syncobj).collect(),
            metadata: self.metadata.iter().map(metadata).collect(),
            submissions: self.submissions.iter().map(submissions).collect(),
            pstate_context: self.pstate.map(|pstate| pstate.context),
            pstate: self.pstate.map(|pstate| pstate.state),
        }
        .encode_to_vec()
    }
}

/// Parses the state of a file with these contexts.
pub(super) fn parse(contents: Contents<'_>, bytes: &[u8], contexts: &[u32]) -> Result<RenderState> {
    let raw: raw::RenderState = contents.decode("the state of a render node", bytes)?;
    contents.limit("syncobjs", raw.syncobjs.len(), ("MAX_SYNCOBJS", MAX_SYNCOBJS as usize))?;
    contents.limit("metadata", raw.metadata.len(), ("MAX_SHARED", MAX_SHARED))?;
    contents.limit("submissions", raw.submissions.len(), ("MAX_SHARED", MAX_SHARED))?;
    let state = RenderState {
        syncobjs: raw.syncobjs.iter().map(|bytes| syncobj(contents, bytes)).collect::<Result<_>>()?,
        metadata: raw.metadata.iter().map(|bytes| metadata(contents, bytes)).collect::<Result<_>>()?,
        submissions: raw
            .submissions
            .iter()
            .map(|bytes| submissions(contents, bytes))
            .collect::<Result<_>>()?,
        pstate: pstate(contents, &raw)?,
    };
    let submitted: u64 = state.submissions.iter().map(|of| u64::from(of.count)).sum();
    if submitted > MAX_SUBMISSIONS.into() {
        let expected = format!("at most {MAX_SUBMISSIONS} submissions of a render node");
        return Err(contents.damaged(expected, submitted.to_string()));
    }
    let place = |of: &Submissions| (of.context, of.engine, of.ring);
    let is_ordered = state.syncobjs.is_sorted_by(|one, next| one.handle < next.handle)
        && state.metadata.is_sorted_by(|one, next| one.handle < next.handle)
        && state.submissions.is_sorted_by(|one, next| place(one) < place(next));
    if !is_ordered {
        return Err(contents.damaged("state of a render node in ascending order", "another order"));
    }
    let named = state.submissions.iter().map(|of| of.context).chain(state.pstate.map(|of| of.context));
    match named.into_iter().find(|context| contexts.binary_search(context).is_err()) {
        Some(context) => {
            Err(contents.damaged("state of the file's contexts", format!("state of context {context}")))
        }
        None => Ok(state),
    }
}

fn syncobj(contents: Contents<'_>, bytes: &[u8]) -> Result<Syncobj> {
    let raw: raw::Syncobj = contents.decode("a syncobj", bytes)?;
    let handle = contents.whole("a syncobj", raw.handle.ok_or(MissingField("handle")))?;
    if !(1..=MAX_SYNCOBJS).contains(&handle) {
        return Err(
            contents.damaged(format!("syncobjs from 1 to {MAX_SYNCOBJS}"), format!("syncobj {handle}"))
        );
    }
    Ok(Syncobj { handle, point: raw.point })
}

fn metadata(contents: Contents<'_>, bytes: &[u8]) -> Result<BufferMetadata> {
    let raw: raw::BufferMetadata = contents.decode("metadata", bytes)?;
    let need = |name, value: Option<u64>| contents.whole("metadata", value.ok_or(MissingField(name)));
    let handle = contents.whole("metadata", raw.handle.ok_or(MissingField("handle")))?;
    let data = raw.data.unwrap_or_default();
    if handle == 0 || data.len() > MAX_METADATA {
        let found = format!("{} bytes of buffer {handle}", data.len());
        return Err(contents.damaged(format!("at most {MAX_METADATA} bytes of metadata"), found));
    }
    let (tiling_info, flags) = (need("tiling_info", raw.tiling_info)?, need("flags", raw.flags)?);
    Ok(BufferMetadata { handle, tiling_info, flags, data })
}

fn submissions(contents: Contents<'_>, bytes: &[u8]) -> Result<Submissions> {
    let raw: raw::Submissions = contents.decode("submissions", bytes)?;
    let need = |name, value: Option<u32>| contents.whole("submissions", value.ok_or(MissingField(name)));
    let (context, engine) = (need("context", raw.context)?, need("engine", raw.engine)?);
    let (ring, count) = (need("ring", raw.ring)?, need("count", raw.count)?);
    if count == 0 {
        return Err(contents.damaged("rings with submissions", format!("one of context {context} without")));
    }
    Ok(Submissions { context, engine, ring, count })
}

fn pstate(contents: Contents<'_>, raw: &raw::RenderState) -> Result<Option<StablePstate>> {
    match (raw.pstate_context, raw.pstate) {
        (None, None) => Ok(None),
        (Some(context), Some(state)) if (1..=LAST_PSTATE).contains(&state) => {
            Ok(Some(StablePstate { context, state }))
        }
        (context, state) => Err(contents.damaged(
            format!("a power state from 1 to {LAST_PSTATE}, and its context"),
            format!("{state:?} of context {context:?}"),
        )),
    }
}
