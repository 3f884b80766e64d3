// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake dump`, and what `rewake restore` does with the plugin for GPUs. Machines with a GPU have tests of
//! their own.

use std::fs;
use std::process::{Command, Output, Stdio};

use rewake_tests::daemon::{Daemon, restore, timeline};
use rewake_tests::plugins::{Rig, amdgpu};
use rewake_tests::process::wait_pid;
use rewake_tests::scene::ACT;
use rewake_tests::server::rewake;
use rewake_tests::{Criu, Verdict, need, need_no_gpu};

/// A target, and the plugin in the folder `plugins` under the name that CRIU knows it by.
fn rig(criu: &Criu) -> Result<Rig, String> {
    let rig = Rig::new(criu, "plain", &[]).unwrap()?;
    fs::copy(amdgpu().unwrap(), rig.path("plugins/amdgpu_plugin.so")).unwrap();
    Ok(rig)
}

/// `rewake dump` of a rig's target, not yet started.
fn dump(criu: &Criu, rig: &Rig) -> Command {
    let mut command = Command::new(rewake().unwrap());
    command.args(["dump", "-t", &rig.pid().to_string(), "-D"]).arg(rig.path("images"));
    command.env("CRIU", criu.command("").get_program()).env_remove("CRIU_LIBS_DIR");
    command.stdin(Stdio::null());
    command
}

/// Dumps; the target is collected.
fn dumped(criu: &Criu, rig: &Rig) {
    let output = dump(criu, rig).arg("--plugin-dir").arg(rig.path("plugins")).args(["--", "-v4"]).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", said(&output));
    wait_pid(rig.pid(), ACT).unwrap();
}

/// An open dma-buf of no file of this tree: CRIU does not ask the plugin for it. A file that is added later
/// would be refused in a sealed image, so the image is one that nothing sealed.
fn add_gpu_state(rig: &Rig) {
    fs::remove_file(rig.path("images/rewake-manifest")).unwrap();
    fs::write(rig.path("images/amdgpu-dmabuf_99999.img"), b"\x02\0\0\0\0\0\0\0\x08\x05").unwrap();
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_tree_without_a_gpu_is_dumped_while_the_plugin_is_inactive() {
    need_no_gpu!();
    for criu in Criu::both() {
        let criu = need!(criu);
        let rig = need!(rig(&criu));
        dumped(&criu, &rig);
        let lines = rig.log_lines("dump", "amdgpu_plugin: ");
        assert!(lines.iter().any(|line| line.contains("stepping aside")), "{lines:?}");
        let daemon = Daemon::start().unwrap();
        let mut command = daemon.restore(&criu, &rig.path("images")).unwrap();
        command.arg("-W").arg(rig.path("images")).arg("--plugin-dir").arg(rig.path("plugins"));
        timeline(&command.args(["--", "-d", "-v4"]).output().unwrap()).unwrap();
        let lines = rig.log_lines("restore", "amdgpu_plugin: ");
        assert!(lines.iter().any(|line| line.contains("stepping aside")), "{lines:?}");
        assert_eq!(rig.verdict().unwrap(), Verdict::Ok);
    }
}

#[test]
fn without_a_gpu_no_plugin_is_needed_and_options_reach_criu() {
    need_no_gpu!();
    for criu in Criu::both() {
        let criu = need!(criu);
        let rig = need!(rig(&criu));
        let output = dump(&criu, &rig).args(["--", "-v4", "--leave-running", "-o", "mine.log"]).output();
        assert!(output.as_ref().unwrap().status.success(), "{}", said(&output.unwrap()));
        let log = fs::read(rig.path("images/mine.log")).unwrap();
        let log = String::from_utf8_lossy(&log);
        assert!(log.contains("Dumping finished successfully") && !log.contains("amdgpu_plugin"), "{log}");
        assert!(!rig.path("images/dump.log").exists());
        assert_eq!(rig.verdict().unwrap(), Verdict::Ok, "it was left running");
    }
}

#[test]
fn a_failed_dump_quotes_criu_s_log_and_the_target_continues() {
    for criu in Criu::both() {
        let criu = need!(criu);
        let rig = need!(rig(&criu));
        // A file of the image that cannot be written.
        fs::create_dir(rig.path("images/inventory.img")).unwrap();
        let output = dump(&criu, &rig).output().unwrap();
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("criu: ") && said.contains("Error ("), "{said}");
        let last = said.lines().last().unwrap();
        let log = rig.path("images/dump.log");
        assert!(
            last.starts_with("rewake: criu dump failed") && last.contains(log.to_str().unwrap()),
            "{said}"
        );
        assert_eq!(rig.verdict().unwrap(), Verdict::Ok);
    }
}

#[test]
fn wrong_options_are_one_line_and_criu_is_not_started() {
    let criu = need!(Criu::main());
    let rig = need!(rig(&criu));
    let refused = |options: &[&str], reason: &str| {
        let output = dump(&criu, &rig).args(options).output().unwrap();
        let said = said(&output);
        assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
        assert!(said.contains(reason), "{said}");
        assert!(!rig.path("images/dump.log").exists(), "{said}");
    };
    refused(&["--plugin-dir", "/nowhere"], "--plugin-dir /nowhere: there is no amdgpu_plugin.so in it");
    refused(&["--", "--images-dir=/x"], "--images-dir: give it before `--`");
    let plugins = rig.path("plugins");
    refused(&["--plugin-dir", plugins.to_str().unwrap(), "--", "-L", "/x"], "give one of them");
    refused(&["--criu", "/nowhere/criu"], "starting /nowhere/criu");
}

#[test]
fn an_image_with_gpu_state_is_restored_without_a_page_server() {
    need_no_gpu!();
    for criu in Criu::both() {
        let criu = need!(criu);
        let rig = need!(rig(&criu));
        dumped(&criu, &rig);
        add_gpu_state(&rig);
        let mut command = restore(&criu, &rig.path("images")).unwrap();
        command.arg("-W").arg(rig.path("images")).arg("--plugin-dir").arg(rig.path("plugins"));
        let result = timeline(&command.args(["--", "-d", "-v4"]).output().unwrap()).unwrap();
        assert_eq!(result["session"], serde_json::Value::Null, "{result}");
        assert!(
            result["all_resident_ms"].is_f64() && result["alive_ms"] == result["all_resident_ms"],
            "{result}"
        );
        assert!(rig.log_lines("restore", "lazy-pages.socket").is_empty());
        assert!(!rig.log_lines("restore", "amdgpu_plugin: ").is_empty());
        assert_eq!(rig.verdict().unwrap(), Verdict::Ok);
    }
}

#[test]
fn a_failed_restore_of_gpu_state_quotes_criu() {
    let criu = need!(Criu::main());
    let rig = need!(rig(&criu));
    dumped(&criu, &rig);
    add_gpu_state(&rig);
    fs::remove_file(rig.path(&format!("images/fs-{}.img", rig.pid()))).unwrap();
    let output = restore(&criu, &rig.path("images")).unwrap().args(["--", "-d"]).output().unwrap();
    let said = said(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("criu: ") && said.contains("Error ("), "{said}");
    assert!(said.lines().last().unwrap().starts_with("rewake: criu restore failed"), "{said}");
}
