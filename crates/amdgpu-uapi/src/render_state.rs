// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a render node keeps of a program besides buffers and contexts: syncobjs, metadata of buffers, numbers
//! of submissions, the stable power state. No call lists them; each of these calls takes one number.

use std::io;
use std::os::fd::AsFd as _;

use drm::control::{Device as _, syncobj};

use crate::abi::call::Argument as _;
use crate::abi::drm as gem;
use crate::abi::{
    AMDGPU_CTX_OP_SET_STABLE_PSTATE, AMDGPU_GEM_METADATA_OP_GET_METADATA,
    AMDGPU_GEM_METADATA_OP_SET_METADATA, drm_amdgpu_ctx, drm_amdgpu_gem_metadata,
};
use crate::render::{ContextRing, Render, unless};
use crate::{Error, FailedCall};

/// The most bytes of metadata that a buffer has.
pub const MAX_METADATA: usize = 256;

/// What a syncobj waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SyncobjState {
    /// It has no fence: it is new, or was reset.
    Empty,
    /// Its last fence is not signalled.
    Pending,
    /// Its last fence is signalled. The point of a timeline; 0 for a binary syncobj.
    Signalled(u64),
}

/// What users of a buffer say of its layout (GEM_METADATA).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Metadata {
    /// The driver's `tiling_info`.
    pub tiling_info: u64,
    /// The driver's `flags`.
    pub flags: u64,
    /// At most [`MAX_METADATA`] bytes.
    pub data: Vec<u8>,
}

impl Render {
    /// Returns the state of a syncobj, or `None` where no syncobj has this handle.
    ///
    /// # Errors
    /// SYNCOBJ_QUERY or SYNCOBJ_TIMELINE_WAIT failed.
    pub fn syncobj(&self, handle: u32) -> Result<Option<SyncobjState>, Error> {
        let Ok(name) = name(handle) else { return Ok(None) };
        let query = || {
            let mut points = [0];
            let query = self.syncobj_timeline_query(&[name], &mut points, false).map(|()| points[0]);
            unless(query, libc::ENOENT).map_err(FailedCall::named("SYNCOBJ_QUERY").failed())
        };
        if query()?.is_none() {
            return Ok(None);
        }
        // Point 0 is the last fence of a timeline, and the only one of a binary syncobj.
        match self.syncobj_timeline_wait(&[name], &[0], 0, false, false, false) {
            Ok(_) => Ok(query()?.map(SyncobjState::Signalled)),
            Err(error) => match error.raw_os_error() {
                Some(libc::EINVAL) => Ok(Some(SyncobjState::Empty)),
                Some(libc::ETIME) => Ok(Some(SyncobjState::Pending)),
                _ => Err(FailedCall::named("SYNCOBJ_TIMELINE_WAIT").failed()(error)),
            },
        }
    }

    /// Creates a syncobj, and returns its handle: without a fence, signalled, or with a timeline signalled up
    /// to a point.
    ///
    /// # Errors
    /// SYNCOBJ_CREATE or SYNCOBJ_TIMELINE_SIGNAL failed.
    pub fn syncobj_with(&self, point: Option<u64>) -> Result<u32, Error> {
        let created = self.create_syncobj(point == Some(0));
        let created = created.map_err(FailedCall::named("SYNCOBJ_CREATE").failed())?;
        if let Some(point) = point.filter(|point| *point > 0) {
            let signalled = self.syncobj_timeline_signal(&[created], &[point]);
            signalled.map_err(FailedCall::named("SYNCOBJ_TIMELINE_SIGNAL").failed())?;
        }
        Ok(created.into())
    }

    /// Destroys a syncobj.
    ///
    /// # Errors
    /// SYNCOBJ_DESTROY failed.
    pub fn close_syncobj(&self, handle: u32) -> Result<(), Error> {
        let closed = name(handle).and_then(|name| self.destroy_syncobj(name));
        closed.map_err(FailedCall::named("SYNCOBJ_DESTROY").failed())
    }

    /// Returns the metadata of a GEM buffer.
    ///
    /// # Errors
    /// GEM_METADATA failed.
    pub fn metadata(&self, handle: u32) -> Result<Metadata, Error> {
        let mut argument = drm_amdgpu_gem_metadata::zeroed();
        argument.handle = handle;
        argument.op = AMDGPU_GEM_METADATA_OP_GET_METADATA;
        let got = gem::gem_metadata(self.as_fd(), &mut argument);
        got.map_err(FailedCall::named("AMDGPU_GEM_METADATA GET").failed())?;
        let mut data: Vec<u8> = argument.data.data.iter().flat_map(|word| word.to_ne_bytes()).collect();
        data.truncate(argument.data.data_size_bytes as usize);
        Ok(Metadata { tiling_info: argument.data.tiling_info, flags: argument.data.flags, data })
    }

    /// Sets the metadata of a GEM buffer.
    ///
    /// # Errors
    /// GEM_METADATA failed; EINVAL without a call for more than [`MAX_METADATA`] bytes.
    pub fn set_metadata(&self, handle: u32, metadata: &Metadata) -> Result<(), Error> {
        // The kernel takes flags only together with bytes, and keeps them when the bytes are removed.
        if metadata.data.is_empty() && metadata.flags != 0 {
            self.put_metadata(handle, &Metadata { data: vec![0], ..metadata.clone() })?;
        }
        self.put_metadata(handle, metadata)
    }

    fn put_metadata(&self, handle: u32, metadata: &Metadata) -> Result<(), Error> {
        let act = FailedCall::named("AMDGPU_GEM_METADATA SET");
        if metadata.data.len() > MAX_METADATA {
            return Err(act.failed()(io::Error::from_raw_os_error(libc::EINVAL)));
        }
        let mut argument = drm_amdgpu_gem_metadata::zeroed();
        argument.handle = handle;
        argument.op = AMDGPU_GEM_METADATA_OP_SET_METADATA;
        argument.data.tiling_info = metadata.tiling_info;
        argument.data.flags = metadata.flags;
        argument.data.data_size_bytes = u32::try_from(metadata.data.len()).unwrap_or(u32::MAX);
        for (word, bytes) in argument.data.data.iter_mut().zip(metadata.data.chunks(4)) {
            let mut whole = [0; 4];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u32::from_ne_bytes(whole);
        }
        gem::gem_metadata(self.as_fd(), &mut argument).map_err(act.failed())
    }

    /// Returns how many submissions a context has made to a ring, `limit + 1` for more than `limit`, or
    /// `None` where the engine does not have the ring.
    ///
    /// Numbers begin with 1, and WAIT_CS refuses those that have not been given (EINVAL): a binary search
    /// finds the last one. Number 0 can be waited for on every ring.
    ///
    /// # Errors
    /// WAIT_CS failed: a submission of the context was cancelled by a reset of the GPU.
    pub fn submissions(&self, ring: ContextRing, limit: u64) -> Result<Option<u64>, Error> {
        let act = FailedCall::named("AMDGPU_WAIT_CS");
        let was_made = |number| {
            let done = unless(self.wait_on(ring, number, 0), libc::EINVAL);
            done.map(|done| done.is_some()).map_err(act.clone().failed())
        };
        if !was_made(0)? {
            return Ok(None);
        }
        if !was_made(1)? {
            return Ok(Some(0));
        }
        let (mut made, mut not_made) = (1, limit.saturating_add(2));
        if was_made(not_made - 1)? {
            return Ok(Some(not_made - 1));
        }
        while not_made - made > 1 {
            let middle = made + (not_made - made) / 2;
            if was_made(middle)? {
                made = middle;
            } else {
                not_made = middle;
            }
        }
        Ok(Some(made))
    }

    /// Returns whether a submission has ended, without waiting for it.
    ///
    /// # Errors
    /// WAIT_CS failed, or the submission did.
    pub fn has_ended(&self, ring: ContextRing, number: u64) -> Result<bool, Error> {
        self.wait_on(ring, number, 0).map_err(FailedCall::named("AMDGPU_WAIT_CS").failed())
    }

    /// Returns the stable power state of the GPU (`AMDGPU_CTX_STABLE_PSTATE_*`). Every context reports the
    /// state of its GPU, whichever context, or administrator, has set it.
    ///
    /// # Errors
    /// CTX failed.
    pub fn stable_pstate(&self, context: u32) -> Result<u32, Error> {
        let state = gem::ctx_stable_pstate(self.as_fd(), context);
        state.map_err(FailedCall::named("AMDGPU_CTX GET_STABLE_PSTATE").failed())
    }

    /// Sets the stable power state of the GPU for a context; false if another context has set it. Setting the
    /// state that the GPU has changes nothing.
    ///
    /// # Errors
    /// CTX failed.
    pub fn set_stable_pstate(&self, context: u32, state: u32) -> Result<bool, Error> {
        let mut argument = drm_amdgpu_ctx::zeroed();
        argument.in_.op = AMDGPU_CTX_OP_SET_STABLE_PSTATE;
        argument.in_.flags = state;
        argument.in_.ctx_id = context;
        let set = unless(gem::ctx(self.as_fd(), &mut argument), libc::EBUSY);
        Ok(set.map_err(FailedCall::named("AMDGPU_CTX SET_STABLE_PSTATE").failed())?.is_some())
    }
}

/// Converts a handle for the `drm` crate; 0 is not one.
fn name(handle: u32) -> io::Result<syncobj::Handle> {
    drm::control::from_u32(handle).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))
}
