// SPDX-License-Identifier: MIT OR Apache-2.0
//! A question with its right answer: asks a program, and checks what it answers.

use std::time::Instant;

use anyhow::ensure;

use super::client::Client;
use super::program::Program;
use super::program::Question;
use super::redis::Requests;

/// A question and the only right answer.
#[derive(Debug)]
pub(crate) struct Check {
    question: Question,
    right: Right,
}

#[derive(Debug)]
enum Right {
    /// This line.
    Line(String),
    /// The value of each of the `keys` keys that redis has.
    Values { keys: u64 },
}

/// A right answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Answered {
    /// When all of it had arrived.
    pub(crate) at: Instant,
    /// redis only: requests answered in the time that was asked about.
    pub(crate) in_time: Option<u64>,
}

impl Check {
    /// Computes the right answer.
    pub(crate) fn new(program: Program, mib: u64, question: Question) -> Self {
        let values = || Right::Values { keys: program.units(mib) };
        let right = program.right_answer(mib, question).map_or_else(values, Right::Line);
        Self { question, right }
    }

    /// Whether this question reads as much memory as another one to the same program.
    pub(crate) fn reads_as_much_as(&self, other: &Self) -> bool {
        self.question.count == other.question.count
    }

    /// Asks until the whole answer has arrived and checks it. Counts requests that redis answers before
    /// `until`.
    ///
    /// # Errors
    /// The answer is wrong, or the client gave up.
    pub(crate) fn ask(&self, client: &Client<'_>, until: Instant) -> anyhow::Result<Answered> {
        let question = self.question;
        match &self.right {
            Right::Line(right) => {
                let (answer, at) = client.answer(question)?;
                ensure!(
                    answer == *right,
                    "wrong answer to \"{question}\": {answer:?}, and {right:?} is right"
                );
                Ok(Answered { at, in_time: None })
            }
            Right::Values { keys } => {
                let mut requests = Requests::connect(*client, *keys, question.seed)?;
                let mut in_time = 0;
                for _ in 0..question.count {
                    requests.get_next()?;
                    in_time += u64::from(Instant::now() < until);
                }
                let at = Instant::now();
                requests.close()?;
                Ok(Answered { at, in_time: Some(in_time) })
            }
        }
    }

    /// Sends redis more requests until then, and returns the number answered; zero for another program.
    ///
    /// # Errors
    /// A value is wrong, or the client gave up.
    pub(crate) fn ask_on(&self, client: &Client<'_>, until: Instant) -> anyhow::Result<u64> {
        let Right::Values { keys } = self.right else { return Ok(0) };
        // Other keys than the question's.
        let mut requests = Requests::connect(*client, keys, self.question.seed + 1)?;
        let mut answered = 0;
        while Instant::now() < until {
            requests.get_next()?;
            answered += u64::from(Instant::now() < until);
        }
        requests.close()?;
        Ok(answered)
    }
}
