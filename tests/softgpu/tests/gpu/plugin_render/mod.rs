// SPDX-License-Identifier: MIT OR Apache-2.0
//! BOs and contexts of render nodes are restored with their number, address, contents and other state. Where
//! the kernel does not report them, a dump that would lose them fails.

mod cast;
mod stage;
mod state;

use std::fs;
use std::path::Path;

use cast::Cast;
use gpu_app::shape::{Mode, Shape};
use rewake_criu_images::ImageDir;
use rewake_criu_images::rewake::SHARED_NAME;
use rewake_skip::{need, skip};
use softgpu_tests::app::App;
use softgpu_tests::criu::{Criu, Plugin, Version, queues, queues_can_be_restored, wait_for_the_end_of};
use softgpu_tests::isolated;

/// Whether the kernel reports the BOs of a render node.
fn reports_bos() -> bool {
    !release().starts_with("6.12")
}

fn release() -> String {
    fs::read_to_string("/proc/sys/kernel/osrelease").unwrap()
}

/// CRIU 4.1 where it can dump threads: see the tests of shared buffers.
fn older() -> Version {
    if reports_bos() { Version::V4_2 } else { Version::V4_1 }
}

/// A small server, and a process that renders on both GPUs.
fn shape() -> Shape {
    let mode = Mode::RenderOnly;
    Shape { layers: 2, layer_kib: 64, cache_mib: 2, queues: 1, gpus: 2, mode, ..Shape::small() }
}

fn workload(version: Version) {
    let folder = tempfile::tempdir().unwrap();
    let images = folder.path().join("images");
    let criu = Criu::with(Plugin::Ours, version, &images).unwrap();
    let mut app = App::start(&shape(), folder.path()).unwrap();
    app.rendered("kept").unwrap();
    let pid = app.pid().unwrap();
    let dumped = criu.dump(pid);
    if !reports_bos() {
        let error = dumped.unwrap_err().to_string();
        assert!(error.contains("this kernel does not report where they are mapped"), "{error}");
        app.rendered("kept").unwrap();
        app.answers(&[1, 2, 3], 3).unwrap();
        return app.quit().unwrap();
    }
    dumped.unwrap();
    app.was_dumped();
    let restored = criu.restore();
    if !queues_can_be_restored() {
        return assert!(restored.is_err());
    }
    restored.unwrap();
    for part in ["node", "kept", "fresh", "kept"] {
        app.rendered(part).unwrap();
    }
    app.answers(&[1, 2, 3], 3).unwrap();
    app.quit().unwrap();
    wait_for_the_end_of(pid).unwrap();
}

#[test]
fn a_process_that_renders_beside_one_that_computes() {
    isolated(2, |_| workload(Version::V4_2));
}

#[test]
fn a_process_that_renders_with_an_older_criu() {
    isolated(2, |_| workload(older()));
}

/// The same as in its own images: compute BOs are restored, and BOs of render nodes are not. Of a process
/// that only renders it restores nothing at all.
#[test]
fn the_stock_plugin_restores_our_dump_like_its_own() {
    isolated(1, |scene| {
        need!(queues());
        if !reports_bos() {
            skip!("this kernel does not report the BOs of a render node");
        }
        cast::play(scene, "beside", |cast| {
            let before = cast.ask("look");
            assert!(before.contains("file 0: 1 "));
            cast.dump(Version::V4_2);
            cast.restore_by(Plugin::Stock, Version::V4_2);
            let view =
                |look: &str| look[look.find("; view").unwrap()..look.find("; contexts").unwrap()].to_owned();
            let after = cast.ask("look");
            assert_eq!(view(&after), view(&before));
            assert!(!after.contains("file 0: 1 "));
            cast.kill();
        });
    });
}

/// A cast is dumped, restored, checked, and restored a second time. Where the kernel does not report BOs, the
/// dump is refused.
fn dump_and_restore(cast: &mut Cast, version: Version) {
    let before = cast.ask("look");
    if !reports_bos() {
        let error = cast.refused(version);
        assert!(error.contains("this kernel does not report where they are mapped"), "{error}");
        return assert_eq!(cast.ask("look"), before);
    }
    cast.dump(version);
    for _ in 0..2 {
        cast.restore(version);
        assert_eq!(cast.ask("look"), before);
        assert_eq!(cast.ask("use"), "done");
        cast.kill();
    }
}

#[test]
fn numbers_places_and_contents_are_the_same() {
    isolated(1, |scene| {
        cast::play(scene, "numbers", |cast| dump_and_restore(cast, older()));
    });
}

#[test]
fn syncobjs_are_the_same() {
    isolated(1, |scene| {
        cast::play(scene, "syncobjs", |cast| dump_and_restore(cast, older()));
    });
}

#[test]
fn metadata_of_buffers_is_the_same() {
    isolated(1, |scene| {
        cast::play(scene, "metadata", |cast| dump_and_restore(cast, older()));
    });
}

#[test]
fn submissions_continue_with_their_numbers() {
    isolated(1, |scene| {
        cast::play(scene, "submissions", |cast| dump_and_restore(cast, older()));
    });
}

/// Also where the kernel does not report buffers: the file has none.
#[test]
fn the_power_state_is_set_again_by_its_context() {
    isolated(1, |scene| {
        cast::play(scene, "power", |cast| {
            let before = cast.ask("look");
            assert!(before.contains("power 4"), "{before}");
            cast.dump(Version::V4_2);
            cast.restore(Version::V4_2);
            assert_eq!(cast.ask("look"), before);
            assert_eq!(cast.ask("use"), "done");
            cast.kill();
        });
    });
}

#[test]
fn two_files_with_a_buffer_in_common() {
    isolated(1, |scene| {
        cast::play(scene, "common", |cast| dump_and_restore(cast, Version::V4_2));
    });
}

#[test]
fn rendering_beside_computing_in_one_process() {
    isolated(1, |scene| {
        if queues_can_be_restored() {
            cast::play(scene, "mixed", |cast| dump_and_restore(cast, Version::V4_2));
        }
    });
}

#[test]
fn a_render_node_that_is_open_and_not_used() {
    isolated(1, |scene| {
        cast::play(scene, "idle", |cast| {
            let before = cast.ask("look");
            cast.dump(Version::V4_2);
            cast.restore(Version::V4_2);
            assert_eq!(cast.ask("look"), before);
            cast.kill();
        });
    });
}

#[test]
fn what_cannot_be_restored_is_refused_at_the_dump() {
    isolated(1, |scene| {
        let all = [
            ("userptr", "is host memory of the process (GEM_USERPTR)"),
            ("always-valid", "bound to its address space (VM_ALWAYS_VALID)"),
            ("foreign", "was imported from another driver"),
        ];
        // Refused whether or not the kernel reports buffers.
        let always = [
            ("syncobj-file", "is a descriptor of a GPU driver's syncobj"),
            ("sync-file", "is a descriptor of a GPU driver's fence (sync_file)"),
            ("dma-buf", "the dma-buf of file"),
        ];
        let reported = [
            ("doorbells", "is a page of doorbells (AMDGPU_GEM_DOMAIN_DOORBELL) of user queues"),
            ("on-chip", "is memory of domains 0x8"),
            ("video", "work of context 1 on VCN_DEC ring 0"),
            ("many", "more than 100000 submissions"),
            ("reset", "context 1 of file"),
            ("pending", "has been pending for 20s"),
            ("running", "has been running for 20s"),
        ];
        let all = [&all[..], &reported].concat();
        // One process has one role: the other roles belong to the same test.
        let unreported = "this kernel does not report where they are mapped";
        let of_the_kernel = |(role, reason)| (role, if reports_bos() { reason } else { unreported });
        let mut wrong = Vec::new();
        for (role, reason) in all.into_iter().map(of_the_kernel).chain(always) {
            cast::play(scene, role, |cast| {
                let before = cast.ask("look");
                match cast.dump_error(Version::V4_2) {
                    Some(error) if error.contains(reason) => {
                        assert_eq!(cast.ask("look"), before, "{role}");
                    }
                    other => wrong.push((role, other)),
                }
            });
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
    });
}

/// As CRIU's development branch writes images: without our files, alignments in pages, headers without a
/// meaning.
#[test]
fn images_of_later_versions_of_criu_s_plugin() {
    isolated(1, |scene| {
        cast::play(scene, "numbers", |cast| {
            if !reports_bos() {
                skip!("this kernel does not report the BOs of a render node");
            }
            let before = cast.ask("look");
            cast.dump(Version::V4_2);
            as_of_criu(&cast.images());
            cast.restore(Version::V4_2);
            let without_contexts = |look: &str| look.split(" contexts").next().map(str::to_owned);
            assert_eq!(without_contexts(&cast.ask("look")), without_contexts(&before));
            cast.kill();
        });
    });
}

/// Images of earlier versions of this plugin do not have the state. They are restored, with one warning.
#[test]
fn an_image_without_state_is_restored_with_a_warning() {
    isolated(1, |scene| {
        cast::play(scene, "submissions", |cast| {
            if !reports_bos() {
                skip!("this kernel does not report the BOs of a render node");
            }
            let before = cast.ask("look");
            cast.dump(Version::V4_2);
            let folder = cast.images();
            let mut shared = ImageDir::open(&folder).unwrap().shared().unwrap().unwrap();
            shared.render_files.iter_mut().for_each(|file| file.state = None);
            fs::write(folder.join(SHARED_NAME), shared.to_bytes()).unwrap();
            let warnings = cast.restore_with_warnings(Version::V4_2);
            let lost = warnings.iter().filter(|line| line.contains("did not look for syncobjs"));
            assert_eq!(lost.count(), 1, "{warnings:?}");
            let contexts = |look: &str| look.split("; state of file").next().map(str::to_owned);
            let after = cast.ask("look");
            assert_eq!(contexts(&after), contexts(&before));
            assert!(
                before.contains("submissions 1 0: 70") && after.contains("submissions 1 0: 0"),
                "{after}"
            );
            cast.kill();
        });
    });
}

fn as_of_criu(folder: &Path) {
    fs::remove_file(folder.join(SHARED_NAME)).unwrap();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if name.starts_with("amdgpu-drm-pages-") {
            let mut bytes = fs::read(&path).unwrap();
            bytes[..8].fill(0xa5);
            fs::write(&path, bytes).unwrap();
        } else if let Some(id) = name.strip_prefix("amdgpu-renderD-") {
            let id = id.strip_suffix(".img").unwrap().parse().unwrap();
            let mut image = ImageDir::open(folder).unwrap().render_node(id).unwrap().unwrap();
            image
                .contents
                .iter_mut()
                .flat_map(|all| &mut all.buffers)
                .for_each(|buffer| buffer.alignment /= 4096);
            fs::write(&path, image.to_bytes()).unwrap();
        }
    }
}
