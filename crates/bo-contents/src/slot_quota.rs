// SPDX-License-Identifier: MIT OR Apache-2.0
//! Limits the slots of staging memory that one GPU takes from others. While the disk is slow, GPUs are loaded
//! one after the other; while copies are slow, in parallel.

/// The slots that each GPU may have with any number of GPUs: two are read and one is copied.
const MIN_SLOTS: usize = 3;
/// Reads of 2 MiB that keep a disk busy.
const BUSY_DISK_READS: usize = 2;

/// The slots of a GPU, by state.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SlotUse {
    pub(crate) reading: usize,
    /// Read and not copied: the rings are full.
    pub(crate) read: usize,
    pub(crate) copying: usize,
}

/// The reason why a chunk that was not demanded waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backpressure {
    /// The GPU's copies are the limit. Other GPUs may start chunks.
    Copies,
    /// The GPU has all its slots, and the disk is the limit. Reads for other GPUs would only delay it.
    Disk,
}

/// Returns the slots of each of `gpus` GPUs that have chunks left. None: no other GPU needs any.
pub(crate) fn quota(slots: usize, gpus: usize) -> Option<usize> {
    (gpus > 1).then(|| (slots / gpus).max(MIN_SLOTS))
}

/// Returns the reason to wait, or `None` if the GPU may take a slot.
pub(crate) fn backpressure(quota: usize, usage: SlotUse) -> Option<Backpressure> {
    let SlotUse { reading, read, copying } = usage;
    if reading + read + copying < quota {
        None
    } else if read == 0 && reading >= BUSY_DISK_READS {
        Some(Backpressure::Disk)
    } else {
        Some(Backpressure::Copies)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(reading: usize, read: usize, copying: usize) -> SlotUse {
        SlotUse { reading, read, copying }
    }

    #[test]
    fn one_gpu_alone_has_no_quota() {
        assert_eq!(quota(24, 1), None);
        assert_eq!(quota(24, 0), None);
    }

    #[test]
    fn each_gpu_has_slots_for_reads_and_a_copy() {
        assert_eq!([2, 3, 8, 16, 64].map(|gpus| quota(24, gpus)), [12, 8, 3, 3, 3].map(Some));
    }

    #[test]
    fn a_slow_disk_serves_one_gpu_at_a_time() {
        assert_eq!(backpressure(8, of(5, 0, 1)), None);
        for usage in [of(8, 0, 0), of(6, 0, 2)] {
            assert_eq!(backpressure(8, usage), Some(Backpressure::Disk));
        }
    }

    #[test]
    fn slow_copies_of_one_gpu_let_others_read() {
        for usage in [of(0, 6, 2), of(3, 3, 2), of(0, 0, 8), of(1, 0, 7)] {
            assert_eq!(backpressure(8, usage), Some(Backpressure::Copies));
        }
        // With more rings than slots, every slot that was read is copied.
        assert_eq!(backpressure(3, of(0, 0, 3)), Some(Backpressure::Copies));
        assert_eq!(backpressure(3, of(1, 0, 2)), Some(Backpressure::Copies), "one chunk keeps no disk busy");
    }
}
