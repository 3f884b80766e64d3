// SPDX-License-Identifier: MIT OR Apache-2.0
//! Hard limits of the caller, without CAP_SYS_RESOURCE, as containers and batch systems set them: where stock
//! CRIU serves, so does `rewake lazy-pages`.

use std::path::PathBuf;

use rewake_tests::process::write_program;
use rewake_tests::server::rewake;
use rewake_tests::{Criu, Scene, need};

const MIB: usize = 32;

/// A program that runs `rewake` with limits.
fn limited(scene: &Scene, limit: &str) -> PathBuf {
    let program = scene.work().join("limited");
    let drops = "setpriv --bounding-set -sys_resource --inh-caps -sys_resource";
    let text = format!("#!/bin/sh\nulimit {limit} && exec {drops} {} \"$@\"\n", rewake().unwrap().display());
    write_program(&program, &text).unwrap();
    program
}

#[test]
fn an_image_is_served_within_the_callers_limits() {
    let criu = need!(Criu::main());
    let mut scene = Scene::dumped(&criu, "plain", MIB).unwrap();
    // Kibibytes of address space, blocks of 512 bytes of a file, open files.
    for limit in ["-v 2000000", "-v 500000", "-f 8192", "-f 4096", "-n 64"] {
        let setup = scene.setup().unwrap().by(&limited(&scene, limit));
        let mut server = setup.start().unwrap().unwrap_or_else(|refusal| panic!("{limit}: {refusal:?}"));
        scene.play_with(&mut server).unwrap_or_else(|error| panic!("{limit}: {error:#}"));
        scene.next_round().unwrap();
    }
}

#[test]
fn a_limit_that_is_too_low_is_named_with_the_way_out() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", MIB).unwrap();
    for (limit, named) in
        [("-n 12", "12 open files (`ulimit -n`)"), ("-f 1", "512 bytes in a file (`ulimit -f`)")]
    {
        let setup = scene.setup().unwrap().by(&limited(&scene, limit));
        let refusal = setup.start().unwrap().unwrap_err();
        assert!(refusal.line_with(&["rewake: ", named, "raise it"]), "{limit}: {refusal:?}");
    }
}
