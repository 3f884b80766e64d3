// SPDX-License-Identifier: MIT OR Apache-2.0
//! Queues and events: dispatches run in order, and once; an evicted queue runs nothing.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use gpu_app::chain::{Lane, Step};
use gpu_app::gpu::{Gpus, PATIENCE, Uploader};
use gpu_app::kernel::{self, Kernel};
use gpu_app::kfd::aql::{Aql, Signal};
use gpu_app::kfd::{Buffer, ComputeQueue, QueueSpec, WaitOutcome};
use rewake_amdgpu_uapi::packet::Sdma;
use softgpu_tests::isolated;

/// Longer than any dispatch that these tests wait for in vain.
const A_WHILE: Duration = Duration::from_millis(300);

/// A queue with memory for a few dispatches, driven by hand.
struct Hand {
    gpus: Arc<Gpus>,
    queue: ComputeQueue,
    memory: Buffer,
    used: u64,
}

impl Hand {
    fn new() -> Self {
        let gpus = Gpus::open(1).unwrap();
        Self::on(&gpus)
    }

    fn on(gpus: &Arc<Gpus>) -> Self {
        let queue = ComputeQueue::new(gpus.device(0), gpus.doorbells(0), QueueSpec::default()).unwrap();
        Self { gpus: Arc::clone(gpus), queue, memory: gpus.host(1 << 16).unwrap(), used: 0 }
    }

    /// A signal of this value; its address and its place.
    fn signal(&mut self, value: i64) -> (u64, u64) {
        let at = self.take();
        self.memory.cpu().write(at, &Signal::bytes(value, 0, 0));
        (self.memory.address() + at, at + Signal::VALUE)
    }

    fn dispatch(&mut self, kernel: Kernel, signal: u64) -> Aql {
        let at = self.take();
        self.memory.cpu().write(at, &kernel.arguments());
        Aql::dispatch(self.gpus.code(0) + kernel.code_offset(), self.memory.address() + at, signal)
    }

    fn take(&mut self) -> u64 {
        self.used += 64;
        self.used - 64
    }

    fn submit(&mut self, packets: &[Aql]) {
        self.queue.submit(packets, PATIENCE).unwrap();
    }

    fn value(&self, at: u64) -> u64 {
        self.memory.cpu().load64(at)
    }

    /// Waits for a signal. A read pointer past a packet means that the packet was taken, not that it is done.
    fn wait(&self, at: u64) {
        let done = (0..6000).any(|_| {
            thread::sleep(Duration::from_millis(10));
            self.value(at) == 0
        });
        assert!(done, "a signal stays at {}", self.value(at));
    }
}

#[test]
fn every_built_in_kernel_computes_what_the_model_does() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let mut lane = Lane::new(&gpus, 1, 1).unwrap();
        let memory = gpus.host(1 << 16).unwrap();
        let place = |at: u64| memory.address() + at;
        let numbers: Vec<u8> =
            (0..4096_u32).flat_map(|n| n.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
        memory.cpu().write(0, &numbers); // 16 KiB: 32 rows of 128, and what is added
        memory.cpu().store64(0x6000, place(0x6040));
        memory.cpu().store64(0x6040, place(0x6010));
        memory.cpu().store64(0x6010, place(0x6000));
        lane.run(
            &[
                Kernel::MatVec {
                    out: place(0x4000),
                    weights: place(0),
                    input: place(64),
                    rows: 32,
                    columns: 128,
                },
                Kernel::Fill { to: place(0x5000), words: 128, value: 0xffff_fff0 },
                Kernel::Axpy { y: place(0x5000), x: place(0), words: 128, a: 5 },
                Kernel::Hash { out: place(0x7000), from: place(0), bytes: 16384, seed: 99 },
                Kernel::Chase { out: place(0x7008), start: place(0x6000), steps: 4 },
                Kernel::Spin { microseconds: 100 },
                Kernel::Copy { to: place(0x7011), from: place(3), bytes: 5 },
            ]
            .map(|kernel| Step { gpu: 0, queue: 0, kernel }),
        )
        .unwrap();
        let words: Vec<u32> = kernel::words(&numbers).collect();
        for row in 0..32_u64 {
            let from = usize::try_from(row * 128).unwrap();
            let right = kernel::dot(&words[from..from + 128], &words[16..16 + 128]);
            assert_eq!(memory.cpu().load32(0x4000 + row * 4), right, "row {row}");
        }
        let mut sums = vec![0xffff_fff0; 128];
        kernel::axpy(&mut sums, &words[..128], 5);
        assert_eq!(memory.cpu().load32(0x5000 + 127 * 4), sums[127]);
        assert_eq!(memory.cpu().load64(0x7000), kernel::hash(kernel::longs(&numbers), 99));
        assert_eq!(memory.cpu().load64(0x7008), place(0x6040));
        let mut copied = [0; 7];
        memory.cpu().read(0x7010, &mut copied);
        assert_eq!((copied[0], &copied[1..6], copied[6]), (0, &numbers[3..8], 0));
    });
}

#[test]
fn a_ring_is_used_many_times_over() {
    isolated(1, |_| {
        let mut hand = Hand::new();
        let counter = hand.take();
        let one = hand.take();
        hand.memory.cpu().store32(one, 1);
        let sum = Kernel::Axpy {
            y: hand.memory.address() + counter,
            x: hand.memory.address() + one,
            words: 1,
            a: 1,
        };
        let packet = hand.dispatch(sum, 0);
        for _ in 0..1000 {
            hand.submit(&[packet]);
        }
        let (signal, at) = hand.signal(1);
        let last = hand.dispatch(sum, signal);
        hand.submit(&[last]);
        hand.wait(at);
        hand.queue.drain(PATIENCE).unwrap();
        assert_eq!(hand.memory.cpu().load32(counter), 1001);
        assert_eq!((hand.queue.read_pointer(), hand.queue.written()), (1001, 1001));
    });
}

#[test]
fn barriers_wait_for_all_or_for_any() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        for any in [false, true] {
            let mut hand = Hand::on(&gpus);
            let ((first, first_at), (second, second_at)) = (hand.signal(1), hand.signal(1));
            let (done, done_at) = hand.signal(1);
            hand.submit(&[Aql::barrier(&[first, second, 0, 0, 0], any, done)]);
            thread::sleep(A_WHILE);
            assert_eq!(hand.value(done_at), 1, "nothing is signalled");
            hand.memory.cpu().store64(first_at, 0);
            if any {
                hand.wait(done_at);
            } else {
                thread::sleep(A_WHILE);
                assert_eq!(hand.value(done_at), 1, "one of two is signalled");
            }
            hand.memory.cpu().store64(second_at, 0);
            hand.wait(done_at);
        }
    });
}

#[test]
fn queues_wait_for_each_other_across_gpus() {
    isolated(2, |_| {
        let gpus = Gpus::open(2).unwrap();
        let mut lane = Lane::new(&gpus, 2, 2).unwrap();
        let memory = gpus.host(4096).unwrap();
        memory.cpu().store32(64, 1);
        let sum = Kernel::Axpy { y: memory.address(), x: memory.address(), words: 1, a: 1 };
        let start = Kernel::Fill { to: memory.address(), words: 1, value: 1 };
        let mut steps = vec![Step { gpu: 0, queue: 0, kernel: start }];
        for round in 0..20 {
            steps.push(Step { gpu: round % 2, queue: round / 2 % 2, kernel: sum });
        }
        lane.run(&steps).unwrap();
        assert_eq!(memory.cpu().load32(0), 1 << 20, "doubled twenty times, once each");
    });
}

#[test]
fn a_queue_with_a_share_of_zero_does_not_run() {
    isolated(1, |_| {
        let mut hand = Hand::new();
        hand.queue.update(0, 7).unwrap();
        let (signal, at) = hand.signal(1);
        let packet = hand.dispatch(Kernel::Spin { microseconds: 1 }, signal);
        hand.submit(&[packet]);
        thread::sleep(A_WHILE);
        assert_eq!((hand.value(at), hand.queue.read_pointer()), (1, 0));
        // No doorbell is written again: one written during the eviction counts.
        hand.queue.update(100, 7).unwrap();
        hand.wait(at);
    });
}

#[test]
fn an_invalid_packet_is_waited_for() {
    isolated(1, |_| {
        let mut hand = Hand::new();
        hand.submit(&[Aql::of_kind(1)]);
        thread::sleep(A_WHILE);
        assert_eq!(hand.queue.read_pointer(), 0);
        let (signal, at) = hand.signal(1);
        let packet = hand.dispatch(Kernel::Spin { microseconds: 1 }, signal);
        let bytes = packet.bytes();
        hand.queue.ring().cpu().write(4, &bytes[4..]);
        hand.queue.ring().cpu().write(0, &bytes[..4]);
        hand.wait(at);
    });
}

#[test]
fn an_unmapped_address_is_reported_and_ends_the_queue() {
    isolated(1, |_| {
        let mut hand = Hand::new();
        let nowhere = 0x7fff_0000_0000 - (1 << 30);
        let (signal, at) = hand.signal(1);
        let packet = hand.dispatch(Kernel::Fill { to: nowhere, words: 1, value: 1 }, signal);
        hand.submit(&[packet]);
        let gpu = hand.gpus.device(0).gpu_id();
        let outcome = hand.gpus.events().wait(&[hand.gpus.fault()], 30_000).unwrap();
        assert_eq!(outcome, WaitOutcome::Fault { gpu, address: nowhere });
        let next = hand.dispatch(Kernel::Spin { microseconds: 1 }, signal);
        hand.submit(&[next]);
        thread::sleep(A_WHILE);
        assert_eq!(hand.value(at), 1, "nothing runs after a fault");
    });
}

#[test]
fn a_copy_engines_fault_is_reported_too() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let mut queue =
            gpu_app::kfd::SdmaQueue::new(gpus.device(0), gpus.doorbells(0), QueueSpec::default()).unwrap();
        let nowhere = 0x7ffe_0000_0000;
        queue.submit(Sdma::new().fill(nowhere, 0, 64).bytes(), PATIENCE).unwrap();
        let outcome = gpus.events().wait(&[gpus.fault()], 30_000).unwrap();
        assert_eq!(outcome, WaitOutcome::Fault { gpu: gpus.device(0).gpu_id(), address: nowhere });
    });
}

#[test]
fn events_are_signalled_by_the_cpu_and_time_out_without() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let events = gpus.events();
        let (one, two) = (events.signal().unwrap(), events.signal().unwrap());
        assert_ne!((one.id(), one.mailbox()), (two.id(), two.mailbox()));
        assert_eq!(events.wait(&[&one, &two], 20).unwrap(), WaitOutcome::Timeout);
        two.set().unwrap();
        assert_eq!(events.wait(&[&one, &two], 20).unwrap(), WaitOutcome::Signalled);
        assert_eq!(events.wait(&[&one, &two], 20).unwrap(), WaitOutcome::Timeout, "it resets itself");
        one.set().unwrap();
        one.reset().unwrap();
        assert_eq!(events.wait(&[&one], 20).unwrap(), WaitOutcome::Timeout, "it was reset");
    });
}

#[test]
fn copy_engines_have_queues_for_many_and_then_no_more() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let node = gpus.device(0).node();
        let most = node.property("num_sdma_engines") * node.property("num_sdma_queues_per_engine");
        let mut all = Vec::new();
        let refusal = loop {
            match Uploader::new(&gpus, 0) {
                Ok(uploader) => all.push(uploader),
                Err(error) => break error,
            }
            assert!(all.len() as u64 <= most, "more than {most} queues");
        };
        // The driver keeps some of newer chips' queues for itself.
        assert!(all.len() as u64 > most / 2, "{} of {most}", all.len());
        let errno =
            refusal.downcast_ref::<rewake_amdgpu_uapi::Error>().and_then(rewake_amdgpu_uapi::Error::errno);
        assert_eq!(errno, Some(libc::ENOMEM), "{refusal:#}");
        all.pop();
        Uploader::new(&gpus, 0).unwrap();
    });
}

#[test]
fn a_killed_process_leaves_nothing_behind() {
    isolated(1, |scene| {
        if scene.role() == Some("victim") {
            let gpus = Gpus::open(1).unwrap();
            let mut lane = Lane::new(&gpus, 1, 2).unwrap();
            let _memory = gpus.registered(&vec![1; 1 << 20]).unwrap();
            let spin = Step { gpu: 0, queue: 1, kernel: Kernel::Spin { microseconds: 60_000_000 } };
            lane.launch(&[spin, spin]).unwrap();
            scene.say("at work");
            let _ = scene.hear();
        } else {
            let mut victim = scene.peer("victim");
            assert_eq!(victim.hear(), "at work");
            victim.kill();
        }
    });
}
