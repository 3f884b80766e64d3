// SPDX-License-Identifier: MIT OR Apache-2.0
//! Imported BOs. The kernel gives one handle for one BO however often it is imported, and one close ends it for all: so
//! imports are counted. A BO in flight is closed when it has landed.

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

/// How an engine reaches a BO.
#[derive(Debug)]
pub(crate) enum Reach {
    /// Not yet: it was never used.
    None,
    /// At a GPU address.
    Gpu(u64),
    /// Through the CPU's view.
    Cpu(Arc<Mapping>),
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) handle: u32,
    /// Bytes.
    pub(crate) size: u64,
    pub(crate) reach: Reach,
    /// The last submission that lists it.
    pub(crate) stamp: u64,
    imports: u32,
    in_flight: u32,
    generation: u32,
}

/// All of an engine's.
#[derive(Debug)]
pub(crate) struct Table {
    engine: u32,
    entries: Vec<Option<Entry>>,
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
                Some(Entry { handle, size, reach, stamp: 0, imports: 0, in_flight: 0, generation });
            free
        });
        let entry = self.at(index);
        entry.imports += 1;
        let generation = entry.generation;
        Bo { engine: self.engine, index, generation }
    }

    /// An imported BO, if it is one.
    pub(crate) fn get(&mut self, bo: Bo) -> Option<&mut Entry> {
        let entry = self.entries.get_mut(bo.index as usize)?.as_mut()?;
        (bo.engine == self.engine && entry.generation == bo.generation && entry.imports > 0).then_some(entry)
    }

    /// A submission uses it. Gives what [`Self::landed`] takes.
    pub(crate) fn flies(&mut self, bo: Bo) -> u32 {
        self.at(bo.index).in_flight += 1;
        bo.index
    }

    /// A submission used it and has ended. Gives the entry if it is to be closed now.
    pub(crate) fn landed(&mut self, index: u32) -> Option<Entry> {
        self.at(index).in_flight -= 1;
        self.ended(index)
    }

    /// Takes one import back. None if there is none; the entry if it is to be closed now.
    pub(crate) fn release(&mut self, bo: Bo) -> Option<Option<Entry>> {
        self.get(bo)?.imports -= 1;
        Some(self.ended(bo.index))
    }

    fn ended(&mut self, index: u32) -> Option<Entry> {
        let over = |entry: &mut Entry| entry.imports == 0 && entry.in_flight == 0;
        let entry = self.entries[index as usize].take_if(over)?;
        self.by_handle.remove(&entry.handle);
        self.free.push(index);
        Some(entry)
    }

    /// One that is there: by an index of this table's own.
    fn at(&mut self, index: u32) -> &mut Entry {
        self.entries[index as usize].as_mut().expect("an entry in use")
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
        assert!(matches!(table.release(one), Some(None)), "another import is left");
        assert_eq!(table.release(two).flatten().map(|entry| entry.handle), Some(5));
        assert!(table.release(two).is_none(), "released");
        assert!(table.get(one).is_none(), "released");
    }

    #[test]
    fn what_is_in_flight_is_closed_when_it_has_landed() {
        let mut table = Table::new(0);
        let bo = table.import(5, 4096);
        let (first, second) = (table.flies(bo), table.flies(bo));
        assert!(matches!(table.release(bo), Some(None)));
        assert!(table.get(bo).is_none(), "released");
        assert!(table.landed(first).is_none());
        assert_eq!(table.landed(second).map(|entry| entry.handle), Some(5));
    }

    #[test]
    fn imported_again_while_in_flight_it_stays() {
        let mut table = Table::new(0);
        let bo = table.import(5, 4096);
        let flight = table.flies(bo);
        table.release(bo).unwrap();
        let again = table.import(5, 4096);
        assert!(table.landed(flight).is_none());
        assert_eq!(table.get(again).map(|entry| entry.handle), Some(5));
    }

    #[test]
    fn a_place_in_the_table_that_is_used_again_is_another_bo() {
        let (mut table, mut other) = (Table::new(0), Table::new(1));
        let old = table.import(5, 4096);
        table.release(old).unwrap();
        let new = table.import(6, 4096);
        assert!(table.get(old).is_none());
        assert!(table.get(new).is_some());
        other.import(7, 4096);
        assert!(other.get(new).is_none(), "another engine's");
        assert_eq!(table.entries.len(), 1);
    }
}
