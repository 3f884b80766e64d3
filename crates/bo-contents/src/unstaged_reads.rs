// SPDX-License-Identifier: MIT OR Apache-2.0
//! Chunks that are read from the page cache into their buffers, without staging memory, where the CPU copies.

use crate::chunk_schedule::Chunk;

/// The most chunks in flight: one for each thread that the kernel has for such reads.
const MAX_CHUNKS: usize = 8;

/// Unstaged reads in flight.
#[derive(Debug, Default)]
pub(crate) struct UnstagedReads {
    /// Each chunk in flight, with its number of reads in flight.
    places: [Option<(Chunk, usize)>; MAX_CHUNKS],
    /// Chunks whose reads have all ended.
    ended: Vec<Chunk>,
}

impl UnstagedReads {
    /// Returns a free place, or None while all are in use.
    pub(crate) fn place(&self) -> Option<usize> {
        self.places.iter().position(Option::is_none)
    }

    /// Starts a chunk with so many reads at a free place.
    pub(crate) fn start(&mut self, place: usize, chunk: Chunk, reads: usize) {
        self.places[place] = Some((chunk, reads));
    }

    /// Counts a read of a place that has ended.
    pub(crate) fn read_ended(&mut self, place: usize) {
        let Some((chunk, left)) = &mut self.places[place] else { return };
        *left -= 1;
        if *left == 0 {
            self.ended.push(*chunk);
            self.places[place] = None;
        }
    }

    /// Takes the chunks that have ended, each once.
    pub(crate) fn take_ended(&mut self) -> impl Iterator<Item = Chunk> + '_ {
        self.ended.drain(..)
    }

    /// Returns whether no chunk is in flight or waits to be taken.
    pub(crate) fn is_idle(&self) -> bool {
        self.ended.is_empty() && self.places.iter().all(Option::is_none)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_has_ended_when_all_of_its_reads_have() {
        let mut unstaged = UnstagedReads::default();
        let chunk = |number| Chunk { file: 0, number };
        unstaged.start(0, chunk(5), 2);
        let second = unstaged.place().unwrap();
        unstaged.start(second, chunk(6), 1);
        unstaged.read_ended(0);
        assert_eq!(unstaged.take_ended().count(), 0);
        unstaged.read_ended(second);
        assert!(!unstaged.is_idle());
        assert_eq!(unstaged.take_ended().collect::<Vec<_>>(), [chunk(6)]);
        unstaged.read_ended(0);
        assert!(!unstaged.is_idle(), "the chunk was not taken yet");
        assert_eq!(unstaged.take_ended().collect::<Vec<_>>(), [chunk(5)]);
        assert!(unstaged.is_idle());
    }

    #[test]
    fn no_more_chunks_are_in_flight_than_places() {
        let mut unstaged = UnstagedReads::default();
        for number in 0..MAX_CHUNKS as u64 {
            unstaged.start(unstaged.place().unwrap(), Chunk { file: 0, number }, 1);
        }
        assert_eq!(unstaged.place(), None);
        unstaged.read_ended(3);
        assert_eq!(unstaged.place(), Some(3));
    }
}
