// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake-bench programs` with the Python program and with redis: it must measure each way on one image, and
//! must not report figures when an answer is wrong. Needs root, CRIU (`criu` on the PATH, or REWAKE_CRIU),
//! rewake (REWAKE_BIN), python3-numpy and redis-tools.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::common::{criu, images_left, stand_in};
use rewake_skip::need;

const MIB: u64 = 16;
const WAYS: [&str; 3] = ["eager", "stock", "rewake"];

/// The path of rewake; the reason where there is none.
fn rewake() -> Result<PathBuf, &'static str> {
    let given = std::env::var_os("REWAKE_BIN").map(PathBuf::from);
    let beside = || Path::new(env!("CARGO_BIN_EXE_rewake-bench")).with_file_name("rewake");
    let path = given.unwrap_or_else(beside);
    path.exists().then_some(path).ok_or("no rewake: `cargo build -p rewake`, or set REWAKE_BIN")
}

/// The reason why the Python program cannot run here.
fn numpy() -> Result<(), &'static str> {
    let import = Command::new("/usr/bin/python3").args(["-c", "import numpy"]).output();
    let works = import.is_ok_and(|output| output.status.success());
    works.then_some(()).ok_or("/usr/bin/python3 has no numpy: install python3-numpy")
}

/// The reason why redis cannot run here.
fn redis() -> Result<(), &'static str> {
    let exists = Path::new("/usr/bin/redis-check-rdb").exists();
    exists.then_some(()).ok_or("/usr/bin/redis-check-rdb is missing: install redis-tools")
}

/// Runs the bench with these options.
fn bench(criu: &Path, rewake: &Path, directory: &Path, options: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rewake-bench"));
    command.args(["programs", "--mib", &MIB.to_string()]).args(options);
    command.arg("--criu").arg(criu).arg("--rewake").arg(rewake).arg("--dir").arg(directory);
    command.arg("--json").arg(directory.join("out.json")).output().unwrap()
}

/// The results that the bench wrote.
fn results(directory: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(directory.join("out.json")).unwrap()).unwrap()
}

#[test]
fn three_ways_give_right_answers_in_turn_and_leave_nothing() {
    let criu = need!(criu());
    let rewake = need!(rewake());
    need!(numpy());
    // Cold rounds need a disk, and the directory for temporary files may be a tmpfs.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let output = bench(&criu, &rewake, directory.path(), &["--program", "python", "--rounds", "2"]);
    // It succeeds only when every answer was right.
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let result = results(directory.path());
    let bytes = result["images"][0]["page_bytes"].as_u64().unwrap();
    assert!(bytes > MIB << 20, "{MIB} MiB are filled, {bytes} bytes dumped");
    let samples = result["samples"].as_array().unwrap();
    let order: Vec<_> = samples.iter().map(|sample| [&sample["state"], &sample["way"]]).collect();
    let in_turn = |ways: [&'static str; 3]| {
        let warm = ways.map(|way| ["warm", way]).to_vec();
        [warm, ways.iter().flat_map(|way| [["cold", way], ["again", way]]).collect()].concat()
    };
    let expected = [in_turn(WAYS), in_turn(["stock", "rewake", "eager"])].concat();
    assert_eq!(order, expected, "each way is the first one in some rounds, and \"again\" follows \"cold\"");
    for sample in samples {
        let seconds = |name: &str| sample[name].as_f64().unwrap();
        assert!(seconds("returned_s") > 0.0 && seconds("returned_s") <= seconds("resident_s"), "{sample}");
        assert!(seconds("answered_s") > 0.0 && seconds("whole_answer_s") > 0.0, "{sample}");
        // The first answer reads all, too.
        assert_eq!(seconds("first_repeated_s"), seconds("whole_answer_s"), "{sample}");
        assert!(sample["first_second_requests"].is_null(), "{sample}");
        let cpu = sample["server_cpu_s_per_gb"].as_f64();
        assert_eq!(cpu.is_some_and(|cpu| cpu > 0.0), sample["way"] != "eager", "{sample}");
    }
    let table = String::from_utf8_lossy(&output.stdout);
    let figures = ["first right answer after", "page faults until", "first right answer and its floor"];
    for figure in figures {
        let table = table.split("### ").find(|part| part.starts_with(figure)).expect(figure);
        for row in ["| python, warm |", "| python, cold |", "| python, again |"] {
            assert!(table.contains(row), "{figure}: {table}");
        }
    }
    assert_eq!(images_left(directory.path()), 0);
}

#[test]
fn redis_answers_each_request_right_after_every_kind_of_restore() {
    let criu = need!(criu());
    let rewake = need!(rewake());
    need!(redis());
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let options = ["--program", "redis", "--rounds", "1", "--state", "again"];
    let output = bench(&criu, &rewake, directory.path(), &options);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let result = results(directory.path());
    let bytes = result["images"][0]["page_bytes"].as_u64().unwrap();
    assert!(bytes > MIB << 20, "{MIB} MiB are filled, {bytes} bytes dumped");
    let samples = result["samples"].as_array().unwrap();
    let order: Vec<_> = samples.iter().map(|sample| [&sample["state"], &sample["way"]]).collect();
    assert_eq!(order, WAYS.map(|way| ["again", way]), "the restore before each is not measured");
    for sample in samples {
        let requests = sample["first_second_requests"].as_u64().unwrap();
        if sample["answered_s"].as_f64().unwrap() < 1.0 {
            // One for each value of 4 KiB; the client sends more until the second has passed.
            assert!(requests > MIB * 256, "{sample}");
        }
    }
    let table = String::from_utf8_lossy(&output.stdout);
    let requests = table.split("### requests answered in the first second\n").nth(1).expect("its table");
    assert!(requests.lines().nth(3).is_some_and(|row| row.starts_with("| redis, again |")), "{table}");
    assert!(!table.contains("redis, warm") && !table.contains("redis, cold"), "{table}");
    assert_eq!(images_left(directory.path()), 0);
}

#[test]
fn one_wrong_element_of_a_matrix_is_a_wrong_answer_and_gets_no_figures() {
    let criu = need!(criu());
    need!(numpy());
    let directory = tempfile::tempdir().unwrap();
    // Arguments: lazy-pages -o LOG --status-fd N -D IMAGES -W WORK. The first matrix begins with 0, 158, 60.
    let script = r#"
        cp -r "$7" "$9/spoiled"
        /usr/bin/python3 - "$9"/spoiled/pages-*.img <<'END' || exit 1
import struct, sys
for path in sys.argv[1:]:
    pages = open(path, "rb").read()
    right, wrong = (struct.pack("<3d", 0, second, 60) for second in (158, 159))
    if right in pages:
        open(path, "wb").write(pages.replace(right, wrong))
        sys.exit(0)
sys.exit("no matrix in the image")
END
        exec $CRIU lazy-pages -o lazy.log --status-fd "$5" -D "$9/spoiled" -W "$9""#;
    let rewake = stand_in(directory.path(), &criu, script);
    let output = bench(&criu, &rewake, directory.path(), &["--program", "python", "--rounds", "1"]);
    let error = String::from_utf8_lossy(&output.stderr);
    let last = error.lines().last().unwrap_or_default();
    assert!(!output.status.success(), "{error}");
    let expected =
        "rewake-bench: python: round 1 with (Warm, Rewake): the first answer: wrong answer to \"1001 2\"";
    assert!(last.starts_with(expected), "{error}");
    assert!(output.stdout.is_empty() && !directory.path().join("out.json").exists());
    assert_eq!(images_left(directory.path()), 0);
}

#[test]
fn a_program_that_dies_after_its_restore_is_named_without_a_wait_for_the_time_limit() {
    let criu = need!(criu());
    need!(numpy());
    let directory = tempfile::tempdir().unwrap();
    // Replaces `criu`: a restored program is stopped, so that it cannot answer, and killed.
    let script = r#"
        [ "$1" = restore ] || exec $CRIU "$@"
        $CRIU "$@" --leave-stopped --pidfile "$PWD/target" && kill -KILL $(cat target)"#;
    std::fs::create_dir(directory.path().join("bin")).unwrap();
    let killer = stand_in(&directory.path().join("bin"), &criu, script);
    let began = std::time::Instant::now();
    let output = bench(&killer, &criu, directory.path(), &["--program", "python", "--rounds", "1"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && output.stdout.is_empty(), "{error}");
    let last = error.lines().last().unwrap_or_default();
    assert!(last.contains("python: round 1 with (Warm, Eager)") && last.contains("ended"), "{error}");
    assert!(began.elapsed() < std::time::Duration::from_secs(60), "{:?}", began.elapsed());
    assert_eq!(images_left(directory.path()), 0);
}
