// SPDX-License-Identifier: MIT OR Apache-2.0
//! What other threads report to the coordinator.

use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, Sender, channel};

use anyhow::Context as _;
use rewake_bo_contents::LoadEvent;
use rewake_process::Notifier;

use super::placeholders::Placeholders;
use super::queue_monitor::Opened;
use super::swapping::SwapResult;

/// Something that the coordinator acts on, besides page faults.
#[derive(Debug)]
pub(super) enum CoordinatorEvent<'a> {
    /// The load made a buffer or a process resident.
    Resident(LoadEvent),
    /// The load ended: all memory is resident.
    Loaded,
    /// The load failed.
    LoadFailed,
    /// A thread has stopped a process, or has tried to, and returns its placeholders.
    Swapped {
        /// The process's index.
        process: usize,
        placeholders: Placeholders<'a>,
        result: SwapResult,
    },
    /// A thread has opened the gate of a process; none: the process has ended.
    GateOpened {
        /// The process's index.
        process: usize,
        opened: Option<Opened>,
    },
    /// A thread failed: no process with a closed gate may continue.
    Failed(anyhow::Error),
    /// A thread panicked.
    Panicked(Box<dyn Any + Send>),
}

/// Sends events. A clone sends to the same coordinator.
#[derive(Debug, Clone)]
pub(super) struct EventSender<'a> {
    sender: Sender<CoordinatorEvent<'a>>,
    wakeup: Notifier,
}

/// Receives events. Its descriptor is readable when there may be some.
#[derive(Debug)]
pub(super) struct EventQueue<'a> {
    receiver: Receiver<CoordinatorEvent<'a>>,
    wakeup: Notifier,
}

/// Makes a queue of events.
pub(super) fn event_queue<'a>() -> anyhow::Result<(EventSender<'a>, EventQueue<'a>)> {
    let wakeup = Notifier::new().context("eventfd")?;
    let (sender, receiver) = channel();
    Ok((EventSender { sender, wakeup: wakeup.clone() }, EventQueue { receiver, wakeup }))
}

impl<'a> EventSender<'a> {
    pub(super) fn send(&self, event: CoordinatorEvent<'a>) {
        // A coordinator that has failed receives nothing, and has reported that itself.
        let _ = self.sender.send(event);
        self.wakeup.wake();
    }
}

impl<'a> EventQueue<'a> {
    /// Takes the events so far.
    pub(super) fn take(&self) -> impl Iterator<Item = CoordinatorEvent<'a>> {
        // Drained before the events are taken: a later event wakes again.
        self.wakeup.drain();
        self.receiver.try_iter()
    }
}

impl AsFd for EventQueue<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wakeup.as_fd()
    }
}
