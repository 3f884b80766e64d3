// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake-bench remote` with a real CRIU on both sides. Needs root and CRIU (`criu` on the PATH, or
//! REWAKE_CRIU).

use std::process::Command;

use crate::common::{criu, images_left, stand_in};
use rewake_skip::need;

#[test]
fn figures_of_parts_that_were_measured_outlive_a_failure() {
    let criu = need!(criu());
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_rewake-bench"));
    command.args(["remote", "--size-mib", "32", "--rounds", "1", "--criu"]).arg(&criu);
    // CRIU on both sides. It cannot serve several clients, which is the last part.
    let rewake = stand_in(directory.path(), &criu, "exec $CRIU \"$@\"");
    command.arg("--rewake").arg(&rewake).arg("--dir").arg(directory.path());
    let output = command.output().unwrap();
    let (text, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(!output.status.success() && log.lines().any(|line| line == "clients"), "{log}");
    let rows: Vec<&str> =
        text.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next()).collect();
    for row in ["stock, stock", "stock, rewake", "rewake, stock", "rewake, rewake", "clear", "TLS"] {
        assert!(rows.contains(&row), "{text}");
    }
    assert_eq!(images_left(directory.path()), 0);
}
