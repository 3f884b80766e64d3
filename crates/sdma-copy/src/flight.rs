// SPDX-License-Identifier: MIT OR Apache-2.0
//! Submissions in flight on a GPU.

use std::time::Instant;

use rewake_amdgpu_uapi::render::Submission;

use crate::error::SubmitFault;

/// A submission of one engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket {
    pub(crate) engine: u32,
    pub(crate) number: u64,
}

/// A submission in flight.
#[derive(Debug)]
pub(crate) struct RingSubmission {
    pub(crate) ticket: Ticket,
    pub(crate) submission: Submission,
    pub(crate) transfers: usize,
    pub(crate) bytes: u64,
    pub(crate) since: Instant,
    /// Indices of its BOs in the table.
    pub(crate) bos: Vec<u32>,
}

impl RingSubmission {
    /// Returns the facts about the submission, with the bytes in flight on its ring.
    pub(crate) fn fault(
        &self,
        minor: u32,
        queued: u64,
        errno: Option<i32>,
        state: Option<u64>,
    ) -> SubmitFault {
        SubmitFault {
            minor,
            ring: self.submission.ring,
            transfers: self.transfers,
            bytes: self.bytes,
            queued,
            age: self.since.elapsed(),
            errno,
            state,
        }
    }
}
