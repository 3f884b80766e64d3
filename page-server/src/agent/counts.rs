// SPDX-License-Identifier: MIT OR Apache-2.0
//! Adds up what the workers of sessions have counted. So no number of the agent decreases when a session
//! ends.

use std::collections::BTreeMap;

use rewake_streamer::control::proto::{
    self, FailureCause, FailureCount, FaultLatencies, LoadCounts, MemorySource, SourceCounts, State,
    Streaming,
};

/// Why a session has failed, or was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum FailureKind {
    /// The image cannot be served, or the streamer did not start.
    Refused,
    /// CRIU failed, or never connected.
    Restore,
    /// Memory could not be loaded.
    Load,
    /// The program was killed, or failed, before all its memory was resident.
    ProgramEnded,
    /// A block of the image is not what was sealed.
    WrongBlock,
    /// Every process of the streamer was killed.
    StreamerKilled,
    /// The agent does not know how it ended: the streamer is silent, or its work directory was removed.
    Lost,
}

impl FailureKind {
    /// All kinds: each is reported, also if its count is 0.
    pub(super) const ALL: [Self; 7] = [
        Self::Refused,
        Self::Restore,
        Self::Load,
        Self::ProgramEnded,
        Self::WrongBlock,
        Self::StreamerKilled,
        Self::Lost,
    ];

    /// Why a session has failed that was in a state, as its streamer has reported.
    pub(super) fn of(cause: FailureCause, state: State) -> Self {
        match state {
            _ if cause == FailureCause::WrongBlock => Self::WrongBlock,
            State::Unknown | State::Listening | State::Restoring => Self::Restore,
            State::Running | State::Complete | State::Failed => Self::Load,
            State::Ended => Self::ProgramEnded,
        }
    }

    /// Its name in messages and metrics.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Restore => "restore",
            Self::Load => "load",
            Self::ProgramEnded => "program_ended",
            Self::WrongBlock => "wrong_block",
            Self::StreamerKilled => "streamer_killed",
            Self::Lost => "lost",
        }
    }
}

/// Counts of ended workers, also of ended sessions, and failures.
#[derive(Debug, Default)]
pub(super) struct EndedCounts {
    by_source: BTreeMap<MemorySource, LoadCounts>,
    failures: BTreeMap<FailureKind, u64>,
}

impl EndedCounts {
    /// Adds what a worker has reported last.
    pub(super) fn add(&mut self, last: &Streaming) {
        if let Some(counts) = &last.counts {
            add(self.by_source.entry(last.source()).or_default(), counts);
        }
    }

    pub(super) fn failed(&mut self, kind: FailureKind) {
        *self.failures.entry(kind).or_default() += 1;
    }

    pub(super) fn by_source(&self) -> Vec<SourceCounts> {
        let to_proto = |(source, counts): (&MemorySource, &LoadCounts)| SourceCounts {
            source: (*source).into(),
            counts: Some(counts.clone()),
        };
        self.by_source.iter().map(to_proto).collect()
    }

    pub(super) fn failures(&self) -> Vec<FailureCount> {
        let count = |kind: FailureKind| FailureCount {
            kind: kind.name().to_owned(),
            count: self.failures.get(&kind).copied().unwrap_or_default(),
        };
        FailureKind::ALL.into_iter().map(count).collect()
    }
}

/// Returns what all workers have counted, by source: the workers that have ended, and the workers of sessions
/// that are served.
pub(super) fn totals(status: &proto::Status) -> BTreeMap<MemorySource, LoadCounts> {
    let mut totals = EndedCounts::default();
    for ended in status.agent.iter().flat_map(|agent| &agent.ended) {
        totals.add(&Streaming { source: ended.source, counts: ended.counts.clone(), ..Streaming::default() });
    }
    status.sessions.iter().filter_map(|session| session.progress.as_ref()).for_each(|now| totals.add(now));
    totals.by_source
}

fn add(to: &mut LoadCounts, more: &LoadCounts) {
    to.fault_bytes += more.fault_bytes;
    to.working_set_bytes += more.working_set_bytes;
    to.background_bytes += more.background_bytes;
    to.gpu_bytes += more.gpu_bytes;
    to.gates_opened += more.gates_opened;
    add_latencies(to.page_faults.get_or_insert_default(), more.page_faults.as_ref());
    add_latencies(to.gpu_faults.get_or_insert_default(), more.gpu_faults.as_ref());
}

fn add_latencies(to: &mut FaultLatencies, more: Option<&FaultLatencies>) {
    let Some(more) = more else { return };
    if to.counts.len() < more.counts.len() {
        to.counts.resize(more.counts.len(), 0);
    }
    to.counts.iter_mut().zip(&more.counts).for_each(|(to, more)| *to += more);
    to.sum_ns += more.sum_ns;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(source: MemorySource, fault_bytes: u64, counts: &[u64]) -> Streaming {
        let page_faults = Some(FaultLatencies { counts: counts.to_vec(), sum_ns: 5 });
        let counts = Some(LoadCounts { fault_bytes, page_faults, ..LoadCounts::default() });
        Streaming { source: source.into(), counts, ..Streaming::default() }
    }

    #[test]
    fn totals_are_of_ended_workers_and_live_sessions() {
        let mut ended = EndedCounts::default();
        ended.add(&worker(MemorySource::Cache, 4096, &[1, 2]));
        ended.add(&worker(MemorySource::Cache, 4096, &[]));
        ended.add(&Streaming::default());
        let progress = Some(worker(MemorySource::Cache, 8192, &[0, 1, 7]));
        let status = proto::Status {
            sessions: vec![proto::Session { progress, ..Default::default() }, proto::Session::default()],
            agent: Some(proto::Agent { ended: ended.by_source(), ..Default::default() }),
            ..Default::default()
        };
        let totals = totals(&status);
        let cached = &totals[&MemorySource::Cache];
        assert_eq!((totals.len(), cached.fault_bytes), (1, 16384));
        let wanted = FaultLatencies { counts: vec![1, 3, 7], sum_ns: 15 };
        assert_eq!(cached.page_faults, Some(wanted));
    }

    #[test]
    fn failures_are_counted_by_kind() {
        let mut ended = EndedCounts::default();
        ended.failed(FailureKind::of(FailureCause::Other, State::Failed));
        ended.failed(FailureKind::of(FailureCause::DamagedImage, State::Running));
        ended.failed(FailureKind::StreamerKilled);
        ended.failed(FailureKind::of(FailureCause::WrongBlock, State::Restoring));
        ended.failed(FailureKind::of(FailureCause::Other, State::Listening));
        let counts: Vec<(String, u64)> =
            ended.failures().into_iter().map(|failure| (failure.kind, failure.count)).collect();
        let wanted = [
            ("refused", 0),
            ("restore", 1),
            ("load", 2),
            ("program_ended", 0),
            ("wrong_block", 1),
            ("streamer_killed", 1),
            ("lost", 0),
        ];
        assert_eq!(counts, wanted.map(|(kind, count)| (kind.to_owned(), count)));
    }
}
