// SPDX-License-Identifier: MIT OR Apache-2.0
//! The blocks of a tree that runs, in a random order.
//!
//! A program often writes its memory from the first address to the last. If a round sends blocks in the order
//! of addresses, the waste depends on where the program writes: a round that stays ahead of the program
//! wastes every block that is written afterwards, and a round that stays behind the program wastes none. In a
//! random order half of what is written during the round is wasted, wherever the program begins.

use std::hash::{BuildHasher as _, RandomState};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use rewake_migration::blocks::{BLOCK, BlockAnswer, BlockPlace, SourceBlocks};

use crate::tree_memory::{TaskMemory, digest, private_memory};

/// Bytes of addresses whose blocks stay together: memory in swap is read in larger pieces.
const UNIT: u64 = 1 << 20;
/// Bytes of addresses whose blocks are listed at once.
const LISTED: usize = 1 << 30;
/// Blocks that are read again to learn how much has changed.
const SAMPLE: usize = 128;

/// The blocks of a tree that have private pages.
#[derive(Debug)]
pub(crate) struct TreeBlocks {
    tasks: Vec<TaskMemory>,
    units: Vec<BlockUnit>,
    /// The number of blocks.
    len: usize,
}

/// Blocks of one task that stay together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct BlockUnit {
    /// The first address.
    vaddr: u64,
    /// The index of the task.
    task: u32,
    /// A bit for each block, from the first on.
    blocks: u16,
}

const _: () = assert!(UNIT / BLOCK == u16::BITS as u64);

impl BlockUnit {
    fn blocks(self) -> impl Iterator<Item = u64> {
        let is_set = move |block: &u64| self.blocks >> block & 1 == 1;
        (0..UNIT / BLOCK).filter(is_set).map(move |block| self.vaddr + block * BLOCK)
    }
}

impl TreeBlocks {
    /// Lists the blocks of these processes. One that has ended has none. The order is that of all lists with
    /// this state.
    pub(crate) fn of(processes: &[i32], order: &RandomState) -> Self {
        let mut found = Self { tasks: Vec::new(), units: Vec::new(), len: 0 };
        for pid in processes {
            let (Ok(task), Ok(ranges)) = (TaskMemory::open(*pid), private_memory(*pid)) else { continue };
            ranges.into_iter().for_each(|range| found.add(&task, range));
            found.tasks.push(task);
        }
        let Self { tasks, units, .. } = &mut found;
        units.sort_by_cached_key(|unit| order.hash_one((tasks[unit.task as usize].number, unit.vaddr)));
        found
    }

    /// Adds the blocks of a range of the task that is added next.
    fn add(&mut self, task: &TaskMemory, range: Range<u64>) {
        let index = u32::try_from(self.tasks.len()).unwrap_or(u32::MAX);
        for start in range.clone().step_by(LISTED) {
            for block in task.private_blocks(start..range.end.min(start + LISTED as u64)) {
                let (vaddr, bit) = (block / UNIT * UNIT, 1 << (block % UNIT / BLOCK));
                self.len += 1;
                match self.units.last_mut() {
                    Some(last) if (last.task, last.vaddr) == (index, vaddr) => last.blocks |= bit,
                    _ => self.units.push(BlockUnit { vaddr, task: index, blocks: bit }),
                }
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The blocks with their tasks.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&TaskMemory, u64)> {
        self.units.iter().flat_map(|unit| unit.blocks().map(|vaddr| (&self.tasks[unit.task as usize], vaddr)))
    }

    /// Which share of all candidates has changed since it was sent: a sample of them is read again. The lock
    /// is not held meanwhile.
    pub(crate) fn changed_share(&self, sent: &Mutex<SourceBlocks>) -> f64 {
        let sent = || sent.lock().unwrap_or_else(PoisonError::into_inner);
        // The first blocks of the list were sent in the first round.
        let first = sent().len().min(self.len());
        let (mut read, mut changed) = (0_u32, 0_u32);
        for (task, vaddr) in self.iter().take(first).step_by(first.div_ceil(SAMPLE).max(1)) {
            let place = BlockPlace { task: task.number, vaddr };
            if !sent().has_candidate(place) {
                continue;
            }
            let is_right = |digest| sent().answer(place, digest) == BlockAnswer::Digest;
            let has_changed = !task.block(vaddr).is_some_and(|bytes| is_right(digest(&bytes[..])));
            read += 1;
            changed += u32::from(has_changed);
        }
        f64::from(changed) / f64::from(read.max(1))
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use rewake_migration::blocks::BLOCK_LEN;

    use super::*;

    impl TreeBlocks {
        /// Forgets the blocks outside a range.
        fn keep(&mut self, range: &Range<u64>) {
            for unit in &mut self.units {
                let kept = unit.blocks().filter(|vaddr| range.contains(vaddr));
                unit.blocks = kept.fold(0, |bits, vaddr| bits | 1 << (vaddr % UNIT / BLOCK));
            }
            self.len = self.iter().count();
        }
    }

    #[test]
    fn a_process_that_ends_changes_no_order() {
        let mut other = Command::new("sleep").arg("100").spawn().unwrap();
        let (order, own) = (RandomState::new(), std::process::id().cast_signed());
        let memory = vec![7_u8; 64 * BLOCK_LEN];
        let first = (memory.as_ptr().addr() as u64).next_multiple_of(BLOCK);
        let range = first..first + 63 * BLOCK;
        let addresses = |processes: &[i32]| {
            let list = TreeBlocks::of(processes, &order);
            let found: Vec<u64> =
                list.iter().map(|(_, vaddr)| vaddr).filter(|at| range.contains(at)).collect();
            found
        };
        let both = addresses(&[other.id().cast_signed(), own]);
        other.kill().unwrap();
        other.wait().unwrap();
        assert_eq!(both.len(), 63);
        assert_eq!(both, addresses(&[own]));
    }

    #[test]
    fn a_sample_shows_which_share_has_changed() {
        const BLOCKS: usize = 1024;
        let mut memory = vec![7_u8; (BLOCKS + 1) * BLOCK_LEN];
        let first = (memory.as_ptr().addr() as u64).next_multiple_of(BLOCK);
        let offset = usize::try_from(first - memory.as_ptr().addr() as u64).unwrap();
        let pid = std::process::id().cast_signed();
        let mut list = TreeBlocks::of(&[pid], &RandomState::new());
        let own = first..first + (BLOCKS * BLOCK_LEN) as u64;
        list.keep(&own);
        assert_eq!(list.len(), BLOCKS);
        let addresses: Vec<u64> = list.iter().map(|(_, vaddr)| vaddr).collect();
        assert_eq!(addresses.len(), BLOCKS);
        assert!(!addresses.is_sorted(), "the order of addresses");
        let sent = Mutex::new(SourceBlocks::default());
        for (task, vaddr) in list.iter().take(BLOCKS / 2) {
            let (place, bytes) = (BlockPlace { task: task.number, vaddr }, task.block(vaddr).unwrap());
            sent.lock().unwrap().pre_copy(place, digest(&bytes[..]));
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
