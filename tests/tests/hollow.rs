// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process is dumped again while its memory is loading. No image has zeros in the place of missing memory: CRIU with
//! rewake_plugin.so waits, CRIU without it refuses, and the program runs on.
//!
//! `REWAKE_DUMPS` is the number of random moments for each version of CRIU (default 6).

use std::ffi::OsStr;
use std::fs;
use std::time::Duration;

use rewake_tests::pattern::Random;
use rewake_tests::plugins::rewake_alone;
use rewake_tests::process::run;
use rewake_tests::random::{count, moment, seed};
use rewake_tests::scene::ACT;
use rewake_tests::sessions::parked;
use rewake_tests::{Criu, Scene, Verdict, need};

fn rounds() -> usize {
    count("REWAKE_DUMPS", 6)
}

/// `criu dump` of a scene's target into a new folder; whether it succeeded, and its log.
fn dump(criu: &Criu, scene: &Scene, plugins: Option<&OsStr>) -> (bool, String) {
    let images = scene.work().join("again");
    fs::create_dir(&images).unwrap();
    let mut command = criu.command("dump");
    command.args(["-t", &scene.pid().to_string(), "-v4", "-o", "dump.log", "-D"]).arg(&images);
    if let Some(plugins) = plugins {
        command.arg("-L").arg(plugins);
    }
    let status = run(&mut command, ACT).unwrap();
    (status.success(), fs::read_to_string(images.join("dump.log")).unwrap_or_default())
}

#[test]
fn with_the_plugin_a_dump_at_any_moment_waits_and_the_image_is_whole() {
    for criu in Criu::both() {
        let criu = need!(criu);
        let mut random = Random::new(seed());
        let mut scene = Scene::dumped(&criu, "plain", 256).unwrap();
        let mut waited = 0;
        for _ in 0..rounds() {
            let mut server = scene.serve().unwrap();
            scene.restore().unwrap();
            moment(Duration::from_millis(30), &mut random);
            let plugins = rewake_alone(&scene.work()).unwrap();
            let (dumped, log) = dump(&criu, &scene, Some(plugins.as_os_str()));
            assert!(dumped, "{log}");
            waited += usize::from(log.contains("the dump waits until all memory of its tree is resident"));
            assert!(server.ended(ACT).unwrap().success(), "{}", server.text());
            // What it dumped is restored by CRIU alone. The pid must be free for that.
            scene.kill_restored();
            let again = scene.work().join("again");
            let mut command = criu.command("restore");
            command.args(["-d", "-v4", "-o", "restore.log", "-D"]).arg(&again).arg("-L").arg(&plugins);
            assert!(run(&mut command, ACT).unwrap().success());
            scene.go().unwrap();
            assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", scene.logs());
            scene.next_round().unwrap();
        }
        assert!(waited * 2 >= rounds(), "{waited} of {} dumps came while memory was missing", rounds());
    }
}

#[test]
fn without_the_plugin_criu_refuses_and_the_program_runs_on() {
    for criu in Criu::both() {
        let criu = need!(criu);
        let mut scene = Scene::dumped(&criu, "plain", 512).unwrap();
        let mut refused = 0;
        for _ in 0..rounds() {
            let mut server = scene.serve().unwrap();
            scene.restore().unwrap();
            // Before that, docs/threat-model.md promises nothing without the plugin.
            parked(scene.pid(), || server.text().contains("all memory is back")).unwrap();
            let (dumped, log) = dump(&criu, &scene, None);
            if dumped {
                // All was resident by then, and the store taken back.
                assert!(server.ended(ACT).unwrap().success(), "{log}");
            } else {
                refused += 1;
                assert!(log.contains("Error"), "{log}");
                scene.go().unwrap();
                assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", scene.logs());
            }
            scene.next_round().unwrap();
        }
        assert!(refused * 2 >= rounds(), "{refused} of {} dumps were refused", rounds());
    }
}
