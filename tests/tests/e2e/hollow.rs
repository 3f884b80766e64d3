// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process is dumped again while its memory is loading. No image has zeros in the place of missing memory.
//! `rewake dump` waits, and so does CRIU with rewake_plugin.so. CRIU without the plugin refuses, and the
//! program continues.
//!
//! `REWAKE_DUMPS` is the number of random moments for each version of CRIU (default 6).

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rewake_tests::Random;
use rewake_tests::plugins::rewake_alone;
use rewake_tests::process::run;
use rewake_tests::random::{count, is_share, moment, seed};
use rewake_tests::scene::ACT;
use rewake_tests::server::rewake;
use rewake_tests::sessions::parked;
use rewake_tests::{Criu, Scene, Verdict, need};

fn rounds() -> usize {
    count("REWAKE_DUMPS", 2)
}

/// How a target is dumped.
enum By<'a> {
    /// `criu dump` without a plugin.
    Criu,
    /// `criu dump` with rewake_plugin.so in this folder.
    Plugin(&'a Path),
    /// `rewake dump`, and a CRIU without a plugin.
    Rewake,
}

/// Dumps a scene's target into a new folder; whether it succeeded, and all that was logged.
fn dump(criu: &Criu, scene: &Scene, by: &By<'_>) -> (bool, String) {
    let images = scene.work().join("again");
    fs::create_dir(&images).unwrap();
    let log = scene.work().join("again.log");
    let mut command = match by {
        By::Criu | By::Plugin(_) => criu.command("dump"),
        By::Rewake => Command::new(rewake().unwrap()),
    };
    if let By::Rewake = by {
        command.arg("dump").env("CRIU", criu.command("").get_program());
    }
    command.args(["-t", &scene.pid().to_string(), "-D"]).arg(&images);
    if let By::Rewake = by {
        command.arg("--");
    }
    command.args(["-v4", "-o", "dump.log"]);
    if let By::Plugin(plugins) = by {
        command.arg("-L").arg(plugins);
    }
    let status = run(command.stderr(File::create(&log).unwrap()), ACT).unwrap();
    let logs = [log, images.join("dump.log")].map(|log| fs::read_to_string(log).unwrap_or_default());
    (status.success(), logs.concat())
}

#[test]
fn a_dump_at_any_moment_waits_for_all_missing_memory() {
    for criu in Criu::both() {
        let criu = need!(criu);
        let mut random = Random::new(seed());
        let mut scene = Scene::dumped(&criu, "plain", 768).unwrap();
        let mut waited = 0;
        for round in 0..rounds() {
            let mut server = scene.serve().unwrap();
            scene.restore().unwrap();
            moment(Duration::from_millis(30), &mut random);
            let plugins = rewake_alone(&scene.work()).unwrap();
            let by = if round % 2 == 0 { By::Plugin(&plugins) } else { By::Rewake };
            let (dumped, log) = dump(&criu, &scene, &by);
            assert!(dumped, "{log}");
            waited += usize::from(log.contains("the dump waits until all memory of its tree is resident"));
            assert!(server.ended(ACT).unwrap().success(), "{}", server.text());
            // CRIU alone restores the new image. The pid must be free for that.
            scene.kill_restored();
            let again = scene.work().join("again");
            let mut command = criu.command("restore");
            command.args(["-d", "-v4", "-o", "restore.log", "-D"]).arg(&again).arg("-L").arg(&plugins);
            assert!(run(&mut command, ACT).unwrap().success());
            scene.go().unwrap();
            assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", scene.logs());
            scene.next_round().unwrap();
        }
        assert!(
            is_share(waited, 2, rounds()),
            "{waited} of {} dumps came while memory was missing",
            rounds()
        );
    }
}

#[test]
fn without_the_plugin_criu_refuses_and_the_program_runs_on() {
    for criu in Criu::both() {
        let criu = need!(criu);
        let mut scene = Scene::dumped(&criu, "plain", 1024).unwrap();
        let mut refused = 0;
        for _ in 0..rounds() {
            let mut server = scene.serve().unwrap();
            scene.restore().unwrap();
            // Before that, docs/threat-model.md promises nothing without the plugin.
            parked(scene.pid(), || server.text().contains("all CPU memory is resident")).unwrap();
            let (dumped, log) = dump(&criu, &scene, &By::Criu);
            if dumped {
                // All memory was resident by then, and the store was unparked.
                assert!(server.ended(ACT).unwrap().success(), "{log}");
            } else {
                refused += 1;
                assert!(log.contains("anon_inode:[userfaultfd]"), "refused for another reason: {log}");
                scene.go().unwrap();
                assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", scene.logs());
            }
            scene.next_round().unwrap();
        }
        assert!(is_share(refused, 2, rounds()), "{refused} of {} dumps were refused", rounds());
    }
}
