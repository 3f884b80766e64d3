// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ctrl-C, SIGTERM and SIGHUP as a wish to end a migration, which its state may refuse.

use std::sync::mpsc::{Receiver, channel};
use std::thread;

use anyhow::Context as _;
use nix::sys::signal::{SigSet, Signal};

/// Receives the wishes. Called before any thread exists: all threads block these signals.
pub(super) fn watch() -> anyhow::Result<Receiver<()>> {
    let mut signals = SigSet::empty();
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().for_each(|signal| signals.add(signal));
    signals.thread_block().context("blocking signals")?;
    let (sender, receiver) = channel();
    thread::spawn(move || while signals.wait().is_ok() && sender.send(()).is_ok() {});
    Ok(receiver)
}
