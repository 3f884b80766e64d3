// SPDX-License-Identifier: MIT OR Apache-2.0
//! What `rewake restore` shows while memory of CPUs and of GPUs comes back, and what it shows of it when it is there.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tokio::time::{MissedTickBehavior, interval};

use super::super::picture;
use super::bar::Bar;
use crate::control::REPORT;
use crate::control::client::Client;
use crate::control::status_server::socket;
use rewake_streamer::record::{files, text};

/// Follows the streamer of a work directory to its end, and tells how it went. Where it cannot be asked nothing is shown:
/// the restore is the same.
pub(super) async fn follow(work: PathBuf, quiet: bool, started: SystemTime) {
    let mut bar = Bar::new(quiet);
    if let Ok(mut client) = Client::connect(&socket(&work)).await {
        let mut asks = interval(REPORT);
        asks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // It closes the connection when it ends.
        while let Ok(now) = client.streaming().await {
            if picture::is_loading(&now) {
                bar.show_lines(&picture::lines(&now));
            }
            asks.tick().await;
        }
    }
    bar.clear();
    tell(&work, &bar, started);
}

fn tell(work: &Path, bar: &Bar, started: SystemTime) {
    match files::read(work) {
        Ok(Some(record)) => {
            let handed_over = SystemTime::UNIX_EPOCH + Duration::from_millis(record.handed_over_unix_ms);
            // It is negative only where somebody has set the clock meanwhile.
            bar.say(&text::text(&record, handed_over.duration_since(started).unwrap_or_default()));
        }
        // It took nothing over, or was killed.
        Ok(None) => {}
        Err(error) => bar.say(&format!("rewake: {error:#}\n")),
    }
}
