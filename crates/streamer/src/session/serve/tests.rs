// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests how a session ends: with GPU memory that is missing, and by a successor of a worker that was killed.

use std::future::Future as _;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use rewake_plugin_protocol::ProcessId;

use tokio::sync::watch;

use super::{Worker, wait_for_gpus};
use crate::gpu::GpuLoad;
use crate::ledger::{Ledger, SessionState, Starter};
use crate::session::Session;
use crate::working_set::LoadingOptions;

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
        slot.stores.make(7).unwrap();
        slot.set_state(SessionState::Closing);
        if taken {
            slot.stores.all().for_each(|(_, place)| drop(place.take()));
        }
        assert!(!ledger.is_depended_on());
        let worker = Worker::start(ledger, Starter { folder: own.to_string(), process: own }).unwrap();
        assert!(worker.inherit(LoadingOptions::default()).unwrap().is_none());
        let start = Instant::now();
        while slot.state() != SessionState::Free {
            assert!(start.elapsed() < LIMIT, "it is not free after {LIMIT:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
        // This test's program is no `rewake park`, so the next recovery is to look for who keeps a store,
        // unless its last descriptor was seen to close.
        assert_eq!(slot.stores.inodes().is_empty(), !taken);
    }
}

#[test]
fn an_old_notice_does_not_end_the_wait_for_gpu_memory() {
    for fails in [false, true] {
        let session = Session::new(PathBuf::from("/images"));
        let (load, over) = watch::channel(GpuLoad::Running);
        // The last address space is closed, and no task waits for it.
        session.space_opened();
        session.space_closed();
        let mut wait = pin!(wait_for_gpus(&session, over));
        let mut poll = || wait.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert_eq!(poll(), Poll::Pending, "GPU memory is missing");
        if fails {
            session.fail("a test");
        } else {
            load.send(GpuLoad::Done).unwrap();
        }
        assert_eq!(poll(), Poll::Ready(()));
    }
}
