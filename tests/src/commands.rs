// SPDX-License-Identifier: MIT OR Apache-2.0
//! Commands of `rewake` that end by themselves.

use std::process::Command;

use rewake_testkit::programs::rewake;

/// Runs `rewake` with these arguments. Returns whether it succeeded, and what it wrote.
///
/// # Panics
/// It cannot be started, or wrote what is no text.
#[must_use]
pub fn run(arguments: &[&str]) -> (bool, String) {
    let output = Command::new(rewake().unwrap()).args(arguments).output().unwrap();
    (output.status.success(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
}

/// Runs it, and returns what it wrote: it succeeds.
///
/// # Panics
/// It fails.
pub fn done(arguments: &[&str]) -> String {
    let (succeeded, said) = run(arguments);
    assert!(succeeded, "{arguments:?}: {said}");
    said
}

/// Runs it, and returns its one line: it fails.
///
/// # Panics
/// It succeeds, or writes other than one line.
pub fn refused(arguments: &[&str]) -> String {
    let (succeeded, said) = run(arguments);
    assert!(!succeeded && said.lines().count() == 1, "{arguments:?}: {said}");
    said
}
