// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shared BOs are restored as one, open dma-bufs as such, and second files of `/dev/kfd` as files of the same
//! process.

mod play;
mod puppet;

use std::fs;

use gpu_app::client;
use gpu_app::shape::{Mode, Shape};
use play::{Play, buffers, play};
use puppet::Puppet;
use rewake_criu_images::ImageDir;
use rewake_criu_images::rewake::SharedImage;
use rewake_skip::skip;
use softgpu_tests::app::App;
use softgpu_tests::criu::{Criu, Plugin, Version, queues_can_be_restored, wait_for_the_end_of};
use softgpu_tests::isolated;

/// CRIU 4.1 where it can dump: from Linux 6.13 on, glibc 2.42 guards threads' stacks by marks that it takes
/// for pages.
fn older() -> Version {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    if release.starts_with("6.12") { Version::V4_1 } else { Version::V4_2 }
}

/// Processes of the workload pass activations to each other in one BO.
fn workload(processes: u64, version: Version) {
    let folder = tempfile::tempdir().unwrap();
    let criu = Criu::with(Plugin::Ours, version, &folder.path().join("images")).unwrap();
    let (mode, layers) = (Mode::SharedBo, processes);
    let shape = Shape { layers, layer_kib: 64, cache_mib: 2, queues: 1, processes, mode, ..Shape::small() };
    let mut app = App::start(&shape, folder.path()).unwrap();
    app.answers(&[1, 2, 3], 3).unwrap();
    let (pid, before) = (app.pid().unwrap(), buffers());
    client::start(app.socket(), &[7, 8], 8).unwrap();
    criu.dump(pid).unwrap();
    app.was_dumped();
    let restored = criu.restore();
    if !queues_can_be_restored() {
        return assert!(restored.is_err());
    }
    restored.unwrap();
    app.answer_is(&[7, 8], 8).unwrap();
    app.answers(&[200], 2).unwrap();
    assert_eq!(buffers(), before, "buffers on the GPU: the shared one is one");
    app.quit().unwrap();
    wait_for_the_end_of(pid).unwrap();
}

#[test]
fn two_processes_of_the_workload() {
    isolated(1, |_| workload(2, Version::V4_2));
}

#[test]
fn three_processes_of_the_workload() {
    isolated(1, |_| workload(3, older()));
}

/// `from` exports a BO, `to` imports it under the same name; returns both descriptors.
fn share(from: &Puppet, to: &Puppet, name: &str) -> (String, String) {
    let exported = from.tell(&format!("export {name}"));
    let taken = to.tell(&format!("take {} {exported}", from.pid));
    to.tell(&format!("import {name} {taken} 0"));
    (exported, taken)
}

/// As [`share`], and the dma-buf is closed.
fn share_and_close(from: &Puppet, to: &Puppet, name: &str) {
    let (exported, taken) = share(from, to, name);
    from.tell(&format!("close {exported}"));
    to.tell(&format!("close {taken}"));
}

/// A root and its child, with a GPU each.
fn pair(play: &mut Play) -> (Puppet, Puppet) {
    let child = play.child("start", "child");
    for puppet in [&play.root, &child] {
        puppet.tell("gpus 1");
    }
    (play.root.clone(), child)
}

/// Checks that all of them read what one of them writes.
fn are_one(puppets: &[&Puppet], name: &str, first: u32) {
    for (value, writer) in (first..).zip(puppets) {
        writer.tell(&format!("fill {name} {value} 0"));
        for reader in puppets {
            assert_eq!(reader.tell(&format!("load {name} 0")), value.to_string(), "{writer:?} {reader:?}");
        }
    }
}

#[test]
fn all_processes_read_what_one_writes() {
    isolated(1, |scene| {
        play(scene, Version::V4_2, |play| {
            let (root, child) = pair(play);
            let third = play.child("start", "third");
            third.tell("gpus 1");
            root.tell("vram a");
            // Its number in the child is higher than the lowest free one.
            let gap = child.tell("vram gap");
            share_and_close(&root, &child, "a");
            child.tell("free gap");
            share_and_close(&child, &third, "a");
            root.tell("fill a 7 0");
            if play.dump_and_restore() {
                for puppet in [&root, &child, &third] {
                    assert_eq!(puppet.tell("load a 0"), "7");
                    puppet.tell("remap a");
                }
                are_one(&[&root, &child, &third], "a", 8);
                assert_eq!(child.tell("vram gap"), gap, "the lowest number that is free");
                child.tell("free a");
                are_one(&[&root, &third], "a", 20);
            }
        });
    });
}

#[test]
fn an_importer_that_is_dumped_first() {
    isolated(1, |scene| {
        play(scene, older(), |play| {
            let (root, child) = pair(play);
            child.tell("vram a");
            share_and_close(&child, &root, "a");
            child.tell("fill a 7 0");
            if play.dump_and_restore() {
                assert_eq!(root.tell("load a 0"), "7");
                if play::cpu_reaches_vram() {
                    assert_eq!(child.tell("peek a"), "7", "the exporter's mapping");
                }
                are_one(&[&root, &child], "a", 8);
            }
        });
    });
}

#[test]
fn two_processes_that_have_buffers_of_each_other() {
    isolated(1, |scene| {
        play(scene, Version::V4_2, |play| {
            let (root, child) = pair(play);
            root.tell("vram a");
            child.tell("host b");
            let (exported, of_root) = share(&root, &child, "a");
            root.tell(&format!("close {exported}"));
            let (exported, of_child) = share(&child, &root, "b");
            child.tell(&format!("close {exported}"));
            // CRIU asks for each one's imported BO before it asks for `/dev/kfd`.
            let (first, second) =
                (root.tell(&format!("lower {of_child}")), child.tell(&format!("lower {of_root}")));
            root.tell("fill a 7 0");
            child.tell("fill b 8 0");
            if play.dump_and_restore() {
                assert_eq!((child.tell("load a 0"), root.tell("load b 0")), ("7".to_owned(), "8".to_owned()));
                are_one(&[&root, &child], "a", 10);
                are_one(&[&root, &child], "b", 20);
                root.tell(&format!("import again {first} 0"));
                child.tell(&format!("import again {second} 0"));
                assert_eq!(
                    (root.tell("load again 0"), child.tell("load again 0")),
                    ("21".to_owned(), "11".to_owned())
                );
            }
        });
    });
}

/// A dma-buf that stays open in its exporter, above or below the number of `/dev/kfd`.
fn an_open_dmabuf(play: &mut Play, below: bool) {
    let root = play.root.clone();
    root.tell("gpus 1");
    root.tell("vram a");
    root.tell("fill a 7 0");
    let mut number = root.tell("export a");
    if below {
        number = root.tell(&format!("lower {number}"));
    }
    if play.dump_and_restore() {
        root.tell(&format!("import b {number} 0"));
        assert_eq!(root.tell("load b 0"), "7", "the dma-buf is of the buffer");
        root.tell("fill b 8 0");
        assert_eq!(root.tell("load a 0"), "8");
    }
}

#[test]
fn a_dma_buf_that_is_open() {
    isolated(1, |scene| {
        play(scene, Version::V4_2, |play| an_open_dmabuf(play, false));
    });
}

#[test]
fn a_dma_buf_that_was_opened_before_the_gpu() {
    isolated(1, |scene| {
        play(scene, older(), |play| an_open_dmabuf(play, true));
    });
}

#[test]
fn a_dma_buf_in_a_process_that_computes_nothing() {
    isolated(1, |scene| {
        play(scene, Version::V4_2, |play| {
            let (root, child) = (play.root.clone(), play.child("start", "child"));
            child.tell("gpus 1");
            child.tell("vram a");
            child.tell("fill a 7 0");
            let number = root.tell(&format!("take {} {}", child.pid, child.tell("export a")));
            if play.dump_and_restore() {
                root.tell("gpus 1");
                root.tell(&format!("import a {number} 0"));
                are_one(&[&child, &root], "a", 8);
            }
        });
    });
}

#[test]
fn a_dma_buf_whose_buffer_no_process_has_is_refused() {
    isolated(1, |scene| {
        play(scene, Version::V4_2, |play| {
            let (root, child) = pair(play);
            child.tell("vram a");
            let number = root.tell(&format!("take {} {}", child.pid, child.tell("export a")));
            root.tell("vram b");
            play.leave(&child);
            let refused = play.criu(Plugin::Ours).dump(root.pid).unwrap_err().to_string();
            assert!(refused.contains("no process that is dumped has its buffer"), "{refused}");
            root.tell("fill b 3 0");
            root.tell(&format!("close {number}"));
            if play.dump_and_restore() {
                assert_eq!(root.tell("load b 0"), "3");
            }
        });
    });
}

#[test]
fn an_image_that_names_no_owner_of_a_dma_buf_is_refused() {
    isolated(1, |scene| {
        play(scene, Version::V4_2, |play| {
            let root = play.root.clone();
            root.tell("gpus 1");
            root.tell("vram a");
            root.tell("fill a 7 0");
            root.tell("export a");
            play.dump();
            let file = play.images().join("rewake-shared.img");
            let bytes = fs::read(&file).unwrap();
            fs::remove_file(&file).unwrap();
            let refused = play.refused();
            if queues_can_be_restored() {
                assert!(refused.contains("does not name the process that has its buffer"), "{refused}");
            }
            fs::write(&file, bytes).unwrap();
            if play.restore(Plugin::Ours) {
                assert_eq!(root.tell("load a 0"), "7");
            }
        });
    });
}

#[test]
fn importers_of_an_exporter_that_has_ended() {
    isolated(1, |scene| {
        play(scene, Version::V4_2, |play| {
            let (root, exporter) = pair(play);
            let heir = play.child("start", "heir");
            heir.tell("gpus 1");
            exporter.tell("vram a");
            share_and_close(&exporter, &root, "a");
            share_and_close(&exporter, &heir, "a");
            root.tell("fill a 7 0");
            play.leave(&exporter);
            if play.dump_and_restore() {
                assert_eq!(heir.tell("load a 0"), "7");
                are_one(&[&root, &heir], "a", 8);
            }
        });
    });
}

#[test]
fn an_import_that_the_cpu_has_mapped() {
    isolated(1, |scene| {
        play(scene, Version::V4_2, |play| {
            let (root, child) = pair(play);
            root.tell("vram a");
            let (_, taken) = share(&root, &child, "a");
            child.tell(&format!("view seen {taken}"));
            child.tell("poke seen 7");
            if play.dump_and_restore() {
                assert_eq!(
                    (root.tell("load a 0"), child.tell("peek seen")),
                    ("7".to_owned(), "7".to_owned())
                );
                root.tell("fill a 8 0");
                assert_eq!(child.tell("peek seen"), "8");
            }
        });
    });
}

#[test]
fn one_image_twice() {
    isolated(1, |scene| {
        play(scene, Version::V4_2, |play| {
            let (root, child) = pair(play);
            root.tell("vram a");
            share_and_close(&root, &child, "a");
            root.tell("fill a 7 0");
            if play.dump_and_restore() {
                are_one(&[&root, &child], "a", 8);
                play.kill();
                assert!(play.restore(Plugin::Ours));
                assert_eq!(child.tell("load a 0"), "7");
                are_one(&[&root, &child], "a", 8);
                // BOs of a restored tree can be shared in the same way.
                assert!(play.dump_and_restore());
                are_one(&[&root, &child], "a", 20);
            }
        });
    });
}

#[test]
fn the_stock_plugin_makes_copies_of_it() {
    isolated(1, |scene| {
        play(scene, Version::V4_2, |play| {
            let (root, child) = pair(play);
            root.tell("vram a");
            share_and_close(&root, &child, "a");
            root.tell("fill a 7 0");
            play.dump();
            assert!(play.images().join("rewake-shared.img").exists());
            if play.restore(Plugin::Stock) {
                assert_eq!((root.tell("load a 0"), child.tell("load a 0")), ("7".to_owned(), "7".to_owned()));
                root.tell("fill a 8 0");
                assert_eq!(child.tell("load a 0"), "7");
            }
        });
    });
}

#[test]
fn an_image_without_shared_buffers_says_so() {
    isolated(1, |scene| {
        play(scene, Version::V4_2, |play| {
            let (root, child) = pair(play);
            root.tell("vram a");
            child.tell("vram a");
            play.dump();
            let shared = ImageDir::open(play.images()).unwrap().shared().unwrap().unwrap();
            // Neither had a mapping of a freed BO.
            assert_eq!(shared.freed_mappings.len(), 2, "{shared:?}");
            assert!(shared.freed_mappings.iter().all(|of| of.mappings.is_empty()), "{shared:?}");
            assert!(SharedImage { freed_mappings: Vec::new(), ..shared.clone() }.is_empty(), "{shared:?}");
        });
    });
}

#[test]
fn a_second_file_of_a_process() {
    isolated(1, |scene| {
        play(scene, Version::V4_2, |play| {
            let (root, child) = pair(play);
            for puppet in [&root, &child] {
                puppet.tell("vram a");
                puppet.tell("fill a 7 0");
                puppet.tell("second");
            }
            if play.dump_and_restore() {
                for puppet in [&root, &child] {
                    assert_eq!(puppet.tell("load a 0"), "7");
                    let number = puppet.tell("export-by-second a");
                    puppet.tell(&format!("import b {number} 0"));
                    assert_eq!(puppet.tell("load b 0"), "7", "both files are one process's");
                }
            }
        });
    });
}

#[test]
fn a_fork_has_the_files_and_the_mappings() {
    isolated(1, |scene| {
        play(scene, older(), |play| {
            let root = play.root.clone();
            root.tell("gpus 1");
            root.tell("vram a");
            root.tell("fill a 7 0");
            let number = root.tell("export a");
            // A fork does not inherit the mapping of the BO itself.
            root.tell(&format!("view seen {number}"));
            root.tell(&format!("close {number}"));
            let fork = play.child("fork", "fork");
            assert_eq!(fork.tell("peek seen"), "7");
            if play.dump_and_restore() {
                assert_eq!(fork.tell("peek seen"), "7");
                root.tell("fill a 8 0");
                assert_eq!(fork.tell("peek seen"), "8");
                fork.tell("poke seen 9");
                assert_eq!(root.tell("load a 0"), "9");
            }
        });
    });
}

#[test]
fn a_buffer_of_another_gpu() {
    isolated(2, |scene| {
        play(scene, Version::V4_2, |play| {
            let child = play.child("start", "child");
            play.root.tell("gpus 2");
            child.tell("gpus 2");
            if !play::gpus_reach_each_other() {
                skip!("these GPUs cannot access each other");
            }
            child.tell("vram a");
            let number = play.root.tell(&format!("take {} {}", child.pid, child.tell("export a")));
            play.root.tell(&format!("import a {number} 1"));
            play.root.tell(&format!("close {number}"));
            play.root.tell("fill a 7 1");
            if play.dump_and_restore() {
                assert_eq!(child.tell("load a 0"), "7");
                child.tell("fill a 8 0");
                assert_eq!(play.root.tell("load a 1"), "8");
            }
        });
    });
}
