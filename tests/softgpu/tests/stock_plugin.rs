// SPDX-License-Identifier: MIT OR Apache-2.0
//! CRIU's stock plugin dumps the workload and restores it: it was written for the hardware, so what it needs is what
//! the soft GPU must do. The judge (see `isolated`) has nothing to say about it.
//!
//! Not here: a buffer that processes share. The stock plugin restores a copy of it in each of them.

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use gpu_app::client;
use gpu_app::shape::{Mode, Shape};
use rewake_kfd::topology::{Node, Topology};
use softgpu_tests::app::App;
use softgpu_tests::criu::{Criu, queues_come_back, wait_for_the_end_of};
use softgpu_tests::{Judge, isolated};

/// Something small enough for emulation.
fn shape() -> Shape {
    Shape { layers: 3, layer_kib: 64, cache_mib: 2, queues: 1, ..Shape::small() }
}

/// The driver takes ended processes apart in the background; ten seconds are much, under emulation too.
fn goes_back_to(before: &BTreeMap<String, u64>) {
    let judge = Judge::find().unwrap();
    for _ in 0..100 {
        if judge.alive() == *before {
            return;
        }
        thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(judge.alive(), *before, "alive on the GPUs when the dumped processes are gone");
}

/// Tokens before a dump, an answer begun before it and finished after the restore, tokens after.
fn there_and_back(shape: &Shape) {
    let folder = tempfile::tempdir().unwrap();
    let criu = Criu::stock(&folder.path().join("images")).unwrap();
    let before = Judge::find().map(|judge| judge.alive());
    let mut app = App::start(shape, folder.path()).unwrap();
    let busy = !matches!(shape.mode, Mode::Idle | Mode::SharedBo | Mode::Graph);
    app.answers(&[1, 2, 3], 4).unwrap();
    let pid = app.pid().unwrap();
    client::start(app.socket(), &[7, 8], 12).unwrap();
    criu.dump(pid).unwrap();
    app.was_dumped();
    if let Some(before) = before {
        goes_back_to(&before);
    }
    let restored = criu.restore();
    if !queues_come_back() {
        let error = restored.unwrap_err().to_string();
        assert!(error.contains("Restore ioctl failed: Invalid argument"), "{error}");
        return;
    }
    restored.unwrap();
    app.answer_is(&[7, 8], 12).unwrap();
    app.answers(&[200], 3).unwrap();
    if busy {
        app.goes_on(2).unwrap();
    }
    app.quit().unwrap();
    wait_for_the_end_of(pid).unwrap();
}

#[test]
fn one_gpu() {
    isolated("one_gpu", 1, |_| there_and_back(&shape()));
}

#[test]
fn two_gpus() {
    isolated("two_gpus", 2, |_| there_and_back(&Shape { gpus: 2, queues: 2, ..shape() }));
}

#[test]
fn in_the_middle_of_dispatches() {
    isolated("in_the_middle_of_dispatches", 1, |_| {
        there_and_back(&Shape { mode: Mode::MidDispatch, ..shape() });
    });
}

#[test]
fn a_queue_full_of_work() {
    isolated("a_queue_full_of_work", 1, |_| there_and_back(&Shape { mode: Mode::Graph, ..shape() }));
}

#[test]
fn while_buffers_come_and_go() {
    isolated("while_buffers_come_and_go", 1, |_| {
        there_and_back(&Shape { mode: Mode::Allocating, ..shape() });
    });
}

#[test]
fn while_the_cpu_reads_weights() {
    isolated("while_the_cpu_reads_weights", 1, |_| {
        // Without a large BAR there is nothing to read; the workload's own tests see it refuse.
        if Topology::read().unwrap().gpus().all(Node::has_large_bar) {
            there_and_back(&Shape { mode: Mode::CpuReads, ..shape() });
        }
    });
}

#[test]
fn two_processes() {
    isolated("two_processes", 1, |_| there_and_back(&Shape { processes: 2, ..shape() }));
}
