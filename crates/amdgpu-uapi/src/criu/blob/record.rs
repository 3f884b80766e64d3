// SPDX-License-Identifier: MIT OR Apache-2.0
//! The records of private data: the named fields of the kernel's structs, and all other bytes unchanged.

use crate::Error;

/// Bytes for each buffer.
pub const BO: usize = 272;
/// Bytes of a queue before its MQD and control stack.
pub const QUEUE: usize = 120;
/// Bytes of an event.
pub const EVENT: usize = 64;
/// Bytes of a range before its attributes.
pub const RANGE: usize = 24;
/// The most GPUs that a buffer can be mapped on.
pub const GPUS: usize = 64;
/// The offset of their list in a buffer's record.
const MAPPED: usize = 12;

/// A little-endian number in a record that is long enough for it.
trait Number: Sized {
    const LENGTH: usize;
    fn get(record: &[u8], at: usize) -> Self;
    fn put(self, record: &mut [u8], at: usize);
}

macro_rules! numbers {
    ($($number:ty),*) => { $(
        impl Number for $number {
            const LENGTH: usize = size_of::<$number>();

            fn get(record: &[u8], at: usize) -> Self {
                let bytes = record.get(at..at + Self::LENGTH).and_then(|bytes| bytes.try_into().ok());
                Self::from_le_bytes(bytes.unwrap_or_default())
            }

            fn put(self, record: &mut [u8], at: usize) {
                if let Some(bytes) = record.get_mut(at..at + Self::LENGTH) {
                    bytes.copy_from_slice(&self.to_le_bytes());
                }
            }
        }
    )* };
}
numbers!(u32, u64);

/// Declares a struct of a record's named numbers, read and written by one table. `rest` is the whole record
/// with zeros for the named numbers, so reserved words, padding and other kernel bytes are kept.
macro_rules! record {
    ($(#[$meta:meta])* $name:ident[$length:ident] {
        $($(#[$doc:meta])* $field:ident: $type:ty = $at:literal,)*
    } $(followed by { $($part:ident: $part_type:ty),* $(,)? })?) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct $name {
            $($(#[$doc])* pub $field: $type,)*
            rest: [u8; $length],
            $($($part: $part_type,)*)?
        }

        impl $name {
            pub(super) fn read(record: &[u8; $length] $($(, $part: $part_type)*)?) -> Self {
                let mut rest = *record;
                $(rest[$at..$at + <$type as Number>::LENGTH].fill(0);)*
                Self { $($field: <$type>::get(record, $at),)* rest, $($($part,)*)? }
            }

            fn record(&self) -> [u8; $length] {
                let mut record = self.rest;
                $(self.$field.put(&mut record, $at);)*
                record
            }
        }
    };
}

record! {
    /// A buffer's private data, besides its bucket (`struct kfd_criu_bo_priv_data`).
    Bo[BO] {
        /// The address of a userptr buffer's memory.
        user_address: u64 = 0,
        /// The number in the process, for a GPU.
        idr_handle: u32 = 8,
    }
}

record! {
    /// A queue (`struct kfd_criu_queue_priv_data`).
    Queue[QUEUE] {
        /// The address of the ring.
        ring: u64 = 8,
        /// Bytes of the ring.
        ring_size: u64 = 16,
        /// The address of the read pointer.
        read_pointer: u64 = 24,
        /// The address of the write pointer.
        write_pointer: u64 = 32,
        /// The offset in the process's doorbells, as the kernel returns it.
        doorbell_offset: u64 = 40,
        /// The address of the end-of-pipe buffer.
        end_of_pipe: u64 = 48,
        /// The address of the save area.
        save_area: u64 = 56,
        /// The GPU's number in the image.
        gpu: u32 = 64,
        /// `KFD_IOC_QUEUE_TYPE_*` at its creation.
        kind: u32 = 68,
        /// PM4 or AQL.
        format: u32 = 72,
        /// The number in the process.
        id: u32 = 76,
        /// 0 to 15.
        priority: u32 = 80,
        /// The share of time, 0 to 100; a queue at 0 is restored and does not run.
        percent: u32 = 84,
        /// The doorbell.
        doorbell: u32 = 88,
        /// Global wave sync resources.
        gws: u32 = 92,
        /// The copy engine and slot.
        sdma: u32 = 96,
        /// Bytes of the end-of-pipe buffer.
        end_of_pipe_size: u32 = 100,
        /// Bytes of the save area, without the debugger's.
        save_area_size: u32 = 104,
    } followed by { mqd: Vec<u8>, control_stack: Vec<u8> }
}

record! {
    /// An event (`struct kfd_criu_event_priv_data`).
    Event[EVENT] {
        /// The buffer of the page of slots in the first event; 0 in others.
        page: u64 = 8,
        /// The number in the process.
        id: u32 = 16,
        /// Not 0: a wait resets the signal.
        auto_reset: u32 = 20,
        /// `KFD_IOC_EVENT_*`.
        kind: u32 = 24,
        /// Not 0: the event is signalled.
        signalled: u32 = 28,
    }
}

record! {
    /// A range of shared memory (`struct kfd_criu_svm_range_priv_data`).
    Range[RANGE] {
        /// The first page.
        page: u64 = 8,
        /// The number of pages.
        pages: u64 = 16,
    } followed by { attributes: Vec<(u32, u32)> }
}

impl Bo {
    /// Returns the GPUs that it is mapped on, by their numbers in the image.
    #[must_use]
    pub fn mapped(&self) -> Vec<u32> {
        let words = (0..GPUS).map(|index| u32::get(&self.rest, MAPPED + index * 4));
        words.take_while(|gpu| *gpu != 0).collect()
    }

    /// Sets the GPUs that it is mapped on. Bytes after the end of the list are kept.
    ///
    /// # Errors
    /// [`Error::Blob`]: more than [`GPUS`], or 0, which ends the list.
    pub fn set_mapped(&mut self, gpus: &[u32]) -> Result<(), Error> {
        if gpus.len() > GPUS || gpus.contains(&0) {
            let reason =
                format!("a buffer can be mapped on {GPUS} GPUs with numbers other than 0, not on {gpus:?}");
            return Err(Error::Blob { length: BO, reason });
        }
        let before = self.mapped().len();
        let ended = gpus.iter().copied().chain(std::iter::repeat(0));
        for (index, gpu) in ended.take(before.max(gpus.len() + 1).min(GPUS)).enumerate() {
            gpu.put(&mut self.rest, MAPPED + index * 4);
        }
        Ok(())
    }

    pub(super) fn write(&self, to: &mut Vec<u8>) {
        to.extend(self.record());
    }
}

impl Queue {
    /// Returns the bytes of the control stack and of the MQD in a queue's record.
    pub(super) fn lengths(record: &[u8; QUEUE]) -> (u32, u32) {
        (u32::get(record, 108), u32::get(record, 112))
    }

    /// Returns the saved hardware state of every XCC, one after the other.
    #[must_use]
    pub fn mqd(&self) -> &[u8] {
        &self.mqd
    }

    /// Returns the control stack.
    #[must_use]
    pub fn control_stack(&self) -> &[u8] {
        &self.control_stack
    }

    pub(super) fn write(&self, to: &mut Vec<u8>) {
        to.extend(self.record());
        to.extend(&self.mqd);
        to.extend(&self.control_stack);
    }
}

impl Event {
    pub(super) fn write(&self, to: &mut Vec<u8>) {
        to.extend(self.record());
    }
}

impl Range {
    /// Returns `KFD_IOCTL_SVM_ATTR_*` and their values.
    #[must_use]
    pub fn attributes(&self) -> &[(u32, u32)] {
        &self.attributes
    }

    pub(super) fn write(&self, to: &mut Vec<u8>) {
        to.extend(self.record());
        for (kind, value) in &self.attributes {
            to.extend(kind.to_le_bytes());
            to.extend(value.to_le_bytes());
        }
    }
}
