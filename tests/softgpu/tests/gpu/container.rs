// SPDX-License-Identifier: MIT OR Apache-2.0
//! Containers with GPUs: `runc checkpoint` and `runc restore --lazy-pages`, with background loads of CPU and
//! GPU memory.

use gpu_app::shape::{Mode, Shape};
use nix::sys::signal::Signal;
use rewake_skip::need;
use softgpu_tests::container::render_nodes;
use softgpu_tests::criu::queues;
use softgpu_tests::dumped::{ONE_RING, signal, unreached};
use softgpu_tests::server::small;
use softgpu_tests::streamer::recover;
use softgpu_tests::{Container, DelayedCopies, Machine, REAL_GPUS, Streamer, isolated};

fn dump_and_restore(shape: &Shape) {
    need!(queues());
    let container = Container::dumped(shape).unwrap();
    let mut both = Streamer::of_both(&container.images()).unwrap();
    container.restore().unwrap();
    assert!(both.end().unwrap().success(), "{}", both.said());
    let loaded = |what: &str| assert!(both.said().contains(what), "{}", both.said());
    loaded("all CPU memory is resident");
    loaded("queues resumed");
    container.ends_well().unwrap();
}

/// The target runs; its queues stay evicted for as long as copies are held.
fn paused() -> Result<(Machine, Container, Streamer, DelayedCopies), &'static str> {
    let machine = Machine::find().ok_or(REAL_GPUS)?;
    machine.becomes(&ONE_RING);
    queues()?;
    let container = Container::dumped(&unreached()).unwrap();
    let (both, delayed) = (Streamer::of_both(&container.images()).unwrap(), DelayedCopies::streamers());
    container.restore().unwrap();
    Ok((machine, container, both, delayed))
}

#[test]
fn a_container_with_gpus_is_restored() {
    isolated(1, |_| {
        dump_and_restore(&unreached());
        // CPUs can access these buffers: placeholders, and swaps of mappings that the ioctl filter does not
        // cover.
        dump_and_restore(&Shape { layer_kib: 4096, ..small() });
    });
}

/// A node agent gives each pod some of the machine's GPUs, and another pod others.
#[test]
fn a_pod_is_restored_with_another_gpu_than_it_had() {
    isolated(2, |_| {
        need!(queues());
        let nodes = render_nodes().unwrap();
        let restore = |container: &Container, images: &str| {
            let mut both = Streamer::of_both(&container.path(images)).unwrap();
            container.restore_from(images).unwrap();
            assert!(both.end().unwrap().success(), "{}", both.said());
        };
        let pod = Container::dumped_with(&unreached(), &nodes[..1]).unwrap();
        let other = pod.copy(&nodes[1..2]).unwrap();
        restore(&other, "images");
        restore(&pod, "images");
        // The other one's `/dev` is of the image, and has the first GPU's render node only.
        other.dump("again").unwrap();
        pod.ends_well().unwrap();
        restore(&other, "again");
        other.ends_well().unwrap();
    });
}

#[test]
fn processes_of_a_container_share_their_buffers_again() {
    isolated(1, |_| {
        dump_and_restore(&Shape { processes: 2, mode: Mode::SharedBo, ..small() });
    });
}

#[test]
fn a_container_with_a_closed_gate_is_not_dumped() {
    isolated(1, |_| {
        let (_machine, container, mut both, delayed) = need!(paused());
        let error = format!("{:#}", container.dump("again").unwrap_err());
        assert!(error.contains("has GPU queues that are stopped"), "{error}");
        drop(delayed);
        assert!(both.end().unwrap().success(), "{}", both.said());
        container.ends_well().unwrap();
    });
}

#[test]
fn recover_kills_a_container_whose_streamer_was_killed() {
    isolated(1, |_| {
        let (_machine, container, both, _held) = need!(paused());
        let all: Vec<u32> = [both.pid()].into_iter().chain(both.workers()).collect();
        signal(&all, Signal::SIGKILL);
        let (well, said) = recover().unwrap();
        assert!(!well && said.contains("its GPUs were not resumed yet"), "{said}");
        container.ends().unwrap();
    });
}
