// SPDX-License-Identifier: MIT OR Apache-2.0
//! Pre-copy: memory is sent while the program runs, in rounds, each with the blocks that have changed.
//!
//! A block that changes after it was sent has wasted its first transfer, because it travels again after the
//! freeze. While a program writes, the waste grows with the time that pre-copy takes. Pre-copy ends, even in
//! the middle of a round, when a fifth of the memory is wasted, so that about 1.2 times the memory is sent,
//! whatever the program writes. With
//! `--pre-copy-only` the changed blocks count as downtime, and rounds follow as long as they become smaller.

use std::hash::RandomState;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rewake_migration::blocks::{BLOCK, BlockPlace, SourceBlocks};

use crate::cgroup::TreeCgroup;
use crate::frame::{Frame, FrameWriter};
use crate::tree_blocks::TreeBlocks;
use crate::tree_memory::{TaskMemory, digest, pages_with_bytes};

/// Rounds at most.
const MAX_ROUNDS: u32 = 8;
/// A round that sends so few bytes is the last.
const FEW_BYTES: u64 = 1 << 20;
/// The share of changed blocks falls if it is below this part of the round before's.
const FALLS: f64 = 0.9;
/// The part of a tree's blocks that may be sent in vain.
const MAX_IN_VAIN: f64 = 0.2;
/// Time between two looks at how much was sent in vain.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// Time from the last byte of a round until the destination has reported it as stored.
const STORE_LIMIT: Duration = Duration::from_secs(60);

/// What a user wants of pre-copy.
#[derive(Debug, Clone, Copy, Default)]
pub struct PreCopyGoal {
    /// All memory is at the destination before GRANT.
    pub all_first: bool,
    /// How long the program may be frozen before GRANT.
    pub max_downtime: Option<Duration>,
}

/// A round is reported as stored in parts of this size, so that a lost connection loses only the last part.
const MARK_BYTES: u64 = 256 << 20;
/// Connections that one round may lose.
const MAX_LOST: u32 = 100;
/// What a round has sent.
#[derive(Debug, Clone, Copy, Default)]
struct RoundResult {
    /// Bytes of all blocks.
    total: u64,
    /// Bytes of the blocks that were sent.
    sent: u64,
    elapsed: Duration,
    /// Too much was sent in vain: the rest is sent after the freeze.
    is_in_vain: bool,
}

/// What pre-copy shares with the agent and with the connection.
#[derive(Debug, Default)]
pub(crate) struct PreCopy {
    state: Mutex<PreCopyState>,
    changed: Condvar,
    blocks: Mutex<SourceBlocks>,
    /// Of the blocks in each round.
    order: RandomState,
}

#[derive(Debug, Default)]
struct PreCopyState {
    link: Option<Arc<FrameWriter>>,
    /// The last round that the destination has stored.
    stored: u32,
    is_over: bool,
    rounds: u32,
    /// Bytes of all blocks in the last round.
    total: u64,
}

/// Why a round ended early.
enum RoundEnd {
    /// The connection was lost, or is a new one.
    Disconnected,
    /// The migration has ended.
    Over,
    /// The destination does not report a round as stored.
    Silent,
}

impl PreCopy {
    /// Uses a new connection, or none.
    pub(crate) fn connect(&self, link: Option<Arc<FrameWriter>>) {
        self.state().link = link;
        self.changed.notify_all();
    }

    /// The destination has stored a round.
    pub(crate) fn stored(&self, round: u32) {
        let mut state = self.state();
        state.stored = state.stored.max(round);
        drop(state);
        self.changed.notify_all();
    }

    /// Ends pre-copy: the migration has ended.
    pub(crate) fn end(&self) {
        self.state().is_over = true;
        self.changed.notify_all();
    }

    /// The number of rounds so far.
    pub(crate) fn rounds(&self) -> u32 {
        self.state().rounds
    }

    /// Bytes of all blocks in the last round.
    pub(crate) fn total(&self) -> u64 {
        self.state().total
    }

    pub(crate) fn blocks(&self) -> MutexGuard<'_, SourceBlocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, PreCopyState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends rounds until the share of changed blocks no longer falls, or too much was sent in vain. Returns
    /// false if the migration has ended.
    ///
    /// # Errors
    /// The destination does not store what is sent, or the connection is lost again and again.
    pub(crate) fn run(&self, cgroup: &TreeCgroup, goal: PreCopyGoal) -> Result<bool, String> {
        let mut before: Option<RoundResult> = None;
        for number in 1..=MAX_ROUNDS {
            let Some(round) = self.round(cgroup, goal)? else { return Ok(false) };
            {
                let mut state = self.state();
                (state.rounds, state.total) = (number, round.total);
            }
            tracing::info!(
                "pre-copy, round {number}: {} of {} bytes in {:?}{}",
                round.sent,
                round.total,
                round.elapsed,
                if round.is_in_vain { ", and too much of it in vain" } else { "" }
            );
            if round.is_in_vain || is_last(&round, before.as_ref()) {
                break;
            }
            before = Some(round);
        }
        Ok(true)
    }

    /// Sends one round, on as many connections as that needs, or `None` if the migration has ended.
    fn round(&self, cgroup: &TreeCgroup, goal: PreCopyGoal) -> Result<Option<RoundResult>, String> {
        self.on_links(|link| {
            let begin = Instant::now();
            let round = self.send_round(cgroup, link, goal)?;
            Ok(RoundResult { elapsed: begin.elapsed(), ..round })
        })
    }

    /// Does something on as many connections as it needs, or `None` if the migration has ended.
    fn on_links<T>(
        &self,
        act: impl Fn(&Arc<FrameWriter>) -> Result<T, RoundEnd>,
    ) -> Result<Option<T>, String> {
        let mut lost = None;
        for _ in 0..=MAX_LOST {
            let Some(link) = self.wait_for_link(lost.as_ref()) else { return Ok(None) };
            self.blocks().begin_round();
            match act(&link) {
                Ok(done) => return Ok(Some(done)),
                Err(RoundEnd::Over) => return Ok(None),
                Err(RoundEnd::Silent) => {
                    let limit = STORE_LIMIT.as_secs();
                    return Err(format!("the destination has not stored a round of pre-copy for {limit} s"));
                }
                Err(RoundEnd::Disconnected) => {
                    let stored = self.state().stored;
                    self.blocks().lost_after(stored);
                    lost = Some(link);
                }
            }
        }
        Err(format!("the connection was lost {MAX_LOST} times in one round of pre-copy"))
    }

    /// Waits for a connection that is not the one that was lost.
    fn wait_for_link(&self, lost: Option<&Arc<FrameWriter>>) -> Option<Arc<FrameWriter>> {
        let is_new = |link: &Arc<FrameWriter>| lost.is_none_or(|lost| !Arc::ptr_eq(lost, link));
        let waits = |state: &mut PreCopyState| !state.link.as_ref().is_some_and(is_new) && !state.is_over;
        let state = self.changed.wait_while(self.state(), waits).unwrap_or_else(PoisonError::into_inner);
        state.link.clone().filter(|_| !state.is_over)
    }

    /// Whether this connection is still the one to use.
    fn check(&self, link: &Arc<FrameWriter>) -> Result<(), RoundEnd> {
        let state = self.state();
        match &state.link {
            _ if state.is_over => Err(RoundEnd::Over),
            Some(newest) if Arc::ptr_eq(newest, link) => Ok(()),
            _ => Err(RoundEnd::Disconnected),
        }
    }

    fn send_round(
        &self,
        cgroup: &TreeCgroup,
        link: &Arc<FrameWriter>,
        goal: PreCopyGoal,
    ) -> Result<RoundResult, RoundEnd> {
        let list = TreeBlocks::of(&cgroup.processes().unwrap_or_default(), &self.order);
        let mut round = RoundResult { total: list.len() as u64 * BLOCK, ..RoundResult::default() };
        let (mut marked, mut looked) = (0, Instant::now());
        for (task, vaddr) in list.iter() {
            self.send_block(task, vaddr, link, &mut round)?;
            if round.sent - marked >= MARK_BYTES {
                marked = round.sent;
                self.mark(link, false)?;
            }
            if looked.elapsed() >= LOOK_INTERVAL {
                round.is_in_vain = self.is_in_vain(&list, goal);
                if round.is_in_vain {
                    break;
                }
                looked = Instant::now();
            }
        }
        round.is_in_vain = round.is_in_vain || self.is_in_vain(&list, goal);
        self.mark(link, true)?;
        Ok(round)
    }

    /// Whether too much was sent in vain.
    fn is_in_vain(&self, list: &TreeBlocks, goal: PreCopyGoal) -> bool {
        if goal.all_first {
            return false;
        }
        let changed = list.changed_share(&self.blocks);
        self.blocks().in_vain(changed) > list.len() as f64 * MAX_IN_VAIN
    }

    /// Has the destination report what was sent up to now as stored, and waits for that, or begins another
    /// part.
    fn mark(&self, link: &Arc<FrameWriter>, waits: bool) -> Result<(), RoundEnd> {
        let number = self.blocks().round();
        link.send(&Frame::RoundEnd(number)).map_err(|_| RoundEnd::Disconnected)?;
        if waits {
            return self.wait_until_stored(link, number);
        }
        self.blocks().begin_round();
        Ok(())
    }

    fn send_block(
        &self,
        task: &TaskMemory,
        vaddr: u64,
        link: &Arc<FrameWriter>,
        round: &mut RoundResult,
    ) -> Result<(), RoundEnd> {
        let Some(bytes) = task.block(vaddr) else { return Ok(()) };
        let place = BlockPlace { task: task.number, vaddr };
        if !self.blocks().pre_copy(place, digest(&bytes[..])) {
            return Ok(());
        }
        self.check(link)?;
        round.sent += BLOCK;
        let (pages, bytes) = pages_with_bytes(&bytes);
        let candidate = Frame::Candidate { pid: task.number, vaddr, pages, bytes };
        link.send(&candidate).map_err(|_| RoundEnd::Disconnected)
    }

    fn wait_until_stored(&self, link: &Arc<FrameWriter>, number: u32) -> Result<(), RoundEnd> {
        let is_newest =
            |state: &PreCopyState| state.link.as_ref().is_some_and(|newest| Arc::ptr_eq(newest, link));
        let waits = |state: &mut PreCopyState| state.stored < number && !state.is_over && is_newest(state);
        let waited = self.changed.wait_timeout_while(self.state(), STORE_LIMIT, waits);
        let (state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        match state.stored < number {
            _ if state.is_over => Err(RoundEnd::Over),
            true if waited.timed_out() => Err(RoundEnd::Silent),
            true => Err(RoundEnd::Disconnected),
            false => Ok(()),
        }
    }
}

/// Whether another round would not make the rest smaller.
fn is_last(round: &RoundResult, before: Option<&RoundResult>) -> bool {
    let share = |round: &RoundResult| round.sent as f64 / round.total.max(1) as f64;
    round.sent <= FEW_BYTES || before.is_some_and(|before| share(round) > share(before) * FALLS)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    fn round(sent: u64) -> RoundResult {
        RoundResult { total: 100 << 20, sent: sent << 20, ..RoundResult::default() }
    }

    #[test]
    fn rounds_end_when_the_changed_share_no_longer_falls() {
        assert!(!is_last(&round(100), None));
        assert!(!is_last(&round(50), Some(&round(100))));
        assert!(is_last(&round(95), Some(&round(100))));
        assert!(is_last(&round(1), None));
    }

    /// A connection, and the destination's end of it.
    fn link() -> (Arc<FrameWriter>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let source = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Arc::new(FrameWriter::new(source.into())), listener.accept().unwrap().0)
    }

    /// Sends a round of this process's memory to a destination that takes about 100 MiB/s.
    fn round_of_this_process(goal: PreCopyGoal) -> RoundResult {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("cgroup.procs"), std::process::id().to_string()).unwrap();
        let group = serde_json::json!({ "path": folder.path(), "is_made": false });
        let (pre_copy, (link, mut destination)) = (PreCopy::default(), link());
        pre_copy.connect(Some(link));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                loop {
                    match Frame::read(&mut destination).unwrap().unwrap() {
                        Frame::Candidate { .. } => std::thread::sleep(Duration::from_micros(500)),
                        Frame::RoundEnd(round) => return pre_copy.stored(round),
                        other => panic!("{other:?}"),
                    }
                }
            });
            pre_copy.round(&serde_json::from_value(group).unwrap(), goal).unwrap().unwrap()
        })
    }

    #[test]
    fn pre_copy_ends_when_much_was_sent_in_vain() {
        let memory: Vec<AtomicU32> = (0..32 << 20).map(AtomicU32::new).collect();
        let ends = AtomicU32::new(0);
        let (round, all) = std::thread::scope(|scope| {
            scope.spawn(|| {
                // All pages, again and again.
                while ends.load(Ordering::Relaxed) == 0 {
                    for word in memory.iter().step_by(1024) {
                        word.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
            let round = round_of_this_process(PreCopyGoal::default());
            let all = round_of_this_process(PreCopyGoal { all_first: true, ..PreCopyGoal::default() });
            ends.store(1, Ordering::Relaxed);
            (round, all)
        });
        assert!(round.is_in_vain && round.sent < round.total, "{round:?}");
        assert!(!all.is_in_vain && all.sent >= memory.len() as u64 * 4, "{all:?}");
    }

    #[test]
    fn a_round_waits_for_a_new_connection() {
        let (pre_copy, (lost, _one), (new, _two)) = (PreCopy::default(), link(), link());
        pre_copy.connect(Some(Arc::clone(&lost)));
        let tries = AtomicU32::new(0);
        let act = |used: &Arc<FrameWriter>| {
            tries.fetch_add(1, Ordering::Relaxed);
            if Arc::ptr_eq(used, &lost) { Err(RoundEnd::Disconnected) } else { Ok(()) }
        };
        std::thread::scope(|scope| {
            let done = scope.spawn(|| pre_copy.on_links(act));
            std::thread::sleep(Duration::from_millis(100));
            assert!(!done.is_finished());
            pre_copy.connect(Some(new));
            assert_eq!(done.join().unwrap(), Ok(Some(())));
        });
        assert_eq!(tries.load(Ordering::Relaxed), 2);
    }
}
