// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls that wait for the disk.

use anyhow::Context as _;
use tokio::task::spawn_blocking;

/// Makes such a call in a thread of its own, so that other clients are served at the same time.
pub(crate) async fn in_thread<T: Send + 'static>(
    call: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    spawn_blocking(call).await.context("a thread that waits for the disk has ended")?
}
