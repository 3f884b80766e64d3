// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who waits for pages.

/// The number of a streamer: no two of a fetcher have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ClientNumber(pub(crate) u32);

/// The streamer that started the fetcher.
pub(crate) const OWNER: ClientNumber = ClientNumber(0);

/// Readers that wait for pages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ReaderSet(Vec<(ClientNumber, u64)>);

impl ReaderSet {
    /// One reader of a streamer.
    pub(crate) fn one(client: ClientNumber, reader: u8) -> Self {
        Self(vec![(client, 1 << (reader % 64))])
    }

    /// Adds the readers of another set.
    pub(crate) fn add(&mut self, other: &Self) {
        for (client, readers) in &other.0 {
            match self.0.iter_mut().find(|(of, _)| of == client) {
                Some((_, own)) => *own |= readers,
                None => self.0.push((*client, *readers)),
            }
        }
    }

    /// Removes the readers of a streamer. Returns whether the set had only those.
    pub(crate) fn remove(&mut self, client: ClientNumber) -> bool {
        let before = self.0.len();
        self.0.retain(|(of, _)| *of != client);
        before > 0 && self.0.is_empty()
    }

    /// Returns one bit for each reader of a streamer.
    pub(crate) fn of(&self, client: ClientNumber) -> u64 {
        self.0.iter().find(|(of, _)| *of == client).map_or(0, |(_, readers)| *readers)
    }
}
