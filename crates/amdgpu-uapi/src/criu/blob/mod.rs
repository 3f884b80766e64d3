// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel's private checkpoint data, version 1: `struct kfd_criu_*_priv_data` of `kfd_priv.h`, the same
//! in Linux 6.12 and 7.2, on x86-64. It is read with bounds, whatever an image contains, and written back
//! byte for byte.
//!
//! ```
//! # fn main() -> Result<(), rewake_amdgpu_uapi::Error> {
//! # let bytes = [1, 0, 0, 0, 0, 0, 0, 0];
//! # let (gpus, buffers, objects) = (0, 0, 0);
//! use rewake_amdgpu_uapi::criu::blob::Private;
//! let mut private = Private::read(&bytes, gpus, buffers, objects)?;
//! assert_eq!(private.write(), bytes);
//! for queue in private.queues_mut() {
//!     queue.percent = 0;
//! }
//! # Ok(())
//! # }
//! ```

mod record;

use std::ops;

pub use record::{BO, Bo, EVENT, Event, GPUS, QUEUE, Queue, RANGE, Range};

use crate::Error;
use crate::abi::KFD_IOC_ALLOC_MEM_FLAGS_USERPTR;
use crate::abi::memory::PAGE;

/// Bytes of the part about the process, which is first.
pub const PROCESS: usize = 8;
/// Bytes of the part for each GPU, which precedes the buffers.
pub const DEVICE: usize = 8;
/// The only version so far.
const VERSION: u32 = 1;
/// Attributes of a range, besides one for each GPU.
const ATTRIBUTES: usize = 4;

/// All private data. The kernel also counts buffers and objects elsewhere: a caller that removes a buffer
/// removes its bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Private {
    /// The kernel's word for XNACK: whether GPU page faults are retried.
    pub xnack_mode: u32,
    devices: Vec<[u8; DEVICE]>,
    bos: Vec<Bo>,
    objects: Vec<Object>,
}

/// An object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Object {
    /// A queue.
    Queue(Box<Queue>),
    /// An event.
    Event(Event),
    /// A range of shared memory.
    Range(Range),
}

impl Private {
    /// Parses private data of this number of GPUs, buffers and objects, to its last byte.
    ///
    /// # Errors
    /// [`Error::Blob`]: it has a wrong length or another version, or an unknown object.
    pub fn read(bytes: &[u8], devices: usize, bos: usize, objects: usize) -> Result<Self, Error> {
        let mut reader = BlobReader { bytes, at: 0 };
        let version = reader.word()?;
        if version != VERSION {
            return Err(reader.wrong(&format!("version {version}, expected {VERSION}")));
        }
        let xnack_mode = reader.word()?;
        // A count from an image allocates no memory before its bytes are read.
        let mut read = Self { xnack_mode, devices: Vec::new(), bos: Vec::new(), objects: Vec::new() };
        for _ in 0..devices {
            read.devices.push(*reader.record()?);
        }
        for _ in 0..bos {
            read.bos.push(Bo::read(reader.record()?));
        }
        for _ in 0..objects {
            read.objects.push(reader.object(devices)?);
        }
        match bytes.len() - reader.at {
            0 => Ok(read),
            more => Err(reader.wrong(&format!("{more} bytes after the last object"))),
        }
    }

    /// Returns the bytes, with the current fields.
    #[must_use]
    pub fn write(&self) -> Vec<u8> {
        let mut to = Vec::new();
        to.extend(VERSION.to_le_bytes());
        to.extend(self.xnack_mode.to_le_bytes());
        to.extend(self.devices.as_flattened());
        for bo in &self.bos {
            bo.write(&mut to);
        }
        for object in &self.objects {
            match object {
                Object::Queue(queue) => queue.write(&mut to),
                Object::Event(event) => event.write(&mut to),
                Object::Range(range) => range.write(&mut to),
            }
        }
        to
    }

    /// Returns the buffers, in the order of the buckets.
    #[must_use]
    pub fn bos(&self) -> &[Bo] {
        &self.bos
    }

    /// As [`Self::bos`], mutable.
    pub fn bos_mut(&mut self) -> &mut [Bo] {
        &mut self.bos
    }

    /// Removes the buffers whose index `keep` rejects.
    pub fn retain_bos(&mut self, mut keep: impl FnMut(usize) -> bool) {
        let mut index = 0..;
        self.bos.retain(|_| index.next().is_some_and(&mut keep));
    }

    /// Returns the objects, in the kernel's order.
    #[must_use]
    pub fn objects(&self) -> &[Object] {
        &self.objects
    }

    /// Returns the queues.
    pub fn queues(&self) -> impl Iterator<Item = &Queue> {
        self.objects.iter().filter_map(|object| match object {
            Object::Queue(queue) => Some(&**queue),
            _ => None,
        })
    }

    /// Returns the queues, mutable.
    pub fn queues_mut(&mut self) -> impl Iterator<Item = &mut Queue> {
        self.objects.iter_mut().filter_map(|object| match object {
            Object::Queue(queue) => Some(&mut **queue),
            _ => None,
        })
    }

    /// Returns the events.
    pub fn events(&self) -> impl Iterator<Item = &Event> {
        self.objects.iter().filter_map(|object| match object {
            Object::Event(event) => Some(event),
            _ => None,
        })
    }

    /// Returns the CPU memory that is registered with GPUs (userptr and SVM), as sorted, disjoint byte
    /// ranges. The driver accesses its pages when queues are resumed. `buffers` has flags
    /// (`KFD_IOC_ALLOC_MEM_FLAGS_*`) and sizes in bytes, in the order of the buckets.
    #[must_use]
    pub fn registered(&self, buffers: impl Iterator<Item = (u32, u64)>) -> Vec<ops::Range<u64>> {
        let userptrs =
            buffers.zip(&self.bos).filter(|((flags, _), _)| flags & KFD_IOC_ALLOC_MEM_FLAGS_USERPTR != 0);
        let userptrs = userptrs.map(|((_, size), bo)| bo.user_address..bo.user_address.saturating_add(size));
        let shared = self.ranges().map(|range| {
            let start = range.page.saturating_mul(PAGE);
            start..start.saturating_add(range.pages.saturating_mul(PAGE))
        });
        let mut all: Vec<ops::Range<u64>> = userptrs.chain(shared).collect();
        all.sort_by_key(|range| range.start);
        all.dedup_by(|next, before| {
            let overlaps = next.start <= before.end;
            before.end = if overlaps { before.end.max(next.end) } else { before.end };
            overlaps
        });
        all
    }

    /// Returns the ranges of shared memory.
    pub fn ranges(&self) -> impl Iterator<Item = &Range> {
        self.objects.iter().filter_map(|object| match object {
            Object::Range(range) => Some(range),
            _ => None,
        })
    }
}

struct BlobReader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> BlobReader<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], Error> {
        let taken = self.bytes.get(self.at..).and_then(|left| left.get(..length));
        let taken = taken.ok_or_else(|| self.wrong(&format!("{length} bytes expected")))?;
        self.at += length;
        Ok(taken)
    }

    fn record<const LENGTH: usize>(&mut self) -> Result<&'a [u8; LENGTH], Error> {
        let left = self.bytes.get(self.at..).and_then(|left| left.first_chunk());
        let record = left.ok_or_else(|| self.wrong(&format!("{LENGTH} bytes expected")))?;
        self.at += LENGTH;
        Ok(record)
    }

    fn word(&mut self) -> Result<u32, Error> {
        self.record().copied().map(u32::from_le_bytes)
    }

    fn object(&mut self, devices: usize) -> Result<Object, Error> {
        let start = self.at;
        let kind = self.word()?;
        // The kind is the first word of the object's record.
        self.at = start;
        match kind {
            0 => self.queue().map(Box::new).map(Object::Queue),
            1 => Ok(Object::Event(Event::read(self.record()?))),
            2 => self.range(devices).map(Object::Range),
            other => Err(self.wrong(&format!("object of kind {other}, expected 0, 1 or 2"))),
        }
    }

    fn queue(&mut self) -> Result<Queue, Error> {
        let record = self.record()?;
        let (control_stack, mqd) = Queue::lengths(record);
        let mqd = self.take(mqd as usize)?.to_vec();
        let control_stack = self.take(control_stack as usize)?.to_vec();
        Ok(Queue::read(record, mqd, control_stack))
    }

    fn range(&mut self, devices: usize) -> Result<Range, Error> {
        let record = self.record()?;
        let mut attributes = Vec::new();
        for _ in 0..devices.saturating_add(ATTRIBUTES) {
            attributes.push((self.word()?, self.word()?));
        }
        Ok(Range::read(record, attributes))
    }

    fn wrong(&self, what: &str) -> Error {
        Error::Blob { length: self.bytes.len(), reason: format!("at {:#x}: {what}", self.at) }
    }
}
