// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which GPU gets the next slot of staging memory, where several need some: one after the other as long as the disk is what they wait for, and all
//! of them as far as their copies are.

/// Slots that each GPU may have, however many GPUs there are: two are read and one is copied.
const LEAST: usize = 3;
/// Chunks of 2 MiB that keep a disk busy.
const BUSY: usize = 2;

/// Slots of a GPU, by what happens to them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SlotUse {
    pub(crate) reading: usize,
    /// And not copied yet: the rings have enough.
    pub(crate) read: usize,
    pub(crate) copying: usize,
}

/// What a chunk that nobody has demanded waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backpressure {
    /// Its GPU copies as fast as it can; others may go on.
    ForCopies,
    /// Its GPU has as many slots as it may have, and others would only share the disk: all would be there later.
    ForTheDisk,
}

/// Of so many slots, for so many GPUs that have something left. None: nobody else needs any.
pub(crate) fn quota(slots: usize, gpus: usize) -> Option<usize> {
    (gpus > 1).then(|| (slots / gpus).max(LEAST))
}

/// None: the GPU may take one more.
pub(crate) fn backpressure(share: usize, taken: SlotUse) -> Option<Backpressure> {
    let SlotUse { reading, read, copying } = taken;
    if reading + read + copying < share {
        None
    } else if read == 0 && reading >= BUSY {
        Some(Backpressure::ForTheDisk)
    } else {
        Some(Backpressure::ForCopies)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(reading: usize, read: usize, copying: usize) -> SlotUse {
        SlotUse { reading, read, copying }
    }

    #[test]
    fn who_is_alone_may_have_all() {
        assert_eq!(quota(24, 1), None);
        assert_eq!(quota(24, 0), None);
    }

    #[test]
    fn each_of_many_can_be_read_for_while_it_copies() {
        assert_eq!([2, 3, 8, 16, 64].map(|gpus| quota(24, gpus)), [12, 8, 3, 3, 3].map(Some));
    }

    #[test]
    fn where_the_disk_is_slow_the_first_has_it_alone() {
        assert_eq!(backpressure(8, of(5, 0, 1)), None);
        for taken in [of(8, 0, 0), of(6, 0, 2)] {
            assert_eq!(backpressure(8, taken), Some(Backpressure::ForTheDisk));
        }
    }

    #[test]
    fn where_copies_are_slow_others_go_on() {
        for taken in [of(0, 6, 2), of(3, 3, 2), of(0, 0, 8), of(1, 0, 7)] {
            assert_eq!(backpressure(8, taken), Some(Backpressure::ForCopies));
        }
        // More rings than slots: nothing is ever there that is not copied.
        assert_eq!(backpressure(3, of(0, 0, 3)), Some(Backpressure::ForCopies));
        assert_eq!(
            backpressure(3, of(1, 0, 2)),
            Some(Backpressure::ForCopies),
            "one chunk keeps no disk busy"
        );
    }
}
