// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests a successor of a worker that was killed while it closed a session.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rewake_plugin_protocol::ProcessId;

use super::Worker;
use crate::ledger::session_store;
use crate::ledger::{Ledger, SessionState, Starter};

/// Time to start a process that examines all other processes.
const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn a_successor_takes_back_the_store_of_a_closing_session() {
    let own = ProcessId::of(std::process::id().cast_signed()).unwrap().unwrap();
    // Of the second one the dead worker had taken the store from the slot already.
    for taken in [false, true] {
        let ledger = Ledger::new().unwrap();
        let slot = ledger.session();
        slot.set_paths(Path::new("/images"), Path::new("/work")).unwrap();
        session_store::make(slot).unwrap();
        slot.set_state(SessionState::Closing);
        if taken {
            drop(slot.take_store());
        }
        assert!(!ledger.is_depended_on());
        let worker = Worker::start(ledger, Starter { folder: own.to_string(), process: own }).unwrap();
        assert!(worker.inherit().unwrap().is_none());
        let start = Instant::now();
        while slot.state() != SessionState::Free {
            assert!(start.elapsed() < LIMIT, "it is not free after {LIMIT:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(slot.inode.load(Ordering::Acquire), 0);
    }
}
