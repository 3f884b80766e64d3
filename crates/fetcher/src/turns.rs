// SPDX-License-Identifier: MIT OR Apache-2.0
//! A queue in which each streamer has its turn: however many requests one has queued, the next request of
//! another waits for one of them at most.

use std::collections::VecDeque;
use std::ops::Range;

use crate::readers::{ClientNumber, ReaderSet};

/// Pages that readers wait for.
#[derive(Debug)]
pub(crate) struct WantedPages {
    pub(crate) pages: Range<u64>,
    pub(crate) readers: ReaderSet,
    /// Whether it is a demand that follows no other.
    pub(crate) elsewhere: bool,
}

/// What waits, by streamer.
#[derive(Debug, Default)]
pub(crate) struct TurnQueue {
    /// The next turn is the first streamer's. None is empty.
    turns: VecDeque<Turn>,
}

#[derive(Debug)]
struct Turn {
    /// None: pages that an answer lacked, which readers of several streamers may wait for.
    of: Option<ClientNumber>,
    wanted: VecDeque<WantedPages>,
}

impl TurnQueue {
    pub(crate) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// Returns how many requests of a streamer wait.
    pub(crate) fn len_of(&self, client: ClientNumber) -> usize {
        self.turns.iter().find(|turn| turn.of == Some(client)).map_or(0, |turn| turn.wanted.len())
    }

    /// Adds a request of a streamer, after its others.
    pub(crate) fn push(&mut self, client: ClientNumber, wanted: WantedPages) {
        match self.turns.iter_mut().find(|turn| turn.of == Some(client)) {
            Some(turn) => turn.wanted.push_back(wanted),
            None => self.turns.push_back(Turn { of: Some(client), wanted: [wanted].into() }),
        }
    }

    /// Adds what an answer lacked, before all others.
    pub(crate) fn push_first(&mut self, wanted: WantedPages) {
        self.turns.push_front(Turn { of: None, wanted: [wanted].into() });
    }

    /// Returns the next request, to look at.
    pub(crate) fn peek(&self) -> Option<&WantedPages> {
        self.turns.front()?.wanted.front()
    }

    /// Returns the next request.
    pub(crate) fn first(&mut self) -> Option<&mut WantedPages> {
        self.turns.front_mut()?.wanted.front_mut()
    }

    /// Removes the next request. Returns whether the one after it is of the same streamer.
    pub(crate) fn pop(&mut self) -> bool {
        let Some(turn) = self.turns.front_mut() else { return false };
        turn.wanted.pop_front();
        let more = !turn.wanted.is_empty();
        if !more {
            self.turns.pop_front();
        }
        more
    }

    /// Ends the turn of the first streamer.
    pub(crate) fn next_turn(&mut self) {
        if let Some(turn) = self.turns.pop_front() {
            self.turns.push_back(turn);
        }
    }

    /// Removes the requests that `keep` returns false for.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(&mut WantedPages) -> bool) {
        self.turns.retain_mut(|turn| {
            turn.wanted.retain_mut(&mut keep);
            !turn.wanted.is_empty()
        });
    }
}
