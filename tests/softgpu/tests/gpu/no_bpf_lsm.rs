// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels where the filter can delay no call (no `bpf` among the security modules, as on Ubuntu). All CPU
//! memory is resident before a process with GPUs runs, and gates open together.

use std::fs;
use std::thread;
use std::time::Duration;

use gpu_app::shape::Shape;
use rewake_ioctl_filter::AttachError;
use rewake_skip::need;
use softgpu_tests::criu::{Criu, Version, queues};
use softgpu_tests::dumped::{Dumped, ONE_RING, Restoring, is_paused, soon, unreached};
use softgpu_tests::streamer::number_after;
use softgpu_tests::{Accessor, DelayedCopies, Judge, Machine, Pair, REAL_GPUS, Streamer, isolated};

/// What the streamer logs on such a kernel.
const SAID: &str = "BPF LSM is not available: GPU processes start when all their CPU memory is resident";
/// Long enough to notice a gate that opens too early.
const A_WHILE: Duration = Duration::from_millis(500);

/// The reason where the kernel can delay calls. A machine that was booted without `bpf` must not.
fn without_bpf_lsm() -> Result<(), &'static str> {
    let line = fs::read_to_string("/proc/cmdline").unwrap();
    let mut modules = line.split_whitespace().filter_map(|word| word.strip_prefix("lsm="));
    let asked = modules.any(|modules| modules.split(',').all(|module| module != "bpf"));
    match rewake_ioctl_filter::attach() {
        Ok(_) => assert!(!asked, "calls are held without bpf: {line}"),
        Err(AttachError::Kernel(error)) => {
            let checked = rewake_ioctl_filter::check().unwrap_err();
            assert_eq!(checked.to_string(), error.to_string());
            return Ok(());
        }
        Err(other) => panic!("{other}"),
    }
    Err("this kernel holds calls; `cargo xtask vm --kernel-args lsm=yama` boots one that does not")
}

/// Such a machine, with one copy ring.
fn machine() -> Result<Machine, &'static str> {
    let machine = Machine::find().ok_or(REAL_GPUS)?;
    without_bpf_lsm()?;
    machine.becomes(&ONE_RING);
    Ok(machine)
}

/// Restores the server, with copies held.
fn restores(criu: &Criu) -> (Streamer, DelayedCopies) {
    let (both, delayed) = (Streamer::of_both(criu.images()).unwrap(), DelayedCopies::streamers());
    criu.restore_lazily().unwrap();
    (both, delayed)
}

#[test]
fn all_cpu_memory_is_loaded_before_gpu_memory() {
    isolated(1, |_| {
        let _machine = need!(machine());
        let dumped = need!(Dumped::of(&unreached(), Version::V4_2));
        let (mut both, delayed) = restores(&dumped.criu);
        // The streamer answers before it logs this.
        assert!(soon(|| both.said().contains("loading GPU memory in the background")), "{}", both.said());
        let (waited, said) = (dumped.criu.pages_waited_for(), both.said());
        // The plugin awaits no page where all of them were resident when it looked.
        let before = said.split_once("loading GPU memory in the background").unwrap().0;
        let came_first =
            waited >= number_after(&said, " lazy_pages=") || before.contains("all CPU memory is resident");
        assert!(came_first, "{waited} pages were loaded first: {said}");
        assert!(said.contains(SAID), "{said}");
        assert!(is_paused(dumped.server.pid), "its gate is open");
        drop(delayed);
        assert!(both.end().unwrap().success(), "{}", both.said());
        dumped.server.ends_well();
    });
}

#[test]
fn memory_registered_meanwhile_is_resident() {
    isolated(1, |_| {
        need!(without_bpf_lsm());
        for version in [Version::V4_2, Version::V4_1] {
            let (folder, program) = (tempfile::tempdir().unwrap(), env!("CARGO_BIN_EXE_accessor"));
            let (accessor, criu) = Accessor::about_to_register(program, folder.path(), version).unwrap();
            let mut both = Streamer::of_both(criu.images()).unwrap();
            criu.restore_lazily().unwrap();
            accessor.answer().unwrap_or_else(|error| panic!("{error:#}\n{}", both.said()));
            assert!(both.end().unwrap().success(), "{}", both.said());
            accessor.ends();
        }
    });
}

#[test]
fn by_one_command_memory_of_cpus_is_not_lazy() {
    isolated(1, |_| {
        let _machine = need!(machine());
        let dumped = need!(Dumped::of(&unreached(), Version::V4_2));
        let delayed = DelayedCopies::streamers();
        let mut restoring = Restoring::with(&dumped.criu, &["--", "-d", "-v4"]);
        restoring.says("process is alive");
        assert!(is_paused(dumped.server.pid), "its gate is open");
        assert_eq!(dumped.criu.pages_waited_for(), 0);
        drop(delayed);
        let (well, said) = restoring.end();
        assert!(well && said.contains("all CPU memory is loaded before the processes run"), "{said}");
        dumped.server.ends_well();
    });
}

#[test]
fn processes_are_resumed_together() {
    isolated(1, |_| {
        let _machine = need!(machine());
        let judge = need!(Judge::find(), REAL_GPUS);
        let dumped = need!(Dumped::of(&Shape { processes: 2, ..unreached() }, Version::V4_2));
        let (mut both, delayed) = restores(&dumped.criu);
        delayed.release_until_one_is_resident(&dumped.criu, &both);
        thread::sleep(A_WHILE);
        assert_eq!(judge.closed_gates(), 2, "{}", both.said());
        drop(delayed);
        assert!(both.end().unwrap().success(), "{}", both.said());
        assert_eq!(judge.closed_gates(), 0);
        dumped.server.ends_well();
    });
}

#[test]
fn gpus_of_a_process_are_resumed_together() {
    isolated(2, |_| {
        let folder = tempfile::tempdir().unwrap();
        let _machine = need!(machine());
        need!(queues());
        let (pair, criu) = Pair::dumped(env!("CARGO_BIN_EXE_pair"), folder.path()).unwrap();
        let (mut both, delayed) = restores(&criu);
        let before = pair.counts().unwrap();
        delayed.release_until_one_is_resident(&criu, &both);
        thread::sleep(A_WHILE);
        assert_eq!(pair.counts().unwrap(), before, "{}", both.said());
        drop(delayed);
        assert!(both.end().unwrap().success(), "{}", both.said());
        assert!(pair.continues(&[0, 1]), "{:?}, {}", pair.counts(), both.said());
        pair.ends();
    });
}
