// SPDX-License-Identifier: MIT OR Apache-2.0
//! Each gate opens when all memory of its process is resident, whatever other processes wait for. No process
//! receives missing memory of another. All GPUs of a process are resumed together.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use gpu_app::shape::Shape;
use rewake_skip::need;
use softgpu_tests::criu::{Criu, Version, queues};
use softgpu_tests::dumped::{Dumped, ONE_RING, soon, unreached};
use softgpu_tests::{Accessor, DelayedCopies, Judge, Machine, Pair, REAL_GPUS, Streamer, isolated};

/// Long enough to notice a gate that opens too early.
const A_WHILE: Duration = Duration::from_millis(500);

fn restores(criu: &Criu) -> Streamer {
    let both = Streamer::of_both(criu.images()).unwrap();
    criu.restore_lazily().unwrap();
    both
}

#[test]
fn a_process_runs_while_another_waits_for_its_memory() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        let judge = need!(Judge::find(), REAL_GPUS);
        let dumped = need!(Dumped::of(&Shape { processes: 2, ..unreached() }, Version::V4_2));
        let delayed = DelayedCopies::streamers();
        let mut both = restores(&dumped.criu);
        assert_eq!(judge.closed_gates(), 2, "{}", both.said());
        delayed.release_until_one_is_resident(&dumped.criu, &both);
        assert!(soon(|| judge.closed_gates() == 1), "{}", both.said());
        assert!(!both.has_ended().unwrap(), "{}", both.said());
        drop(delayed);
        assert!(both.end().unwrap().success(), "{}", both.said());
        assert_eq!(judge.closed_gates(), 0);
        dumped.server.ends_well();
    });
}

#[test]
fn a_buffer_is_not_handed_over_before_it_is_resident() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        let folder = tempfile::tempdir().unwrap();
        let mut accessor = Accessor::start(env!("CARGO_BIN_EXE_accessor"), folder.path(), None).unwrap();
        let criu = accessor.dump(Version::V4_2).unwrap();
        accessor.ask("export 0").unwrap();
        let delayed = DelayedCopies::streamers();
        let mut both = restores(&criu);
        assert!(soon(|| accessor.log().contains("EAGAIN")), "{}", both.said());
        assert_eq!(accessor.answered(), None, "{}", both.said());
        drop(delayed);
        accessor.answer().unwrap_or_else(|error| panic!("{error:#}\n{}", both.said()));
        assert!(both.end().unwrap().success(), "{}", both.said());
        accessor.ends();
    });
}

/// Whether plugins refuse to dump a process.
fn is_marked(pid: u32) -> bool {
    let mut files = fs::read_dir("/run/rewake/dump-blocks").unwrap().map(|file| file.unwrap().file_name());
    files.any(|name| name.to_str().unwrap().starts_with(&format!("{pid}-")))
}

/// A restored process with two GPUs. The memory of one GPU is resident; the load of the other is held.
struct HalfResident {
    pair: Pair,
    delayed: DelayedCopies,
    streamer: Streamer,
    judge: Judge,
}

impl HalfResident {
    fn restored(machine: &Machine, folder: &Path) -> Result<Self, &'static str> {
        machine.becomes(&ONE_RING);
        let judge = Judge::find().ok_or(REAL_GPUS)?;
        queues()?;
        let (pair, criu) = Pair::dumped(env!("CARGO_BIN_EXE_pair"), folder).unwrap();
        let delayed = DelayedCopies::streamers();
        let streamer = restores(&criu);
        delayed.release_until_one_is_resident(&criu, &streamer);
        Ok(Self { pair, delayed, streamer, judge })
    }

    /// Loads the rest, and waits until the streamer ends well.
    fn loads_the_rest(self) -> Pair {
        let Self { pair, delayed, mut streamer, judge } = self;
        drop(delayed);
        assert!(streamer.end().unwrap().success(), "{}", streamer.said());
        assert_eq!(
            (judge.closed_gates(), judge.violations()),
            (0, Vec::<String>::new()),
            "{}",
            streamer.said()
        );
        assert!(!is_marked(pair.pid()));
        pair
    }
}

#[test]
fn gpus_are_resumed_together_when_the_memory_of_all_is_resident() {
    isolated(2, |_| {
        let folder = tempfile::tempdir().unwrap();
        let machine = need!(Machine::find(), REAL_GPUS);
        let half = need!(HalfResident::restored(&machine, folder.path()));
        let before = half.pair.counts().unwrap();
        thread::sleep(A_WHILE);
        let (pid, said) = (half.pair.pid(), half.streamer.said());
        assert_eq!(
            (half.pair.counts().unwrap(), half.judge.closed_gates(), is_marked(pid)),
            (before, 1, true),
            "{said}"
        );
        let pair = half.loads_the_rest();
        assert!(pair.continues(&[0, 1]), "{:?}", pair.counts());
        pair.ends();
    });
}

#[test]
fn a_process_may_destroy_queues_while_its_gate_is_closed() {
    isolated(2, |_| {
        let folder = tempfile::tempdir().unwrap();
        let machine = need!(Machine::find(), REAL_GPUS);
        let half = need!(HalfResident::restored(&machine, folder.path()));
        half.pair.asked("end-1").unwrap();
        let pair = half.loads_the_rest();
        assert!(pair.continues(&[0]), "{:?}", pair.counts());
        pair.ends();
    });
}

#[test]
fn a_process_killed_while_its_gate_is_closed_is_released() {
    isolated(2, |_| {
        let folder = tempfile::tempdir().unwrap();
        let machine = need!(Machine::find(), REAL_GPUS);
        let half = need!(HalfResident::restored(&machine, folder.path()));
        half.pair.ends();
        half.loads_the_rest();
    });
}

#[test]
fn gpus_of_a_process_that_has_closed_their_driver_are_resumed() {
    isolated(2, |_| {
        let folder = tempfile::tempdir().unwrap();
        let machine = need!(Machine::find(), REAL_GPUS);
        let half = need!(HalfResident::restored(&machine, folder.path()));
        half.pair.asked("close").unwrap();
        let pair = half.loads_the_rest();
        assert!(pair.continues(&[0, 1]), "{:?}", pair.counts());
        pair.ends();
    });
}

#[test]
fn a_process_that_execs_while_its_gate_is_closed_is_released() {
    isolated(2, |_| {
        let folder = tempfile::tempdir().unwrap();
        let machine = need!(Machine::find(), REAL_GPUS);
        let half = need!(HalfResident::restored(&machine, folder.path()));
        half.pair.asked("execute").unwrap();
        half.loads_the_rest().ends();
    });
}
