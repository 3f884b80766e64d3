// SPDX-License-Identifier: MIT OR Apache-2.0
//! CRIU's stock plugin dumps the workload and restores it. It was written for the hardware, so the soft GPU
//! must have what it needs. Its defects are here too, to compare this project's plugin with:
//!
//! * It resumes queues as soon as it has copied the BOs, long before CRIU copies the program's memory. Save
//!   areas of queues and registered memory are then newer than the queues: work is restored stale, or is done
//!   twice.
//! * If the process uses fewer GPUs than the machine has, it never resumes its queues.
//! * A process with render nodes only, below one that computes: no dump, and queues that stay paused for
//!   ever.
//! * A BO that processes share: each gets a copy.
//! * A process that has freed a BO, and not unmapped it yet: no restore.

use std::path::Path;
use std::time::Duration;

use gpu_app::shape::{Mode, Shape};
use rewake_amdgpu_uapi::Kfd;
use rewake_amdgpu_uapi::topology::{Node, Topology};
use rewake_skip::need;
use softgpu_tests::criu::{Criu, Plugin, Version, queues_can_be_restored, wait_for_the_end_of};
use softgpu_tests::judge::{A_WHILE, Gate, LONG};
use softgpu_tests::server::small;
use softgpu_tests::{Judge, REAL_GPUS, Server, isolated};

/// A server with an unfinished answer, about to be dumped, and the CRIU that dumps it.
fn started(shape: &Shape, folder: &Path) -> (Server, Criu) {
    let criu = Criu::with(Plugin::Stock, Version::V4_2, &folder.join("images")).unwrap();
    (Server::start(shape, folder), criu)
}

/// Dumps and restores the server. False where it cannot be restored: where queues cannot, which is checked,
/// or when a freed BO was still mapped.
fn dumped_and_restored(server: &mut Server, criu: &Criu, mode: Mode) -> bool {
    criu.dump(server.pid).unwrap();
    server.was_dumped(criu);
    let restored = criu.restore();
    if !queues_can_be_restored() {
        let error = restored.unwrap_err().to_string();
        assert!(error.contains("Restore ioctl failed: Invalid argument"), "{error}");
        return false;
    }
    if let Err(error) = &restored
        && mode == Mode::Allocating
        && criu.log("restore").contains("No match for addr")
    {
        println!("dumped between free and munmap, which this plugin does not restore: {error}");
        return false;
    }
    restored.unwrap();
    true
}

/// Tokens before a dump, an answer begun before it and finished after the restore, tokens after. Other work
/// continues meanwhile. The dump may interrupt a kernel of the answer here, too, and copy its save area late.
fn dump_and_restore(shape: &Shape) {
    let folder = tempfile::tempdir().unwrap();
    let (mut server, criu) = started(shape, folder.path());
    if dumped_and_restored(&mut server, &criu, shape.mode) {
        server.ends_well();
    }
    take_what_is_stale();
}

/// The judge may have noted save areas that are newer than their queues, and nothing else.
fn take_what_is_stale() {
    if let Some(judge) = Judge::find()
        && !judge.violations().is_empty()
    {
        judge.take("save-area-stale");
    }
}

/// The same in the middle of work: the server is restored and answers; unfinished work may be stale, or be
/// done twice.
fn dump_and_restore_unsound(shape: &Shape) {
    let folder = tempfile::tempdir().unwrap();
    let (mut server, criu) = started(shape, folder.path());
    if dumped_and_restored(&mut server, &criu, shape.mode) && shape.mode != Mode::Graph {
        server.answers().unwrap();
    }
    // Killed: a dead queue keeps it from quitting.
    let pid = server.pid;
    drop(server);
    wait_for_the_end_of(pid).unwrap();
    take_what_is_stale();
}

#[test]
fn one_gpu() {
    isolated(1, |_| {
        dump_and_restore(&small());
    });
}

#[test]
fn two_gpus() {
    isolated(2, |_| {
        dump_and_restore(&Shape { gpus: 2, queues: 2, ..small() });
    });
}

#[test]
fn in_the_middle_of_dispatches() {
    isolated(2, |_| {
        dump_and_restore_unsound(&Shape { mode: Mode::MidDispatch, gpus: 2, ..small() });
    });
}

#[test]
fn a_queue_full_of_work() {
    isolated(2, |_| {
        dump_and_restore_unsound(&Shape { mode: Mode::Graph, gpus: 2, ..small() });
    });
}

#[test]
fn registered_memory_that_gpus_write() {
    isolated(2, |_| {
        dump_and_restore_unsound(&Shape { mode: Mode::Userptr, gpus: 2, ..small() });
    });
}

#[test]
fn memory_with_attributes_that_gpus_write() {
    isolated(2, |_| {
        // Linux 6.12 has no SVM; the workload's own tests see it refuse.
        if gpu_app::kfd::xnack(&Kfd::open().unwrap()).is_ok() {
            dump_and_restore_unsound(&Shape { mode: Mode::Svm, gpus: 2, ..small() });
        }
    });
}

#[test]
fn while_buffers_are_allocated_and_freed() {
    isolated(1, |_| {
        dump_and_restore(&Shape { mode: Mode::Allocating, ..small() });
    });
}

#[test]
fn while_the_cpu_reads_weights() {
    isolated(1, |_| {
        // Without a large BAR there is nothing to read; the workload's own tests see it refuse.
        if Topology::read().unwrap().gpus().all(Node::has_large_bar) {
            dump_and_restore(&Shape { mode: Mode::CpuReads, ..small() });
        }
    });
}

#[test]
fn two_processes() {
    isolated(1, |_| {
        dump_and_restore(&Shape { processes: 2, ..small() });
    });
}

#[test]
fn two_processes_on_two_gpus() {
    isolated(2, |_| {
        dump_and_restore(&Shape { gpus: 2, processes: 2, layers: 5, ..small() });
    });
}

#[test]
fn while_numbers_change_in_host_memory() {
    isolated(2, |_| {
        dump_and_restore(&Shape { mode: Mode::Gtt, gpus: 2, ..small() });
    });
}

#[test]
fn weights_that_the_cpu_cannot_access() {
    isolated(1, |_| {
        dump_and_restore(&Shape { mode: Mode::NoAccess, ..small() });
    });
}

#[test]
fn many_small_buffers_and_zeros() {
    isolated(1, |_| {
        dump_and_restore(&Shape { small_bos: 301, zero_share: 40, ..small() });
    });
}

/// Dumps the server while it runs. Returns its gates that stay closed. The list is empty if the server uses
/// all of the machine's GPUs.
fn dumped_running(gpus: usize, looked_at: Duration) -> Vec<Gate> {
    let folder = tempfile::tempdir().unwrap();
    let (server, criu) = started(&Shape { mode: Mode::MidDispatch, gpus, ..small() }, folder.path());
    let app = &server.app;
    app.answer_is(&[7, 8], 12).unwrap();
    criu.dump_running(server.pid).unwrap();
    let still = Judge::find().map_or_else(Vec::new, |judge| judge.stopped_for(looked_at));
    if still.is_empty() {
        app.continues(2).unwrap();
        app.answers(&[200], 3).unwrap();
    }
    assert!(still.iter().all(|gate| gate.pid == server.pid), "{still:?}");
    still
}

#[test]
fn a_dump_that_leaves_it_running() {
    isolated(1, |_| {
        let all = Topology::read().unwrap().gpus().count();
        assert_eq!(dumped_running(all, LONG), []);
    });
}

#[test]
fn a_dump_of_fewer_gpus_than_the_machine_has_stays_paused() {
    isolated(2, |_| {
        need!(Judge::find(), REAL_GPUS);
        let all = Topology::read().unwrap().gpus().count();
        assert!(matches!(&dumped_running(all - 1, A_WHILE)[..], [Gate { paused: true, .. }]));
    });
}

#[test]
fn a_process_with_render_nodes_only_is_not_dumped() {
    isolated(1, |_| {
        let folder = tempfile::tempdir().unwrap();
        let (server, criu) = started(&Shape { mode: Mode::RenderOnly, ..small() }, folder.path());
        let pid = server.pid;
        let error = criu.dump(pid).unwrap_err().to_string();
        assert!(error.contains("Failed to unpause process: Inappropriate ioctl for device"), "{error}");
        let judge = need!(Judge::find(), REAL_GPUS);
        let still = judge.stopped_for(A_WHILE);
        assert_eq!(still.iter().map(|gate| (gate.pid, gate.paused)).collect::<Vec<_>>(), [(pid, true)]);
    });
}

#[test]
fn a_shared_buffer_is_restored_as_copies() {
    isolated(1, |_| {
        let folder = tempfile::tempdir().unwrap();
        let shape = Shape { mode: Mode::SharedBo, processes: 2, ..small() };
        let (mut server, criu) = started(&shape, folder.path());
        if dumped_and_restored(&mut server, &criu, shape.mode) {
            // Wrong from the first token on whose activation is in the copies.
            assert!(server.answers().unwrap_err().to_string().contains("expected"));
            server.app.quit().unwrap();
            wait_for_the_end_of(server.pid).unwrap();
        }
    });
}
