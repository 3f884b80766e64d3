// SPDX-License-Identifier: MIT OR Apache-2.0
//! Many submissions at once: how they end, and how the engine reports it.

use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use gpu_app::gpu::Gpus;
use gpu_app::kfd::{Buffer, Spec};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rewake_amdgpu_uapi::abi::call::Argument as _;
use rewake_amdgpu_uapi::abi::{
    AMDGPU_CTX_QUERY2_FLAGS_GUILTY, AMDGPU_VA_OP_CLEAR, drm as gem, drm_amdgpu_gem_va,
};
use rewake_sdma_copy::{Bo, CopyCompletion, CopyEngine, Error, IN_FLIGHT, Shape, Staging, Ticket, Transfer};
use rewake_skip::need;
use softgpu_tests::isolated;

use crate::copy_engine::{
    MIB, SMALL, Through, bandwidth, engine, import, pattern, place, read, render, rings, run, soon,
    where_copies_wait,
};

/// Polling interval for a state that lasts a moment only.
const TRIES: u32 = 10;

#[test]
fn many_in_flight_beat_one_at_a_time() {
    isolated(1, |scene| {
        where_copies_wait(scene, "10", || {
            const BYTES: u64 = MIB / 2;
            let gpus = Gpus::open(1).unwrap();
            let (staging, mut engine) = engine(&gpus, Through::Pages, Shape { slots: 16, slot_bytes: BYTES });
            let buffer = gpus.host(BYTES).unwrap();
            let bo = import(&mut engine, &buffer);
            let save = |slot| [Transfer::Save { bo, at: 0, to: place(&staging, slot, 0), bytes: BYTES }];
            let alone = |engine: &mut CopyEngine| (0..16).for_each(|slot| run(engine, &save(slot)));
            let together = |engine: &mut CopyEngine| {
                let tickets: Vec<Ticket> = (0..16).map(|slot| engine.submit(&save(slot)).unwrap()).collect();
                assert_eq!(
                    (engine.room(), engine.in_flight() > 2),
                    (2 * IN_FLIGHT - engine.in_flight(), true)
                );
                tickets.into_iter().for_each(|ticket| engine.wait(ticket, soon()).unwrap());
            };
            let mut took = |work: &dyn Fn(&mut CopyEngine)| {
                let start = Instant::now();
                work(&mut engine);
                start.elapsed()
            };
            let (mut fastest_alone, mut fastest_together) = (Duration::MAX, Duration::MAX);
            let give_up = soon();
            // Other processes may use this machine's CPUs for a while.
            let beaten = (0..).take_while(|tries| *tries < 3 || Instant::now() < give_up).any(|tries| {
                fastest_alone = fastest_alone.min(took(&alone));
                fastest_together = fastest_together.min(took(&together));
                tries > 1 && fastest_together * 3 < fastest_alone * 2
            });
            let found = format!("{fastest_alone:.1?} one at a time, {fastest_together:.1?} all at once");
            eprintln!("16 transfers of {BYTES} bytes: {found}");
            assert!(beaten, "{found}");
        });
    });
}

#[test]
fn gpus_share_staging_and_do_not_wait_for_each_other() {
    isolated(2, |_| {
        const BYTES: u64 = 8 * MIB;
        let gpus = Gpus::open(2).unwrap();
        let renders = [render(&gpus, 0), render(&gpus, 1)];
        let staging = Staging::new(Shape { slots: 4, slot_bytes: BYTES }, &renders.each_ref()).unwrap();
        let mut engines = renders.map(|render| CopyEngine::open(render, &staging).unwrap());
        let buffers = [0, 1].map(|gpu| Buffer::alloc(gpus.device(gpu), Spec::gtt(BYTES)).unwrap());
        let bos: Vec<Bo> =
            engines.iter_mut().zip(&buffers).map(|(engine, buffer)| import(engine, buffer)).collect();
        assert!(matches!(engines[0].release(bos[1]), Err(Error::Bo { .. })), "another GPU's");
        let load = |gpu: usize, bytes| {
            [Transfer::Load { bo: bos[gpu], at: 0, from: place(&staging, gpu, 0), bytes }]
        };
        let save = |gpu: usize| {
            [Transfer::Save { bo: bos[gpu], at: 0, to: place(&staging, gpu + 2, 0), bytes: BYTES }]
        };
        for gpu in 0..2 {
            staging.write(place(&staging, gpu, 0), &pattern(BYTES, gpu as u64));
        }
        let loads = [0, 1].map(|gpu| engines[gpu].submit(&load(gpu, BYTES)).unwrap());
        (0..2).for_each(|gpu| engines[gpu].wait(loads[gpu], soon()).unwrap());
        let saves = [0, 1].map(|gpu| engines[gpu].submit(&save(gpu)).unwrap());
        (0..2).for_each(|gpu| engines[gpu].wait(saves[gpu], soon()).unwrap());
        for gpu in 0..2 {
            let bytes = read(&staging, place(&staging, gpu + 2, 0), BYTES);
            assert!(bytes == pattern(BYTES, gpu as u64), "GPU {gpu}");
        }
        if bandwidth().is_ok() {
            // A thread that the scheduler delays finds both done.
            let at_work_still = (0..TRIES).any(|_| {
                let long = engines[0].submit(&[load(0, BYTES); 4].concat()).unwrap();
                let short = engines[1].submit(&load(1, 4096)).unwrap();
                engines[1].wait(short, soon()).unwrap();
                let at_work = engines[0].finished().unwrap().count() == 0;
                if at_work {
                    engines[0].wait(long, soon()).unwrap();
                }
                at_work
            });
            assert!(at_work_still, "the engine waited for the other GPU {TRIES} times");
        }
    });
}

#[test]
fn a_full_engine_reports_that_and_copies_on() {
    isolated(1, |_| {
        need!(bandwidth());
        let gpus = Gpus::open(1).unwrap();
        let (staging, mut engine) = engine(&gpus, Through::Pages, SMALL);
        let buffer = gpus.host(256 << 10).unwrap();
        let bo = import(&mut engine, &buffer);
        let load = [Transfer::Load { bo, at: 0, from: place(&staging, 0, 0), bytes: 256 << 10 }];
        let first = engine.submit(&load).unwrap();
        for room in (0..2 * IN_FLIGHT - 1).rev() {
            engine.submit(&load).unwrap();
            assert_eq!(engine.room(), room);
        }
        assert!(matches!(engine.submit(&load), Err(Error::Full { .. })));
        engine.wait(first, soon()).unwrap();
        engine.submit(&load).unwrap();
        assert!(matches!(engine.wait(first, soon()), Err(Error::Ticket { .. })), "reported already");
    });
}

#[test]
fn a_finished_copy_is_reported_once_and_can_be_polled_for() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        for through in [Through::Pages, Through::Cpu] {
            let (staging, mut engine) = engine(&gpus, through, SMALL);
            let buffer = gpus.host(256 << 10).unwrap();
            let bo = import(&mut engine, &buffer);
            let readable = |engine: &CopyEngine, timeout: u16| {
                let event = engine.event_fd().expect("Linux 6.6 has SYNCOBJ_EVENTFD");
                poll(&mut [PollFd::new(event, PollFlags::POLLIN)], PollTimeout::from(timeout)).unwrap() == 1
            };
            assert!(!readable(&engine, 0), "{through:?}: nothing has happened");
            let save = |slot| [Transfer::Save { bo, at: 0, to: place(&staging, slot, 0), bytes: 256 << 10 }];
            let mut wanted: Vec<Ticket> = (0..5).map(|slot| engine.submit(&save(slot)).unwrap()).collect();
            assert_eq!(engine.in_flight(), 5, "{through:?}: none reported yet");
            engine.wait(wanted.remove(2), soon()).unwrap();
            assert_eq!(engine.in_flight(), 4, "{through:?}");
            while !wanted.is_empty() {
                assert!(readable(&engine, 60_000), "{through:?}: {wanted:?} are left");
                let found: Vec<CopyCompletion> = engine.finished().unwrap().collect();
                for CopyCompletion { ticket, result } in found {
                    result.unwrap();
                    let place = wanted.iter().position(|wanted| *wanted == ticket);
                    wanted.remove(place.expect("reported once, and never what `wait` returned"));
                }
            }
            assert_eq!((engine.finished().unwrap().count(), engine.in_flight()), (0, 0));
            // The kernel may signal the end of a reported submission once more.
            let quiet = (0..=5).any(|_| {
                !readable(&engine, 0) || {
                    assert_eq!(engine.finished().unwrap().count(), 0, "{through:?}: reported twice");
                    false
                }
            });
            assert!(quiet, "{through:?}: all is reported");
        }
    });
}

#[test]
fn a_late_submission_is_named_and_ends_later() {
    isolated(1, |scene| {
        // Four seconds are the shortest timeout of them.
        where_copies_wait(scene, "2", || {
            let gpus = Gpus::open(1).unwrap();
            let (staging, mut engine) =
                engine(&gpus, Through::Pages, Shape { slots: 1, slot_bytes: 16 * MIB });
            let buffer = gpus.host(16 * MIB).unwrap();
            let bo = import(&mut engine, &buffer);
            let load = |mib| [Transfer::Load { bo, at: 0, from: place(&staging, 0, 0), bytes: mib * MIB }];
            let tickets = [8, 16, 8].map(|mib| engine.submit(&load(mib)).unwrap());
            let deadline = Instant::now() + Duration::from_millis(10);
            let troubles = tickets.map(|ticket| match engine.wait(ticket, deadline).unwrap_err() {
                Error::Late(trouble) => *trouble,
                error => panic!("{error}"),
            });
            let [one, two, three] = troubles;
            assert_ne!(one.ring, two.ring, "both rings work");
            assert_eq!(three.ring, one.ring, "the ring with fewer bytes gets the next");
            assert_eq!([one, two, three].map(|late| late.bytes / MIB), [8, 16, 8]);
            assert_eq!([one, two, three].map(|late| late.queued / MIB), [16, 16, 16]);
            for late in troubles {
                assert!((Duration::from_millis(10)..Duration::from_secs(60)).contains(&late.age), "{late}");
                assert_eq!(
                    (late.minor, late.transfers, late.errno, late.state),
                    (engine.minor(), 1, None, Some(0))
                );
            }
            assert_eq!(engine.in_flight(), 3, "still");
            tickets.into_iter().for_each(|ticket| engine.wait(ticket, soon()).unwrap());
        });
    });
}

#[test]
fn a_submission_that_hangs_the_engine_is_an_error_of_its_ticket() {
    isolated(1, |_| {
        need!(rings());
        let gpus = Gpus::open(1).unwrap();
        let render = render(&gpus, 0);
        let behind = render.as_fd().try_clone_to_owned().unwrap();
        let staging = Staging::new(SMALL, &[&render]).unwrap();
        let mut engine = CopyEngine::open(render, &staging).unwrap();
        let buffer = gpus.host(4096).unwrap();
        let bo = import(&mut engine, &buffer);
        let load = [Transfer::Load { bo, at: 0, from: place(&staging, 0, 0), bytes: 4096 }];
        run(&mut engine, &load);
        // Unmaps everything that the engine has mapped.
        let mut clear = drm_amdgpu_gem_va {
            operation: AMDGPU_VA_OP_CLEAR,
            va_address: 64 << 10,
            map_size: 1 << 40,
            ..drm_amdgpu_gem_va::zeroed()
        };
        gem::gem_va(behind.as_fd(), &mut clear).unwrap();
        let ticket = engine.submit(&load).unwrap();
        let error = engine.wait(ticket, soon()).unwrap_err();
        let Error::Failed(trouble) = &error else { panic!("{error}") };
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let right = if release.starts_with("6.12") { libc::ECANCELED } else { libc::ETIME };
        assert_eq!((trouble.errno, trouble.bytes, trouble.minor), (Some(right), 4096, engine.minor()));
        let guilty = u64::from(AMDGPU_CTX_QUERY2_FLAGS_GUILTY);
        assert_eq!(trouble.state.unwrap() & guilty, guilty, "{error}");
        assert!(
            error.to_string().contains("the GPU was reset, this engine's commands are the cause"),
            "{error}"
        );
        assert!(matches!(engine.submit(&load), Err(Error::Lost { .. })), "a lost engine takes no more");
        // Another engine works.
        let render = crate::copy_engine::render(&gpus, 0);
        let mut other = CopyEngine::open(render, &staging).unwrap();
        let bo = import(&mut other, &buffer);
        run(&mut other, &[Transfer::Fill { bo, at: 0, bytes: 4096, word: 5 }]);
        assert_eq!(buffer.cpu().load32(4092), 5);
    });
}
