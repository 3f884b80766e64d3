// SPDX-License-Identifier: MIT OR Apache-2.0
//! The bench with a real CRIU: it must measure two servers side by side, and must never report figures of a
//! server that did not restore the memory. Needs root and CRIU (`criu` on the PATH, or REWAKE_CRIU).

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::{criu, images_left, stand_in};
use rewake_skip::need;

fn bench(criu: &Path, rewake: &Path, directory: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rewake-bench"));
    command.args(["lazy", "--size-mib", "32", "--rounds", "2", "--criu"]).arg(criu);
    command.arg("--rewake").arg(rewake).arg("--dir").arg(directory);
    command.arg("--json").arg(directory.join("out.json"));
    command.arg("--markdown").arg(directory.join("out.md")).output().unwrap()
}

#[test]
fn two_servers_are_measured_in_turn_and_nothing_is_left() {
    let criu = need!(criu());
    let directory = tempfile::tempdir().unwrap();
    // The same server on both sides: pairs must exist, and no ratio may be far from one by construction.
    let output = bench(&criu, &criu, directory.path());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let json = std::fs::read(directory.path().join("out.json")).unwrap();
    let result: serde_json::Value = serde_json::from_slice(&json).unwrap();
    let samples = result["samples"].as_array().unwrap();
    let order: Vec<&str> = samples.iter().map(|sample| sample["way"].as_str().unwrap()).collect();
    assert_eq!(order, ["stock", "rewake", "stock", "rewake"]);
    for sample in samples {
        assert!(sample["restore_s"].as_f64() < sample["resident_s"].as_f64(), "{sample}");
        assert!(sample["cpu_s_per_gb"].as_f64().unwrap() > 0.0, "{sample}");
        assert!(sample["memory"]["largest"].as_u64().unwrap() > 1 << 20, "{sample}");
        assert!(sample["touched"]["touches"].as_u64().unwrap() > 0, "{sample}");
        // On a busy machine all may be resident before the first access.
        let faults = sample["touched"]["faults"].as_u64().unwrap();
        assert_eq!(faults > 0, sample["touched"]["latency"]["max"].as_u64().is_some(), "{sample}");
        assert_eq!(sample["touched"]["wrong_words"], 0, "{sample}");
    }
    assert!(result["limits"]["fill_gb_per_s"][1].as_f64().unwrap() > 0.0);
    assert!(std::fs::read_to_string(directory.path().join("out.md")).unwrap().contains("| fault p99 | µs |"));
    assert_eq!(images_left(directory.path()), 0);
}

#[test]
fn a_server_that_gives_wrong_bytes_gets_no_figures() {
    let criu = need!(criu());
    let directory = tempfile::tempdir().unwrap();
    // Arguments: lazy-pages -o LOG --status-fd N -D IMAGES -W WORK
    let script = "
        cp -r \"$7\" \"$9/spoiled\"
        pages=$(ls -S \"$9\"/spoiled/pages-*.img | head -n 1)
        dd if=/dev/zero of=\"$pages\" bs=4096 seek=4000 count=1 conv=notrunc 2>/dev/null
        exec $CRIU lazy-pages -o lazy.log --status-fd \"$5\" -D \"$9/spoiled\" -W \"$9\"";
    let rewake = stand_in(directory.path(), &criu, script);
    let output = bench(&criu, &rewake, directory.path());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("wrong bytes"), "{error}");
    assert!(output.stdout.is_empty());
    assert_eq!(images_left(directory.path()), 0);
}

#[test]
fn a_server_that_dies_before_it_listens_is_named() {
    let criu = need!(criu());
    let directory = tempfile::tempdir().unwrap();
    let rewake = stand_in(directory.path(), &criu, "echo no luck > lazy.log; exit 3");
    let output = bench(&criu, &rewake, directory.path());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{error}");
    assert!(error.contains("round 1 with Rewake") && error.contains("no luck"), "{error}");
}

#[test]
fn an_interrupted_run_leaves_nothing_behind() {
    let criu = need!(criu());
    let directory = tempfile::tempdir().unwrap();
    // Ignores the status descriptor for longer than any time limit, and ends when the bench cleans up.
    let script = "echo $$ > ../../server; exec sleep 600";
    let rewake = stand_in(directory.path(), &criu, script);
    let mut command = Command::new(env!("CARGO_BIN_EXE_rewake-bench"));
    command.args(["lazy", "--size-mib", "32", "--criu"]).arg(&criu).arg("--rewake").arg(&rewake);
    let mut bench = command.arg("--dir").arg(directory.path()).stderr(Stdio::null()).spawn().unwrap();
    let server = directory.path().join("server");
    while !std::fs::read(&server).is_ok_and(|pid| pid.ends_with(b"\n")) {
        assert!(bench.try_wait().unwrap().is_none(), "the bench ended before its server ran");
        std::thread::sleep(Duration::from_millis(10));
    }
    let pid = i32::try_from(bench.id()).unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGTERM).unwrap();
    let interrupted = Instant::now();
    assert!(!bench.wait().unwrap().success());
    assert!(interrupted.elapsed() < Duration::from_secs(60), "{:?}", interrupted.elapsed());
    assert_eq!(images_left(directory.path()), 0);
    let server = std::fs::read_to_string(server).unwrap();
    assert!(!Path::new("/proc").join(server.trim()).exists(), "the server still runs");
}
