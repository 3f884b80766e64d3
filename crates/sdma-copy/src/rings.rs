// SPDX-License-Identifier: MIT OR Apache-2.0
//! A GPU's copy rings. Transfers become packets, and packets become a submission on the ring with the fewest
//! bytes in flight.
//!
//! Each ring ends its submissions in order. Until then their packets occupy a slot of command memory.

use std::collections::VecDeque;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::Instant;

use drm::control::{Device as _, syncobj};
use rewake_amdgpu_uapi::abi::drm::SubmissionChunk;
use rewake_amdgpu_uapi::abi::memory::Mapping;
use rewake_amdgpu_uapi::abi::{
    AMDGPU_GEM_CREATE_CPU_ACCESS_REQUIRED, AMDGPU_GEM_DOMAIN_GTT, drm_amdgpu_bo_list_entry,
    drm_amdgpu_cs_chunk_syncobj,
};
use rewake_amdgpu_uapi::packet::{CountEncoding, Sdma};
use rewake_amdgpu_uapi::render::{Render, bo_list_entry};

use crate::Error;
use crate::address::Addresses;
use crate::flight::{RingSubmission, Ticket};
use crate::staging::Staging;
use crate::table::{BoEntry, Reach, Table};
use crate::transfer::Transfer;

/// The most submissions in flight on one ring. The kernel blocks from the 33rd on, and forgets how older ones
/// ended (`amdgpu_sched_jobs`).
pub const IN_FLIGHT: usize = 8;
/// The transfers that always fit one submission if none exceeds 1 MiB. Longer ones take a packet for each 4
/// MiB on GFX9 and newer, and for each 2 MiB before.
pub const COPIES: usize = 2340;

/// Bytes of packets of one submission.
const COMMAND_BYTES: u64 = 64 << 10;
/// The unit of a submission's packet bytes: eight words.
const COMMAND_ALIGNMENT: usize = 32;

const _: () = assert!(
    COPIES as u64 * Sdma::COPY <= COMMAND_BYTES && COMMAND_BYTES.is_multiple_of(COMMAND_ALIGNMENT as u64)
);

/// All rings of one context.
#[derive(Debug)]
pub(crate) struct Rings {
    context: u32,
    rings: Vec<Ring>,
    addresses: Addresses,
    commands: Commands,
    staging: StagingMap,
    /// The packets of the next submission. The allocation is reused.
    packets: Sdma,
    list: Vec<drm_amdgpu_bo_list_entry>,
    spare: Vec<Vec<u32>>,
    /// The number of the next submission. Entries that it lists carry this number.
    stamp: u64,
    encoding: CountEncoding,
}

#[derive(Debug)]
struct Ring {
    number: u32,
    timeline: syncobj::Handle,
    /// The number of submissions so far, which is the timeline's last point.
    count: u64,
    flights: VecDeque<RingSubmission>,
    /// Bytes of all submissions in flight.
    bytes: u64,
}

/// Command memory: a slot for each submission in flight.
#[derive(Debug)]
struct Commands {
    handle: u32,
    memory: Mapping,
    address: u64,
}

/// The staging memory in the GPU's address space.
#[derive(Debug)]
struct StagingMap {
    address: u64,
    part_bytes: u64,
    parts: Vec<StagingPart>,
}

#[derive(Debug)]
struct StagingPart {
    handle: u32,
    stamp: u64,
}

impl Rings {
    pub(crate) fn new(
        render: &Render,
        mask: u32,
        encoding: CountEncoding,
        staging: &Staging,
    ) -> Result<Self, Error> {
        let kernel = |source| Error::Kernel { minor: render.minor(), source };
        let device = render.device_info().map_err(kernel)?;
        let mut addresses = Addresses::new(device.virtual_address_offset, device.virtual_address_max);
        let numbers: Vec<u32> = (0..u32::BITS).filter(|ring| mask & (1 << ring) != 0).collect();
        Ok(Self {
            context: render.context().map_err(kernel)?,
            commands: Commands::new(render, &mut addresses, numbers.len())?,
            staging: StagingMap::new(render, &mut addresses, staging)?,
            rings: numbers.into_iter().map(|number| Ring::new(render, number)).collect::<Result<_, _>>()?,
            addresses,
            packets: Sdma::by(encoding),
            list: Vec::new(),
            spare: Vec::new(),
            stamp: 0,
            encoding,
        })
    }

    /// Returns the number of rings.
    pub(crate) fn count(&self) -> usize {
        self.rings.len()
    }

    /// Returns the number of submissions that fit before one ends.
    pub(crate) fn room(&self) -> usize {
        self.rings.iter().map(|ring| IN_FLIGHT - ring.flights.len()).sum()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.rings.iter().map(|ring| ring.flights.len()).sum()
    }

    /// Submits checked transfers. The kernel signals `event` when they are done.
    pub(crate) fn submit(
        &mut self,
        render: &Render,
        (table, staging): (&mut Table, &Staging),
        transfers: &[Transfer],
        ticket: Ticket,
        event: Option<BorrowedFd<'_>>,
    ) -> Result<(), Error> {
        let minor = render.minor();
        let packets = transfers.iter().map(|transfer| self.packets_of(transfer)).sum();
        if packets > COPIES as u64 {
            return Err(Error::Long { minor, packets, most: COPIES as u64 });
        }
        let free = self.rings.iter_mut().enumerate().filter(|(_, ring)| ring.flights.len() < IN_FLIGHT);
        let chosen = free.min_by_key(|(_, ring)| ring.bytes).map(|(index, _)| index);
        let chosen = chosen.ok_or(Error::Full { minor })?;
        let mut bos = self.spare.pop().unwrap_or_default();
        let commands = self.write(render, (&mut *table, staging), transfers, chosen, &mut bos);
        let flight = commands.and_then(|commands| {
            let submission = self.rings[chosen].submit(render, self.context, commands, &self.list, event)?;
            let bytes = transfers.iter().map(Transfer::bytes).sum();
            Ok((submission, bytes))
        });
        let (submission, bytes) = match flight {
            Ok(flight) => flight,
            Err(error) => {
                self.end_uses(render, table, bos)?;
                return Err(error);
            }
        };
        let since = Instant::now();
        let ring = &mut self.rings[chosen];
        ring.flights.push_back(RingSubmission {
            ticket,
            submission,
            transfers: transfers.len(),
            bytes,
            since,
            bos,
        });
        ring.bytes += bytes;
        Ok(())
    }

    fn packets_of(&self, transfer: &Transfer) -> u64 {
        match transfer {
            Transfer::Fill { bytes, .. } => self.encoding.fills(*bytes),
            Transfer::Load { bytes, .. } | Transfer::Save { bytes, .. } => self.encoding.copies(*bytes),
        }
    }

    /// Writes the packets, lists the memory that they use, and counts the BOs in `bos`. Returns the packets'
    /// address and size.
    fn write(
        &mut self,
        render: &Render,
        (table, staging): (&mut Table, &Staging),
        transfers: &[Transfer],
        ring: usize,
        bos: &mut Vec<u32>,
    ) -> Result<(u64, u32), Error> {
        self.stamp += 1;
        self.list.clear();
        self.list.push(bo_list_entry(self.commands.handle));
        let mut packets = std::mem::take(&mut self.packets).cleared();
        for transfer in transfers {
            let to = self.reach(render, table, transfer, bos)? + transfer.at();
            if let Some(place) = transfer.place() {
                self.staging.list(staging.offset(place), transfer.bytes(), self.stamp, &mut self.list);
            }
            packets = match *transfer {
                Transfer::Load { from, bytes, .. } => {
                    packets.copy(to, self.staging.address + staging.offset(from), bytes)
                }
                Transfer::Save { to: place, bytes, .. } => {
                    packets.copy(self.staging.address + staging.offset(place), to, bytes)
                }
                Transfer::Fill { bytes, word, .. } => packets.fill(to, word, bytes),
            };
        }
        while !packets.bytes().len().is_multiple_of(COMMAND_ALIGNMENT) {
            packets = packets.nop();
        }
        let slot = ring as u64 * IN_FLIGHT as u64 + self.rings[ring].count % IN_FLIGHT as u64;
        let bytes = u32::try_from(packets.bytes().len()).unwrap_or(u32::MAX);
        self.commands.memory.write(slot * COMMAND_BYTES, packets.bytes());
        self.packets = packets;
        Ok((self.commands.address + slot * COMMAND_BYTES, bytes))
    }

    /// Returns the GPU address of a transfer's BO, and lists the BO.
    fn reach(
        &mut self,
        render: &Render,
        table: &mut Table,
        transfer: &Transfer,
        bos: &mut Vec<u32>,
    ) -> Result<u64, Error> {
        let minor = render.minor();
        let bo = transfer.bo();
        let entry = table.get(bo).ok_or(Error::Bo { minor })?;
        let address = if let Reach::Gpu(address) = entry.reach {
            address
        } else {
            let address = map(render, &mut self.addresses, entry.handle, entry.size)?;
            entry.reach = Reach::Gpu(address);
            address
        };
        if entry.stamp != self.stamp {
            entry.stamp = self.stamp;
            self.list.push(bo_list_entry(entry.handle));
            bos.push(table.start_use(bo));
        }
        Ok(address)
    }

    /// Reports submissions that have ended on any ring: `on_end` gets the ticket, and the error if it failed.
    pub(crate) fn poll(
        &mut self,
        render: &Render,
        table: &mut Table,
        mut on_end: impl FnMut(Ticket, Result<(), Error>),
    ) -> Result<(), Error> {
        for ring in 0..self.rings.len() {
            while let Some(front) = self.rings[ring].flights.front() {
                let ended = render.wait(front.submission, 0);
                if matches!(ended, Ok(false)) {
                    break;
                }
                let state = ended.as_ref().err().and_then(|_| render.context_state(self.context).ok());
                let ring = &mut self.rings[ring];
                let queued = ring.bytes;
                let Some(flight) = ring.flights.pop_front() else { break };
                ring.bytes -= flight.bytes;
                let failed = |error: rewake_amdgpu_uapi::Error| {
                    Error::Failed(Box::new(flight.fault(render.minor(), queued, error.errno(), state)))
                };
                on_end(flight.ticket, ended.map(drop).map_err(failed));
                self.end_uses(render, table, flight.bos)?;
            }
        }
        Ok(())
    }

    /// Waits until a submission has ended or failed, or until the monotonic clock shows `deadline` ns.
    /// Returns `None` if it is not in flight.
    pub(crate) fn wait(&self, render: &Render, ticket: Ticket, deadline: u64) -> Option<Result<(), Error>> {
        let (ring, flight) = self.rings.iter().find_map(|ring| {
            ring.flights.iter().find(|flight| flight.ticket == ticket).map(|flight| (ring, flight))
        })?;
        Some(match render.wait(flight.submission, deadline) {
            Ok(false) => {
                let state = render.context_state(self.context).ok();
                Err(Error::Late(Box::new(flight.fault(render.minor(), ring.bytes, None, state))))
            }
            // `poll` reports how it ended.
            Ok(true) | Err(_) => Ok(()),
        })
    }

    /// Ends the use of these BOs by a submission, and closes those that were released.
    fn end_uses(&mut self, render: &Render, table: &mut Table, mut bos: Vec<u32>) -> Result<(), Error> {
        let mut result = Ok(());
        for bo in bos.drain(..) {
            if let Some(entry) = table.end_use(bo) {
                let closed = self.close(render, &entry);
                result = result.and(closed);
            }
        }
        self.spare.push(bos);
        result
    }

    /// Unmaps a BO from the GPU's address space and closes its handle.
    pub(crate) fn close(&mut self, render: &Render, entry: &BoEntry) -> Result<(), Error> {
        let mut result = Ok(());
        if let Reach::Gpu(address) = entry.reach {
            let kernel = |source| Error::Kernel { minor: render.minor(), source };
            result = render.unmap_gpu(entry.handle, address, entry.size).map_err(kernel);
            // Addresses that are still mapped are not reused.
            if result.is_ok() {
                self.addresses.release(address, entry.size);
            }
        }
        let closed = close_handle(render, entry.handle);
        result.and(closed)
    }
}

impl Ring {
    fn new(render: &Render, number: u32) -> Result<Self, Error> {
        let failed = |source| Error::Drm { minor: render.minor(), call: "SYNCOBJ_CREATE", source };
        let timeline = render.create_syncobj(false).map_err(failed)?;
        Ok(Self { number, timeline, count: 0, flights: VecDeque::with_capacity(IN_FLIGHT), bytes: 0 })
    }

    fn submit(
        &mut self,
        render: &Render,
        context: u32,
        commands: (u64, u32),
        list: &[drm_amdgpu_bo_list_entry],
        event: Option<BorrowedFd<'_>>,
    ) -> Result<rewake_amdgpu_uapi::render::Submission, Error> {
        let minor = render.minor();
        let point = self.count + 1;
        if let Some(event) = event {
            // This precedes the submission: without it, the end would go unnoticed.
            let failed = |source| Error::Drm { minor, call: "SYNCOBJ_EVENTFD", source };
            render.syncobj_eventfd(self.timeline, point, event, false).map_err(failed)?;
        }
        let signal = [drm_amdgpu_cs_chunk_syncobj { handle: self.timeline.into(), flags: 0, point }];
        let parts = [SubmissionChunk::Buffers(list), SubmissionChunk::TimelineSignal(&signal)];
        let submission = render.submit(context, self.number, commands, &parts);
        let submission = submission.map_err(|source| Error::Kernel { minor, source })?;
        self.count = point;
        Ok(submission)
    }
}

impl Commands {
    fn new(render: &Render, addresses: &mut Addresses, rings: usize) -> Result<Self, Error> {
        let kernel = |source| Error::Kernel { minor: render.minor(), source };
        let size = COMMAND_BYTES * (rings * IN_FLIGHT) as u64;
        let flags = u64::from(AMDGPU_GEM_CREATE_CPU_ACCESS_REQUIRED);
        let handle = render.create(size, AMDGPU_GEM_DOMAIN_GTT, flags).map_err(kernel)?;
        let memory = render.map(handle, size).map_err(kernel)?;
        let address = map(render, addresses, handle, size)?;
        Ok(Self { handle, memory, address })
    }
}

impl StagingMap {
    fn new(render: &Render, addresses: &mut Addresses, staging: &Staging) -> Result<Self, Error> {
        let minor = render.minor();
        let (bytes, part_bytes) = (staging.bytes(), staging.part_bytes());
        let address = addresses.take(bytes).ok_or(Error::Addresses { minor, bytes })?;
        let mut parts = Vec::new();
        for part in 0..bytes.div_ceil(part_bytes) {
            let dmabuf = staging.dmabuf(part)?;
            let refused = |source| Error::Drm { minor, call: "PRIME_FD_TO_HANDLE of staging memory", source };
            let handle = render.prime_fd_to_buffer(dmabuf.as_fd()).map_err(refused)?.into();
            let at = part * part_bytes;
            let mapped = render.map_gpu(handle, address + at, part_bytes.min(bytes - at));
            mapped.map_err(|source| Error::Kernel { minor, source })?;
            parts.push(StagingPart { handle, stamp: 0 });
        }
        Ok(Self { address, part_bytes, parts })
    }

    /// Lists the parts that hold these bytes.
    fn list(&mut self, at: u64, bytes: u64, stamp: u64, list: &mut Vec<drm_amdgpu_bo_list_entry>) {
        for part in at / self.part_bytes..(at + bytes).div_ceil(self.part_bytes) {
            let part = &mut self.parts[usize::try_from(part).unwrap_or(usize::MAX)];
            if part.stamp != stamp {
                part.stamp = stamp;
                list.push(bo_list_entry(part.handle));
            }
        }
    }
}

/// Maps a BO at free addresses.
fn map(render: &Render, addresses: &mut Addresses, handle: u32, bytes: u64) -> Result<u64, Error> {
    let minor = render.minor();
    let address = addresses.take(bytes).ok_or(Error::Addresses { minor, bytes })?;
    if let Err(source) = render.map_gpu(handle, address, bytes) {
        addresses.release(address, bytes);
        return Err(Error::Kernel { minor, source });
    }
    Ok(address)
}

/// Closes a handle.
pub(crate) fn close_handle(render: &Render, handle: u32) -> Result<(), Error> {
    let failed = |source| Error::Drm { minor: render.minor(), call: "GEM_CLOSE", source };
    // The kernel never returns handle 0.
    let Some(handle) = drm::control::from_u32(handle) else { return Ok(()) };
    render.close_buffer(handle).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_that_a_transfer_crosses_is_listed_once() {
        let parts = [11, 12, 13, 14].map(|handle| StagingPart { handle, stamp: 0 });
        let mut staging = StagingMap { address: 0, part_bytes: 100, parts: parts.into() };
        let mut list = Vec::new();
        staging.list(150, 150, 1, &mut list);
        staging.list(100, 101, 1, &mut list);
        assert_eq!(list.iter().map(|entry| entry.bo_handle).collect::<Vec<_>>(), [12, 13]);
        staging.list(299, 2, 2, &mut list);
        assert_eq!(list.iter().map(|entry| entry.bo_handle).collect::<Vec<_>>(), [12, 13, 13, 14]);
    }
}
