// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests a successor of a worker that was killed while it closed a session.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rewake_plugin_protocol::ProcessId;

use super::Daemon;
use crate::ledger::session_store;
use crate::ledger::{Ledger, SessionState};

/// Time to start a process that examines all other processes.
const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn a_successor_takes_back_the_store_of_a_closing_session() {
    let ledger = Ledger::new().unwrap();
    let own = ProcessId::of(std::process::id().cast_signed()).unwrap().unwrap();
    let slots = [(); 2].map(|()| ledger.take_session().unwrap()).map(|index| &ledger.sessions()[index]);
    for slot in slots {
        slot.set_paths(Path::new("/images"), Path::new("/work")).unwrap();
        session_store::make(slot).unwrap();
        slot.set_state(SessionState::Closing);
    }
    // The worker of the second one had taken the store from the slot already.
    drop(slots[1].take_store());
    assert!(!ledger.is_depended_on());
    let daemon = Daemon::start(ledger, own).unwrap();
    assert!(daemon.inherit().is_empty());
    let start = Instant::now();
    while slots.iter().any(|slot| slot.state() != SessionState::Free) {
        assert!(start.elapsed() < LIMIT, "they are not free after {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(slots.iter().all(|slot| slot.inode.load(Ordering::Acquire) == 0));
}
