// SPDX-License-Identifier: MIT OR Apache-2.0
//! The workload's answers are the model's, in every mode and shape.

use gpu_app::shape::{Mode, Shape};
use rewake_amdgpu_uapi::Kfd;
use softgpu_tests::app::App;
use softgpu_tests::isolated;

/// A shape that is small enough for emulation.
fn shape() -> Shape {
    Shape { layers: 3, layer_kib: 64, cache_mib: 2, queues: 1, ..Shape::small() }
}

fn answers(shape: &Shape, rounds: u64) {
    let folder = tempfile::tempdir().unwrap();
    let app = App::start(shape, folder.path()).unwrap();
    app.answers(&[1, 2, 3], 4).unwrap();
    if rounds > 0 {
        app.continues(rounds).unwrap();
    }
    app.answers(&[200], 3).unwrap();
    app.quit().unwrap();
}

#[test]
fn a_server_answers() {
    isolated(1, |_| answers(&shape(), 0));
}

#[test]
fn a_server_answers_with_several_queues() {
    isolated(1, |_| {
        answers(&Shape { queues: 3, layers: 5, ..shape() }, 0);
    });
}

#[test]
fn a_server_answers_on_two_gpus() {
    isolated(2, |_| answers(&Shape { gpus: 2, ..shape() }, 0));
}

#[test]
fn a_server_answers_with_two_processes() {
    isolated(1, |_| {
        answers(&Shape { processes: 2, ..shape() }, 0);
    });
}

#[test]
fn a_server_answers_with_a_buffer_shared_by_two_processes() {
    isolated(1, |_| {
        answers(&Shape { processes: 2, mode: Mode::SharedBo, ..shape() }, 0);
    });
}

#[test]
fn a_server_answers_while_long_dispatches_run() {
    isolated(1, |_| {
        answers(&Shape { mode: Mode::MidDispatch, ..shape() }, 2);
    });
}

#[test]
fn a_server_answers_while_the_cpu_reads_weights() {
    isolated(1, |_| {
        let topology = rewake_amdgpu_uapi::topology::Topology::read().unwrap();
        if topology.gpus().all(rewake_amdgpu_uapi::topology::Node::has_large_bar) {
            answers(&Shape { mode: Mode::CpuReads, ..shape() }, 20);
        } else {
            let folder = tempfile::tempdir().unwrap();
            let shape = Shape { mode: Mode::CpuReads, ..shape() };
            let error = App::start(&shape, folder.path()).unwrap_err().to_string();
            assert!(error.contains("needs GPUs with a large BAR"), "{error}");
        }
    });
}

#[test]
fn a_server_answers_while_buffers_are_allocated_and_freed() {
    isolated(1, |_| {
        answers(&Shape { mode: Mode::Allocating, ..shape() }, 6);
    });
}

#[test]
fn a_server_answers_with_all_dispatched_at_once() {
    isolated(1, |_| {
        answers(&Shape { mode: Mode::Graph, queues: 2, ..shape() }, 0);
    });
}

#[test]
fn a_server_answers_on_two_gpus_with_two_processes() {
    isolated(2, |_| {
        answers(&Shape { gpus: 2, processes: 2, layers: 5, ..shape() }, 0);
    });
}

#[test]
fn a_server_answers_from_registered_memory() {
    isolated(2, |_| {
        answers(&Shape { mode: Mode::Userptr, gpus: 2, ..shape() }, 2);
    });
}

#[test]
fn a_server_answers_while_numbers_change_in_host_memory() {
    isolated(2, |_| {
        answers(&Shape { mode: Mode::Gtt, gpus: 2, ..shape() }, 6);
    });
}

#[test]
fn a_server_answers_while_memory_with_attributes_changes() {
    isolated(2, |_| {
        let shape = Shape { mode: Mode::Svm, gpus: 2, ..shape() };
        if gpu_app::kfd::xnack(&Kfd::open().unwrap()).is_ok() {
            answers(&shape, 2);
        } else {
            let folder = tempfile::tempdir().unwrap();
            let error = App::start(&shape, folder.path()).unwrap_err().to_string();
            assert!(error.contains("needs a kernel with SVM") && error.contains("not permitted"), "{error}");
        }
    });
}

#[test]
fn a_server_answers_from_weights_that_the_cpu_cannot_access() {
    isolated(1, |_| {
        let folder = tempfile::tempdir().unwrap();
        let app = App::start(&Shape { mode: Mode::NoAccess, ..shape() }, folder.path()).unwrap();
        app.answers(&[1, 2, 3], 4).unwrap();
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", app.pid().unwrap())).unwrap();
        let closed = maps.lines().filter(|line| line.contains("---s") && line.contains("/dev/dri/renderD"));
        assert_eq!(closed.count(), 3, "a mapping without access for each layer: {maps}");
        app.quit().unwrap();
    });
}

#[test]
fn a_server_answers_beside_a_process_with_render_nodes_only() {
    isolated(2, |_| {
        let folder = tempfile::tempdir().unwrap();
        let shape = Shape { mode: Mode::RenderOnly, gpus: 2, ..shape() };
        let app = App::start(&shape, folder.path()).unwrap();
        app.answers(&[1, 2, 3], 4).unwrap();
        for part in ["node", "fresh", "kept", "kept", "fresh"] {
            app.rendered(part).unwrap();
        }
        assert!(app.rendered("other").unwrap_err().to_string().contains("node, fresh or kept"));
        app.quit().unwrap();
    });
}

#[test]
fn a_server_answers_with_many_small_buffers_and_zeros() {
    isolated(2, |_| {
        answers(&Shape { small_bos: 301, zero_share: 40, gpus: 2, ..shape() }, 0);
    });
}

#[test]
fn nonsense_is_refused_and_the_server_runs_on() {
    isolated(1, |_| {
        let folder = tempfile::tempdir().unwrap();
        let app = App::start(&shape(), folder.path()).unwrap();
        for request in ["", "start", "start many", "start 1 -5", "result", "fly"] {
            assert!(gpu_app::client::ask(app.socket(), request).is_err(), "{request:?}");
        }
        app.answers(&[], 1).unwrap();
        app.quit().unwrap();
    });
}
