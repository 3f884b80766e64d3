// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake-bench remote` with a real CRIU on both sides. Needs root and CRIU (`criu` on the PATH, or REWAKE_CRIU).

mod common;

use std::process::Command;

use common::{criu, images_left, stand_in};
use rewake_skip::need;

#[test]
fn each_server_is_measured_with_each_client() {
    let criu = need!(criu());
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_rewake-bench"));
    command.args(["remote", "--size-mib", "32", "--rounds", "1", "--criu"]).arg(&criu);
    // The same program on both sides.
    let rewake = stand_in(directory.path(), &criu, "exec $CRIU \"$@\"");
    command.arg("--rewake").arg(&rewake).arg("--dir").arg(directory.path());
    let output = command.output().unwrap();
    let (text, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{log}");
    let rows: Vec<&str> =
        text.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next()).collect();
    for row in ["stock, stock", "stock, rewake", "rewake, stock", "rewake, rewake"] {
        assert!(rows.contains(&row), "{text}");
    }
    assert_eq!(images_left(directory.path()), 0);
}
