// SPDX-License-Identifier: MIT OR Apache-2.0
//! Chunks that are read straight into their buffers, without staging memory between: what the page cache has, where the CPU copies.

use crate::chunk_schedule::Chunk;

/// At once: one for each of the threads that the kernel has for it.
const PLACES: usize = 8;

/// Those under way.
#[derive(Debug, Default)]
pub(crate) struct Straight {
    /// Each with its reads that have not ended.
    places: [Option<(Chunk, usize)>; PLACES],
    /// And those of which all have.
    ended: Vec<Chunk>,
}

impl Straight {
    /// A place for one more; None while all are taken.
    pub(crate) fn place(&self) -> Option<usize> {
        self.places.iter().position(Option::is_none)
    }

    /// One is begun, of so many reads, at a free place.
    pub(crate) fn begins(&mut self, place: usize, chunk: Chunk, reads: usize) {
        self.places[place] = Some((chunk, reads));
    }

    /// One of the reads at a place has ended.
    pub(crate) fn was_read(&mut self, place: usize) {
        let Some((chunk, left)) = &mut self.places[place] else { return };
        *left -= 1;
        if *left == 0 {
            self.ended.push(*chunk);
            self.places[place] = None;
        }
    }

    /// Those that have ended, each once.
    pub(crate) fn ended(&mut self) -> impl Iterator<Item = Chunk> + '_ {
        self.ended.drain(..)
    }

    /// Whether none is under way, or to be told of.
    pub(crate) fn is_idle(&self) -> bool {
        self.ended.is_empty() && self.places.iter().all(Option::is_none)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_has_ended_when_all_of_its_reads_have() {
        let mut straight = Straight::default();
        let chunk = |number| Chunk { file: 0, number };
        straight.begins(0, chunk(5), 2);
        let second = straight.place().unwrap();
        straight.begins(second, chunk(6), 1);
        straight.was_read(0);
        assert_eq!(straight.ended().count(), 0);
        straight.was_read(second);
        assert!(!straight.is_idle());
        assert_eq!(straight.ended().collect::<Vec<_>>(), [chunk(6)]);
        straight.was_read(0);
        assert!(!straight.is_idle(), "to be told of");
        assert_eq!(straight.ended().collect::<Vec<_>>(), [chunk(5)]);
        assert!(straight.is_idle());
    }

    #[test]
    fn no_more_are_under_way_than_there_are_places() {
        let mut straight = Straight::default();
        for number in 0..PLACES as u64 {
            straight.begins(straight.place().unwrap(), Chunk { file: 0, number }, 1);
        }
        assert_eq!(straight.place(), None);
        straight.was_read(3);
        assert_eq!(straight.place(), Some(3));
    }
}
