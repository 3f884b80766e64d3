// SPDX-License-Identifier: MIT OR Apache-2.0
//! `amdgpu_plugin.so` on a machine without a GPU: it has no effect, and CRIU's log has a line about that.

use std::fs;
use std::path::Path;

use rewake_tests::plugins::{Rig, amdgpu, observer};
use rewake_tests::{Criu, Verdict, need, need_no_gpu};

/// How often the images' inventory holds a text.
fn named(rig: &Rig, name: &str) -> usize {
    let inventory = fs::read(rig.path("images/inventory.img")).unwrap();
    inventory.windows(name.len()).filter(|window| *window == name.as_bytes()).count()
}

#[test]
fn without_devices_dump_and_restore_are_as_without_the_plugin() {
    need_no_gpu!();
    for criu in Criu::both() {
        let criu = need!(criu);
        let mut rig = need!(Rig::new(&criu, "plain", &[amdgpu().unwrap()]).unwrap());
        rig.dump(&[]).unwrap();
        let said = rig.log_lines("dump", "amdgpu_plugin: ");
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].ends_with("amdgpu_plugin: this machine has no AMD GPU: stepping aside"), "{said:?}");
        assert_eq!(named(&rig, "amdgpu_plugin"), 0);
        rig.restore(&[]).unwrap();
        let said = rig.log_lines("restore", "amdgpu_plugin: ");
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(
            said[0].ends_with("amdgpu_plugin: the image has no AMD GPU's state: stepping aside"),
            "{said:?}"
        );
        assert_eq!(rig.verdict().unwrap(), Verdict::Ok);
    }
}

#[test]
fn devices_of_another_plugin_are_left_to_it() {
    need_no_gpu!();
    for criu in Criu::both() {
        let criu = need!(criu);
        let plugins = [amdgpu().unwrap(), observer().unwrap()];
        let mut rig = need!(Rig::new(&criu, "device", &plugins).unwrap());
        rig.dump(&[]).unwrap();
        assert_eq!((named(&rig, "observer"), named(&rig, "amdgpu_plugin")), (1, 0));
        rig.restore(&[]).unwrap();
        assert_eq!(rig.calls().iter().filter(|call| call.starts_with("UPDATE_VMA_MAP")).count(), 2);
        assert_eq!(rig.verdict().unwrap(), Verdict::Ok);
    }
}

#[test]
fn a_device_without_a_plugin_fails_the_dump() {
    need_no_gpu!();
    for criu in Criu::both() {
        let criu = need!(criu);
        let mut rig = need!(Rig::new(&criu, "device", &[amdgpu().unwrap()]).unwrap());
        rig.dump(&[]).expect_err("no plugin takes the device");
        assert!(rig.log_lines("dump", "Error (amdgpu_plugin)").is_empty());
        assert_eq!(rig.verdict().unwrap(), Verdict::Ok, "the target continues");
    }
}

#[test]
fn an_image_with_gpu_state_is_refused_with_the_file_s_name() {
    need_no_gpu!();
    for criu in Criu::both() {
        let criu = need!(criu);
        let mut rig = need!(Rig::new(&criu, "device", &[observer().unwrap()]).unwrap());
        rig.dump(&[]).unwrap();
        // The state of a stock plugin's image: its name in place of the observer's, and its file.
        let id = observed_file(&rig);
        let stock = "../crates/criu-images/fuzz/corpus/amdgpu-kfd/good-stock-4.2.1";
        let stock = Path::new(env!("CARGO_MANIFEST_DIR")).join(stock);
        fs::copy(stock, rig.path(&format!("images/amdgpu-kfd-{id}.img"))).unwrap();
        rename_in_inventory(&rig);
        fs::remove_file(rig.path("plugins/libobserver.so")).unwrap();
        fs::copy(amdgpu().unwrap(), rig.path("plugins/amdgpu_plugin.so")).unwrap();
        rig.restore(&[]).expect_err("GPU state");
        let lines = rig.log_lines("restore", "Error (amdgpu_plugin): ");
        assert_eq!(lines.len(), 1, "{lines:?}");
        let said = format!("init: amdgpu-kfd-{id}.img: GPU state, and this machine has no AMD GPU");
        assert!(lines[0].contains(&said), "{lines:?}");
    }
}

/// The id of the file that the observer dumped.
fn observed_file(rig: &Rig) -> String {
    let names = fs::read_dir(rig.path("images")).unwrap().map(|entry| entry.unwrap().file_name());
    let names = names.map(|name| name.to_string_lossy().into_owned());
    let ids = names.filter_map(|name| Some(name.strip_prefix("observer-")?.strip_suffix(".img")?.to_owned()));
    ids.last().expect("a file of the observer")
}

/// Puts `amdgpu_plugin` in the place of `observer` in the inventory's list, and corrects the lengths around
/// it.
fn rename_in_inventory(rig: &Rig) {
    let path = rig.path("images/inventory.img");
    let mut bytes = fs::read(&path).unwrap();
    // Field 12 (a message) with field 12 (a string): tag, length, tag, length, text.
    let old = b"\x62\x0a\x62\x08observer";
    let new = b"\x62\x0f\x62\x0damdgpu_plugin";
    let at =
        bytes.windows(old.len()).position(|window| window == old).expect("the observer in the inventory");
    bytes.splice(at..at + old.len(), new.iter().copied());
    let record = u32::from_le_bytes(bytes[4..8].try_into().unwrap()) + 5;
    bytes[4..8].copy_from_slice(&record.to_le_bytes());
    fs::write(&path, bytes).unwrap();
}
