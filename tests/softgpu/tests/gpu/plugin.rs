// SPDX-License-Identifier: MIT OR Apache-2.0
//! This project's plugin dumps the workload and restores it. It replaces the stock plugin for the dump, the
//! restore or both.

use gpu_app::shape::{Mode, Shape};
use rewake_amdgpu_uapi::criu::queues::QueueSupport;
use rewake_amdgpu_uapi::topology::{Node, Topology};
use softgpu_tests::criu::{Criu, Plugin, Version, queues_can_be_restored};
use softgpu_tests::server::small;
use softgpu_tests::{Server, isolated};

/// Which plugin dumps, and which restores.
#[derive(Debug, Clone, Copy)]
struct Way {
    dump: Plugin,
    restore: Plugin,
    version: Version,
}

const OURS: Way = Way { dump: Plugin::Ours, restore: Plugin::Ours, version: Version::V4_2 };

/// Without copy rings the stock plugin copies nothing, and reports nothing.
fn stock_can_copy() -> bool {
    let rings = std::fs::read_to_string("/sys/module/softgpu/parameters/sdma_rings");
    rings.map_or(true, |rings| rings.trim() != "0")
}

/// Tokens before a dump, an answer begun before it and finished after the restore, tokens after.
fn dump_and_restore(shape: &Shape, way: Way) {
    let folder = tempfile::tempdir().unwrap();
    let images = folder.path().join("images");
    let mut server = Server::start(shape, folder.path());
    let guarded = threads_have_guard_pages(server.pid);
    let criu = Criu::with(way.dump, way.version, &images).unwrap();
    let dumped = criu.dump(server.pid);
    if guarded && way.version == Version::V4_1 {
        let error = dumped.unwrap_err().to_string();
        assert!(error.contains("Can't splice all pages to pipe"), "{error}");
        // The workload continues, queues and all.
        return server.ends_well();
    }
    if way.dump == Plugin::Ours && firmware_runs_queues() {
        let error = dumped.unwrap_err().to_string();
        assert!(error.contains("no kernel up to 7.3 restores such queues"), "{error}");
        return server.ends_well();
    }
    dumped.unwrap();
    server.was_dumped(&criu);
    if way.restore == Plugin::Stock && !stock_can_copy() {
        return;
    }
    let criu = Criu::with(way.restore, way.version, &images).unwrap();
    let restored = criu.restore();
    if way.dump == Plugin::Stock && !stock_can_copy() {
        let error = restored.unwrap_err().to_string();
        assert!(error.contains("8 bytes, where buffers need"), "{error}");
        return;
    }
    if queues_can_be_restored() {
        restored.unwrap();
        server.ends_well();
        if way.restore == Plugin::Ours {
            says_that_all_came_first(&criu.log("restore"));
        }
    } else {
        refused(way.restore, &restored.unwrap_err().to_string());
    }
}

/// No page server was started: the log says once, for any number of tasks, why the process ran late, and what
/// to do.
fn says_that_all_came_first(log: &str) {
    let said: Vec<&str> = log.lines().filter(|line| line.contains("no streamer listens")).collect();
    let [said] = said[..] else { panic!("{said:#?}") };
    let words = ["Warn  (amdgpu_plugin): ", "rewake-gpu.socket", "`rewake restore`", "`rewake lazy-pages`"];
    assert!(words.into_iter().all(|word| said.contains(word)), "{said}");
}

/// Queues cannot be restored here: the kernel's answer, in each plugin's words, except where ours checks it
/// first.
fn refused(by: Plugin, error: &str) {
    let said = match by {
        Plugin::Ours if firmware_runs_queues() => "GFX11 and newer run queues by firmware",
        Plugin::Ours => "and this kernel refuses such queues; Linux 6.16.4 to 6.18.41 and 6.19 to 7.1.5",
        Plugin::Stock => "Restore ioctl failed: Invalid argument",
    };
    assert!(error.contains(said), "{error}");
}

fn firmware_runs_queues() -> bool {
    Topology::read().unwrap().gpus().any(|gpu| QueueSupport::here(gpu) == QueueSupport::Firmware)
}

#[test]
fn one_gpu() {
    isolated(1, |_| dump_and_restore(&small(), OURS));
}

/// Linux 6.13 has guard pages, and glibc 2.42 puts them under threads' stacks. CRIU 4.1 does not know them,
/// and fails.
fn threads_have_guard_pages(pid: u32) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    maps.lines().any(|line| line.starts_with("VmFlags:") && line.split_whitespace().any(|flag| flag == "gu"))
}

#[test]
fn one_gpu_with_criu_4_1() {
    isolated(1, |_| {
        dump_and_restore(&small(), Way { version: Version::V4_1, ..OURS });
    });
}

#[test]
fn the_stock_plugin_restores_our_dump() {
    isolated(1, |_| {
        dump_and_restore(&small(), Way { restore: Plugin::Stock, ..OURS });
    });
}

#[test]
fn our_plugin_restores_the_stock_plugin_s_dump() {
    isolated(1, |_| {
        dump_and_restore(&small(), Way { dump: Plugin::Stock, ..OURS });
    });
}

#[test]
fn two_gpus() {
    isolated(2, |_| dump_and_restore(&Shape { gpus: 2, queues: 2, ..small() }, OURS));
}

#[test]
fn in_the_middle_of_dispatches() {
    isolated(1, |_| {
        dump_and_restore(&Shape { mode: Mode::MidDispatch, ..small() }, OURS);
    });
}

#[test]
fn a_queue_full_of_work() {
    isolated(1, |_| dump_and_restore(&Shape { mode: Mode::Graph, ..small() }, OURS));
}

#[test]
fn while_buffers_are_allocated_and_freed() {
    isolated(1, |_| {
        dump_and_restore(&Shape { mode: Mode::Allocating, ..small() }, OURS);
    });
}

#[test]
fn while_the_cpu_reads_weights() {
    isolated(1, |_| {
        // Without a large BAR there is nothing to read; the workload's own tests see it refuse.
        if Topology::read().unwrap().gpus().all(Node::has_large_bar) {
            dump_and_restore(&Shape { mode: Mode::CpuReads, ..small() }, OURS);
        }
    });
}

#[test]
fn two_processes() {
    isolated(1, |_| dump_and_restore(&Shape { processes: 2, ..small() }, OURS));
}

#[test]
fn two_processes_on_two_gpus() {
    isolated(2, |_| {
        dump_and_restore(&Shape { gpus: 2, processes: 2, layers: 5, ..small() }, OURS);
    });
}

#[test]
fn weights_in_registered_memory() {
    isolated(2, |_| {
        dump_and_restore(&Shape { mode: Mode::Userptr, gpus: 2, ..small() }, OURS);
    });
}

#[test]
fn while_numbers_change_in_host_memory() {
    isolated(2, |_| {
        dump_and_restore(&Shape { mode: Mode::Gtt, gpus: 2, ..small() }, OURS);
    });
}

#[test]
fn memory_with_svm_attributes() {
    isolated(1, |_| {
        // Linux 6.12 as Debian has it knows none; the workload's own tests see it refuse.
        if Topology::read().unwrap().gpus().all(Node::has_svm) {
            dump_and_restore(&Shape { mode: Mode::Svm, ..small() }, OURS);
        }
    });
}

#[test]
fn weights_that_the_cpu_cannot_access() {
    isolated(1, |_| {
        dump_and_restore(&Shape { mode: Mode::NoAccess, ..small() }, OURS);
    });
}
