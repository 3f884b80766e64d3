// SPDX-License-Identifier: MIT OR Apache-2.0
//! Imported BOs. The kernel returns the same handle for each import of a BO, and one close ends them all, so
//! the table counts imports. A BO in flight is closed after its last copy.

use std::collections::HashMap;
use std::sync::Arc;

use rewake_amdgpu_uapi::abi::memory::Mapping;

/// An imported BO of one engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Bo {
    engine: u32,
    index: u32,
    generation: u32,
}

/// How an engine accesses a BO.
#[derive(Debug)]
pub(crate) enum Reach {
    /// The BO was not used yet.
    None,
    /// The GPU address.
    Gpu(u64),
    /// The CPU mapping.
    Cpu(Arc<Mapping>),
}

#[derive(Debug)]
pub(crate) struct BoEntry {
    pub(crate) handle: u32,
    /// The size in bytes.
    pub(crate) size: u64,
    pub(crate) reach: Reach,
    /// The number of the last submission that lists it.
    pub(crate) stamp: u64,
    imports: u32,
    in_flight: u32,
    generation: u32,
}

/// All BOs of an engine.
#[derive(Debug)]
pub(crate) struct Table {
    engine: u32,
    entries: Vec<Option<BoEntry>>,
    by_handle: HashMap<u32, u32>,
    free: Vec<u32>,
    generation: u32,
}

impl Table {
    pub(crate) fn new(engine: u32) -> Self {
        Self { engine, entries: Vec::new(), by_handle: HashMap::new(), free: Vec::new(), generation: 0 }
    }

    /// Counts an import of a handle.
    pub(crate) fn import(&mut self, handle: u32, size: u64) -> Bo {
        let index = *self.by_handle.entry(handle).or_insert_with(|| {
            let free = self.free.pop().unwrap_or_else(|| {
                self.entries.push(None);
                u32::try_from(self.entries.len() - 1).unwrap_or(u32::MAX)
            });
            self.generation = self.generation.wrapping_add(1);
            let (reach, generation) = (Reach::None, self.generation);
            self.entries[free as usize] =
                Some(BoEntry { handle, size, reach, stamp: 0, imports: 0, in_flight: 0, generation });
            free
        });
        let entry = self.at(index);
        entry.imports += 1;
        let generation = entry.generation;
        Bo { engine: self.engine, index, generation }
    }

    /// Returns an imported BO.
    pub(crate) fn get(&mut self, bo: Bo) -> Option<&mut BoEntry> {
        let entry = self.entries.get_mut(bo.index as usize)?.as_mut()?;
        (bo.engine == self.engine && entry.generation == bo.generation && entry.imports > 0).then_some(entry)
    }

    /// Counts a submission that uses a BO. Returns the index for [`Self::end_use`].
    pub(crate) fn start_use(&mut self, bo: Bo) -> u32 {
        self.at(bo.index).in_flight += 1;
        bo.index
    }

    /// Counts the end of a submission that used a BO. Returns the entry if it must be closed now.
    pub(crate) fn end_use(&mut self, index: u32) -> Option<BoEntry> {
        self.at(index).in_flight -= 1;
        self.ended(index)
    }

    /// Releases an import. Returns `None` if the BO is not imported, and the entry if it must be closed now.
    pub(crate) fn release(&mut self, bo: Bo) -> Option<Option<BoEntry>> {
        self.get(bo)?.imports -= 1;
        Some(self.ended(bo.index))
    }

    fn ended(&mut self, index: u32) -> Option<BoEntry> {
        let unused = |entry: &mut BoEntry| entry.imports == 0 && entry.in_flight == 0;
        let entry = self.entries[index as usize].take_if(unused)?;
        self.by_handle.remove(&entry.handle);
        self.free.push(index);
        Some(entry)
    }

    /// Returns an entry by an index of this table.
    fn at(&mut self, index: u32) -> &mut BoEntry {
        self.entries[index as usize].as_mut().expect("the index is in use")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_handle_is_closed_once_after_the_last_import() {
        let mut table = Table::new(0);
        let (one, two) = (table.import(5, 4096), table.import(5, 4096));
        assert_eq!(one, two);
        assert!(matches!(table.release(one), Some(None)), "one import remains");
        assert_eq!(table.release(two).flatten().map(|entry| entry.handle), Some(5));
        assert!(table.release(two).is_none(), "released");
        assert!(table.get(one).is_none(), "released");
    }

    #[test]
    fn a_bo_in_flight_is_closed_after_its_last_copy() {
        let mut table = Table::new(0);
        let bo = table.import(5, 4096);
        let (first, second) = (table.start_use(bo), table.start_use(bo));
        assert!(matches!(table.release(bo), Some(None)));
        assert!(table.get(bo).is_none(), "released");
        assert!(table.end_use(first).is_none());
        assert_eq!(table.end_use(second).map(|entry| entry.handle), Some(5));
    }

    #[test]
    fn a_bo_imported_again_in_flight_stays_open() {
        let mut table = Table::new(0);
        let bo = table.import(5, 4096);
        let flight = table.start_use(bo);
        table.release(bo).unwrap();
        let again = table.import(5, 4096);
        assert!(table.end_use(flight).is_none());
        assert_eq!(table.get(again).map(|entry| entry.handle), Some(5));
    }

    #[test]
    fn a_reused_index_is_another_bo() {
        let (mut table, mut other) = (Table::new(0), Table::new(1));
        let old = table.import(5, 4096);
        table.release(old).unwrap();
        let new = table.import(6, 4096);
        assert!(table.get(old).is_none());
        assert!(table.get(new).is_some());
        other.import(7, 4096);
        assert!(other.get(new).is_none(), "of another engine");
        assert_eq!(table.entries.len(), 1);
    }
}
