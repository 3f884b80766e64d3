// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel's private checkpoint data, version 1 (`struct kfd_criu_*_priv_data` of `kfd_priv.h`, the same in Linux
//! 6.12 and 7.2, on x86-64): read with bounds, whatever an image holds.

use crate::Error;

/// Bytes of the parts before the objects.
pub const PROCESS: usize = 8;
/// For each GPU.
pub const DEVICE: usize = 8;
/// For each buffer.
pub const BO: usize = 272;
/// Of an event, and of a queue and a range before what follows them.
pub const EVENT: usize = 64;
/// Before its MQD and control stack.
pub const QUEUE: usize = 120;
/// Before its attributes.
pub const RANGE: usize = 24;
/// GPUs that a buffer can be mapped on.
const GPUS: usize = 64;
/// Attributes of a range besides one for each GPU.
const ATTRIBUTES: usize = 4;

/// All of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Private {
    /// Whether GPU page faults are retried; the kernel's word.
    pub xnack_mode: u32,
    /// In the order of the buckets.
    pub bos: Vec<Bo>,
    /// In the kernel's order.
    pub objects: Vec<Object>,
}

/// What a buffer has beside its bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bo {
    /// Where a userptr buffer's memory is.
    pub user_address: u64,
    /// Its number in the process, for a GPU.
    pub idr_handle: u32,
    /// GPUs that have it mapped.
    pub mapped: Vec<u32>,
}

/// One object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Object {
    /// A queue.
    Queue(Box<Queue>),
    /// An event.
    Event(Event),
    /// A range of shared memory.
    Range(Range),
}

/// A queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Queue {
    /// Ring, read pointer, write pointer, doorbell, end of pipe, save area: addresses.
    pub ring: u64,
    /// Bytes.
    pub ring_size: u64,
    /// Address of the read pointer.
    pub read_pointer: u64,
    /// Address of the write pointer.
    pub write_pointer: u64,
    /// Address of the end-of-pipe buffer.
    pub end_of_pipe: u64,
    /// Address of the save area.
    pub save_area: u64,
    /// GPU, by the number in the image.
    pub gpu: u32,
    /// `KFD_IOC_QUEUE_TYPE_*` after creation.
    pub kind: u32,
    /// PM4 or AQL.
    pub format: u32,
    /// The process's number for it.
    pub id: u32,
    /// 0 to 15.
    pub priority: u32,
    /// 0 to 100.
    pub percent: u32,
    /// Its doorbell.
    pub doorbell: u32,
    /// Its copy engine and slot.
    pub sdma: u32,
    /// Bytes of the save area, without the debugger's.
    pub save_area_size: u32,
    /// Hardware state, kept in the kernel.
    pub mqd: Vec<u8>,
    /// Control stack.
    pub control_stack: Vec<u8>,
}

/// An event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The buffer of the page of slots, on the first event; 0 on others.
    pub page: u64,
    /// The process's number for it.
    pub id: u32,
    /// Whether a wait takes the signal back.
    pub auto_reset: bool,
    /// `KFD_IOC_EVENT_*`.
    pub kind: u32,
    /// Whether it is signalled.
    pub signalled: bool,
}

/// A range of shared memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Range {
    /// First page.
    pub page: u64,
    /// Pages.
    pub pages: u64,
    /// `KFD_IOCTL_SVM_ATTR_*` and values.
    pub attributes: Vec<(u32, u32)>,
}

impl Private {
    /// Reads private data of so many GPUs, buffers and objects, to its last byte.
    ///
    /// # Errors
    /// [`Error::Blob`]: it ends early or late, is of another version, or has an unknown object.
    pub fn read(bytes: &[u8], devices: usize, bos: usize, objects: usize) -> Result<Self, Error> {
        let mut reader = Reader { bytes, at: 0 };
        let process = reader.take(PROCESS)?;
        let version = word(process, 0);
        if version != 1 {
            return Err(reader.wrong(&format!("version {version}, expected 1")));
        }
        reader.take(devices.checked_mul(DEVICE).ok_or_else(|| reader.wrong("too many GPUs"))?)?;
        // A count from an image asks for no memory before its bytes have been seen.
        let mut list = Vec::new();
        for _ in 0..bos {
            list.push(bo(reader.take(BO)?));
        }
        let mut found = Vec::new();
        for _ in 0..objects {
            found.push(reader.object(devices)?);
        }
        if reader.at != bytes.len() {
            return Err(reader.wrong(&format!("{} bytes after the last object", bytes.len() - reader.at)));
        }
        Ok(Self { xnack_mode: word(process, 4), bos: list, objects: found })
    }

    /// Its queues.
    pub fn queues(&self) -> impl Iterator<Item = &Queue> {
        self.objects.iter().filter_map(|object| match object {
            Object::Queue(queue) => Some(&**queue),
            _ => None,
        })
    }

    /// Its events.
    pub fn events(&self) -> impl Iterator<Item = &Event> {
        self.objects.iter().filter_map(|object| match object {
            Object::Event(event) => Some(event),
            _ => None,
        })
    }

    /// Its ranges of shared memory.
    pub fn ranges(&self) -> impl Iterator<Item = &Range> {
        self.objects.iter().filter_map(|object| match object {
            Object::Range(range) => Some(range),
            _ => None,
        })
    }
}

fn bo(record: &[u8]) -> Bo {
    let gpus = (0..GPUS).map(|index| word(record, 12 + index * 4));
    Bo {
        user_address: long(record, 0),
        idr_handle: word(record, 8),
        mapped: gpus.take_while(|gpu| *gpu != 0).collect(),
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], Error> {
        let taken = self.peek(length)?;
        self.at += length;
        Ok(taken)
    }

    fn peek(&self, length: usize) -> Result<&'a [u8], Error> {
        let end = self.at.checked_add(length);
        let taken = end.and_then(|end| self.bytes.get(self.at..end));
        taken.ok_or_else(|| self.wrong(&format!("{length} bytes expected")))
    }

    fn object(&mut self, devices: usize) -> Result<Object, Error> {
        match word(self.peek(4)?, 0) {
            0 => self.queue().map(Box::new).map(Object::Queue),
            1 => Ok(Object::Event(event(self.take(EVENT)?))),
            2 => self.range(devices).map(Object::Range),
            other => Err(self.wrong(&format!("object of kind {other}, expected 0, 1 or 2"))),
        }
    }

    fn queue(&mut self) -> Result<Queue, Error> {
        let record = self.take(QUEUE)?;
        let mqd = self.take(word(record, 112) as usize)?.to_vec();
        let control_stack = self.take(word(record, 108) as usize)?.to_vec();
        Ok(Queue {
            ring: long(record, 8),
            ring_size: long(record, 16),
            read_pointer: long(record, 24),
            write_pointer: long(record, 32),
            end_of_pipe: long(record, 48),
            save_area: long(record, 56),
            gpu: word(record, 64),
            kind: word(record, 68),
            format: word(record, 72),
            id: word(record, 76),
            priority: word(record, 80),
            percent: word(record, 84),
            doorbell: word(record, 88),
            sdma: word(record, 96),
            save_area_size: word(record, 104),
            mqd,
            control_stack,
        })
    }

    fn range(&mut self, devices: usize) -> Result<Range, Error> {
        let record = self.take(RANGE)?;
        let count = devices.checked_add(ATTRIBUTES).and_then(|count| count.checked_mul(8));
        let attributes = self.take(count.ok_or_else(|| self.wrong("too many GPUs"))?)?;
        Ok(Range {
            page: long(record, 8),
            pages: long(record, 16),
            attributes: attributes.chunks_exact(8).map(|pair| (word(pair, 0), word(pair, 4))).collect(),
        })
    }

    fn wrong(&self, what: &str) -> Error {
        Error::Blob { length: self.bytes.len(), reason: format!("at {:#x}: {what}", self.at) }
    }
}

fn event(record: &[u8]) -> Event {
    Event {
        page: long(record, 8),
        id: word(record, 16),
        auto_reset: word(record, 20) != 0,
        kind: word(record, 24),
        signalled: word(record, 28) != 0,
    }
}

/// The word at `at` of a record that was taken whole.
fn word(record: &[u8], at: usize) -> u32 {
    let bytes = record.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
    u32::from_le_bytes(bytes.unwrap_or_default())
}

fn long(record: &[u8], at: usize) -> u64 {
    u64::from(word(record, at)) | u64::from(word(record, at + 4)) << 32
}
