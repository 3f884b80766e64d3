// SPDX-License-Identifier: MIT OR Apache-2.0
//! The blocks of a tree that runs, in a random order.
//!
//! A program often writes its memory from the first address to the last. In the order of addresses, a round that
//! overtakes such a program sends in vain all that is written afterwards; one that follows it, nothing. In a random order
//! it is half of what is written during the round, wherever the program begins.

use std::hash::{BuildHasher as _, RandomState};

use rewake_migration::blocks::{BlockAnswer, BlockPlace, SourceBlocks};

use crate::tree_memory::{TaskMemory, digest, private_memory};

/// Blocks of 1 MiB of addresses stay together: memory in swap is read in larger pieces.
const TOGETHER: u32 = 20;
/// Blocks that are read again to learn how much has changed.
const SAMPLE: usize = 128;

/// The blocks of a tree that have private pages.
#[derive(Debug)]
pub(crate) struct TreeBlocks {
    tasks: Vec<TaskMemory>,
    /// The index of a task, and an address.
    places: Vec<(usize, u64)>,
}

impl TreeBlocks {
    /// Lists the blocks of these processes. One that has ended has none. The order is that of all lists with this state.
    pub(crate) fn of(processes: &[i32], order: &RandomState) -> Self {
        let mut found = Self { tasks: Vec::new(), places: Vec::new() };
        for pid in processes {
            let (Ok(task), Ok(ranges)) = (TaskMemory::open(*pid), private_memory(*pid)) else { continue };
            let blocks = ranges.into_iter().flat_map(|range| task.private_blocks(range));
            found.places.extend(blocks.map(|vaddr| (found.tasks.len(), vaddr)));
            found.tasks.push(task);
        }
        found.places.sort_by_cached_key(|(task, vaddr)| order.hash_one((task, vaddr >> TOGETHER)));
        found
    }

    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    /// The blocks with their tasks.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&TaskMemory, u64)> {
        self.places.iter().map(|(task, vaddr)| (&self.tasks[*task], *vaddr))
    }

    /// Which share of all candidates has changed since it was sent: a sample of them is read again.
    pub(crate) fn changed_share(&self, sent: &SourceBlocks) -> f64 {
        // The first blocks of the list were sent in the first round.
        let first = &self.places[..sent.len().min(self.len())];
        let (mut read, mut changed) = (0_u32, 0_u32);
        for (task, vaddr) in first.iter().step_by(first.len().div_ceil(SAMPLE).max(1)) {
            let task = &self.tasks[*task];
            let place = BlockPlace { task: task.number, vaddr: *vaddr };
            if !sent.has_candidate(place) {
                continue;
            }
            let is_right = |bytes: &[u8]| sent.answer(place, digest(bytes)) == BlockAnswer::Digest;
            let has_changed = !task.block(*vaddr).is_some_and(|bytes| is_right(&bytes[..]));
            read += 1;
            changed += u32::from(has_changed);
        }
        f64::from(changed) / f64::from(read.max(1))
    }
}

#[cfg(test)]
mod tests {
    use rewake_migration::blocks::{BLOCK, BLOCK_LEN};

    use super::*;

    #[test]
    fn a_sample_shows_which_share_has_changed() {
        const BLOCKS: usize = 1024;
        let mut memory = vec![7_u8; (BLOCKS + 1) * BLOCK_LEN];
        let first = (memory.as_ptr().addr() as u64).next_multiple_of(BLOCK);
        let offset = usize::try_from(first - memory.as_ptr().addr() as u64).unwrap();
        let pid = std::process::id().cast_signed();
        let mut list = TreeBlocks::of(&[pid], &RandomState::new());
        let own = first..first + (BLOCKS * BLOCK_LEN) as u64;
        list.places.retain(|(_, vaddr)| own.contains(vaddr));
        assert_eq!(list.len(), BLOCKS);
        assert!(!list.places.is_sorted(), "the order of addresses");
        let mut sent = SourceBlocks::default();
        for (task, vaddr) in list.iter().take(BLOCKS / 2) {
            sent.pre_copy(BlockPlace { task: task.number, vaddr }, digest(&task.block(vaddr).unwrap()[..]));
        }
        assert_eq!(list.changed_share(&sent), 0.0);
        // A quarter of all addresses, which a program has written one after the other.
        memory[offset..offset + BLOCKS / 4 * BLOCK_LEN].fill(8);
        let share = list.changed_share(&sent);
        assert!((0.1..0.4).contains(&share), "{share}");
        assert_eq!(memory[offset], 8);
    }

    #[test]
    fn blocks_without_private_pages_are_left_out() {
        let pid = std::process::id().cast_signed();
        let list = TreeBlocks::of(&[pid], &RandomState::new());
        assert!(list.len() > 0);
        assert!(list.iter().all(|(task, vaddr)| task.block(vaddr).is_some() || vaddr == 0));
        assert_eq!(TreeBlocks::of(&[i32::MAX], &RandomState::new()).len(), 0);
    }
}
