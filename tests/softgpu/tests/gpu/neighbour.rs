// SPDX-License-Identifier: MIT OR Apache-2.0
//! Another program computes on the GPU whose memory is loaded: neither disturbs the other.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use rewake_skip::need;
use softgpu_tests::criu::{Version, queues, wait_for_the_end_of};
use softgpu_tests::dumped::{Dumped, ONE_RING, is_paused, unreached};
use softgpu_tests::{DelayedCopies, Machine, REAL_GPUS, Server, Streamer, isolated};

/// Sets its flag when dropped, also when a test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_server_answers_while_another_is_restored_on_its_gpu() {
    isolated(1, |_| {
        need!(queues());
        let machine = need!(Machine::find(), REAL_GPUS);
        machine.becomes(&ONE_RING);
        let folder = tempfile::tempdir().unwrap();
        let other = Server::start(&unreached(), folder.path());
        let dumped = need!(Dumped::beside_another(&unreached(), Version::V4_2));
        let over = AtomicBool::new(false);
        let answered = thread::scope(|scope| {
            let answering = scope.spawn(|| {
                // The answer that was begun.
                other.answers().unwrap();
                let mut answered = 0;
                while !over.load(Ordering::Relaxed) {
                    other.app.answers(&[3, answered], 2).unwrap();
                    answered += 1;
                }
                answered
            });
            let over = Over(&over);
            let (mut streamer, delayed) =
                (Streamer::of_both(dumped.criu.images()).unwrap(), DelayedCopies::streamers());
            dumped.criu.restore_lazily().unwrap();
            assert!(is_paused(dumped.server.pid), "{}", streamer.said());
            assert!(!is_paused(other.pid), "{}", streamer.said());
            drop(delayed);
            assert!(streamer.end().unwrap().success(), "{}", streamer.said());
            dumped.server.ends_well();
            drop(over);
            answering.join().unwrap()
        });
        assert!(answered > 2, "{answered} answers");
        other.app.quit().unwrap();
        wait_for_the_end_of(other.pid).unwrap();
    });
}
