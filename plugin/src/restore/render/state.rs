// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes what a render node had besides buffers and contexts.

use std::ops::Range;
use std::time::{Duration, Instant};

use rewake_amdgpu_uapi::abi::drm::SubmissionChunk;
use rewake_amdgpu_uapi::abi::memory::PAGE;
use rewake_amdgpu_uapi::abi::{
    AMDGPU_GEM_CREATE_CPU_ACCESS_REQUIRED, AMDGPU_GEM_DOMAIN_GTT, AMDGPU_HW_IP_COMPUTE, AMDGPU_HW_IP_DMA,
    AMDGPU_HW_IP_GFX,
};
use rewake_amdgpu_uapi::render::{ContextRing, Render, bo_list_entry};
use rewake_amdgpu_uapi::render_state::Metadata;
use rewake_criu_images::rewake::Submissions;
use rewake_criu_plugin::{Answer, Host};

use super::RenderNode;
use crate::polling::until;

/// How long commands that do nothing may take.
const NOP_LIMIT: Duration = Duration::from_secs(20);
/// Bytes of one submission: what the engines' alignments permit.
const NOP_BYTES: u32 = 64;
/// The copy engines' command that does nothing.
const SDMA_NOP: u32 = 0;
/// The graphics and compute engines': a packet of type 3, NOP, that has no second word.
const PM4_NOP: u32 = 0xffff_1000;

#[derive(Debug, thiserror::Error)]
enum StateError {
    #[error("a render node (file {id:#x}) has no free GPU address for commands")]
    NoAddress { id: u32 },
    #[error("a render node (file {id:#x}) has submissions to engine {engine}, which no restore makes again")]
    Engine { id: u32, engine: u32 },
    #[error("a render node (file {id:#x}): commands that do nothing have not ended after {NOP_LIMIT:?}")]
    Slow { id: u32 },
}

impl RenderNode {
    /// Makes syncobjs, numbers of submissions and the power state in a file that has its buffers and
    /// contexts. `taken` are GPU addresses that a buffer has, or will have.
    pub(super) fn make_state(&self, host: &Host, render: &Render, taken: &[Range<u64>]) -> Answer {
        self.syncobjs(render)?;
        self.submissions(render, taken)?;
        let Some(pstate) = self.state.pstate else { return Ok(()) };
        if !render.set_stable_pstate(pstate.context, pstate.state)? {
            host.warn(format_args!(
                "renderD{}: another process has set this GPU's stable power state, so context {} of file \
                 {:#x} runs with that and not with state {}",
                self.gpu.minor, pstate.context, self.id, pstate.state
            ));
        }
        Ok(())
    }

    /// Makes syncobjs with their handles. The kernel gives the lowest free one.
    fn syncobjs(&self, render: &Render) -> Answer {
        let mut wanted = self.state.syncobjs.iter().peekable();
        let mut spare = Vec::new();
        for handle in 1..=self.state.syncobjs.last().map_or(0, |last| last.handle) {
            let syncobj = wanted.next_if(|syncobj| syncobj.handle == handle);
            let found = render.syncobj_with(syncobj.and_then(|syncobj| syncobj.point))?;
            self.check_number("syncobj", handle, found)?;
            if syncobj.is_none() {
                spare.push(handle);
            }
        }
        for handle in spare {
            render.close_syncobj(handle)?;
        }
        Ok(())
    }

    /// Sets what the program said of a buffer's layout.
    pub(super) fn describe(&self, render: &Render, handle: u32) -> Answer {
        if let Ok(found) = self.state.metadata.binary_search_by_key(&handle, |metadata| metadata.handle) {
            let metadata = &self.state.metadata[found];
            let (tiling_info, flags, data) = (metadata.tiling_info, metadata.flags, metadata.data.clone());
            render.set_metadata(handle, &Metadata { tiling_info, flags, data })?;
        }
        Ok(())
    }

    /// Submits commands that do nothing until each ring has the number that it had.
    ///
    /// The program's memory has numbers of submissions that have ended. With numbers that begin anew, new
    /// work would look finished, as its number is lower than the one in memory.
    fn submissions(&self, render: &Render, taken: &[Range<u64>]) -> Answer {
        if self.state.submissions.is_empty() {
            return Ok(());
        }
        let info = render.device_info()?;
        let address = free_page(info.virtual_address_offset..info.virtual_address_max, taken);
        let address = address.ok_or(StateError::NoAddress { id: self.id })?;
        let buffer =
            render.create(PAGE, AMDGPU_GEM_DOMAIN_GTT, AMDGPU_GEM_CREATE_CPU_ACCESS_REQUIRED.into())?;
        let view = render.map(buffer, PAGE)?;
        render.map_gpu(buffer, address, PAGE)?;
        for submissions in &self.state.submissions {
            let nop = self.nop(submissions)?;
            for at in (0..u64::from(NOP_BYTES)).step_by(size_of::<u32>()) {
                view.store32(at, nop);
            }
            self.repeat(render, submissions, (address, NOP_BYTES), buffer)?;
        }
        render.unmap_gpu(buffer, address, PAGE)?;
        drop(view);
        Ok(render.close(buffer)?)
    }

    fn nop(&self, submissions: &Submissions) -> Result<u32, StateError> {
        match submissions.engine {
            AMDGPU_HW_IP_DMA => Ok(SDMA_NOP),
            AMDGPU_HW_IP_GFX | AMDGPU_HW_IP_COMPUTE => Ok(PM4_NOP),
            engine => Err(StateError::Engine { id: self.id, engine }),
        }
    }

    fn repeat(&self, render: &Render, wanted: &Submissions, commands: (u64, u32), buffer: u32) -> Answer {
        let Submissions { context, engine, ring, count } = *wanted;
        let at = ContextRing { context, engine, ring };
        let buffers = [bo_list_entry(buffer)];
        let mut last = 0;
        for _ in 0..count {
            last = render.submit_to(at, commands, &[SubmissionChunk::Buffers(&buffers)])?;
        }
        self.check_number("submission", count, u32::try_from(last).unwrap_or(u32::MAX))?;
        // The next ring's commands replace these.
        let ended = until(Instant::now() + NOP_LIMIT, || Ok(render.has_ended(at, last)?.then_some(())))?;
        Ok(ended.ok_or(StateError::Slow { id: self.id })?)
    }
}

/// Returns a page of GPU addresses that no buffer has: the first, or one behind a buffer.
fn free_page(all: Range<u64>, taken: &[Range<u64>]) -> Option<u64> {
    let mut taken: Vec<&Range<u64>> = taken.iter().collect();
    taken.sort_unstable_by_key(|range| range.start);
    let mut page = all.start;
    for range in taken {
        if range.start >= page.checked_add(PAGE)? {
            break;
        }
        page = page.max(range.end.checked_next_multiple_of(PAGE)?);
    }
    (page.checked_add(PAGE)? <= all.end).then_some(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_free_page_is_beside_all_buffers() {
        let all = 0x1_0000..0x8_0000;
        assert_eq!(free_page(all.clone(), &[]), Some(0x1_0000));
        assert_eq!(free_page(all.clone(), &[0..0x1_0001, 0x1_1000..0x3_0000]), Some(0x3_0000));
        assert_eq!(
            free_page(all.clone(), &[0x2_0000..0x8_0000, 0..0x1_1000, 0x1_1000..0x1_f000]),
            Some(0x1_f000)
        );
        assert_eq!(free_page(all.clone(), &[0..0x4_0000, 0x4_0000..0x8_0000]), None);
        assert_eq!(free_page(all, &[0..0x2_0000, 0x2_0000..u64::MAX]), None);
    }
}
