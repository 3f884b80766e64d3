// SPDX-License-Identifier: MIT OR Apache-2.0
//! The copy engine: contents of BOs to and from staging memory, by every copy method that it has.

mod contents;
mod flight;
mod life;

use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use gpu_app::gpu::Gpus;
use gpu_app::kfd::Buffer;
use rewake_amdgpu_uapi::render::Render;
use rewake_sdma_copy::{Bo, CopyEngine, CopyPath, Shape, Staging, StagingMemory, StagingOffset, Transfer};
use rewake_skip::need;
use softgpu_tests::{Machine, REAL_GPUS, Scene};

const MIB: u64 = 1 << 20;
const SMALL: Shape = Shape { slots: 8, slot_bytes: 256 << 10 };

/// The copy methods, whichever of them this machine would choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Through {
    Pages,
    Gtt,
    Cpu,
}

const ALL: [Through; 3] = [Through::Pages, Through::Gtt, Through::Cpu];

fn render(gpus: &Gpus, gpu: usize) -> Render {
    Render::open(gpus.device(gpu).node().render_minor()).unwrap()
}

fn engine(gpus: &Gpus, through: Through, shape: Shape) -> (Staging, CopyEngine) {
    let render = render(gpus, 0);
    let staging = match through {
        Through::Pages => Staging::new(shape, &[&render]).unwrap(),
        Through::Gtt => Staging::gtt(shape, &render, "a test wants it").unwrap(),
        Through::Cpu => Staging::pages(shape).unwrap(),
    };
    let engine = match through {
        Through::Cpu => CopyEngine::by_cpu(render, &staging, "a test wants it").unwrap(),
        _ => CopyEngine::open(render, &staging).unwrap(),
    };
    if softgpu("sdma_rings") != Some(0) {
        let rings = matches!(engine.path(), CopyPath::Rings { .. });
        assert_eq!(rings, through != Through::Cpu, "{}", engine.path());
    }
    let memory = if through == Through::Gtt { StagingMemory::Gtt } else { StagingMemory::Pages };
    assert_eq!(staging.memory(), memory);
    (staging, engine)
}

/// A number among softgpu.ko's parameters; None on real GPUs.
fn softgpu(parameter: &str) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/sys/module/softgpu/parameters/{parameter}"));
    text.ok().and_then(|text| text.trim().parse().ok())
}

fn place(staging: &Staging, slot: usize, at: u64) -> StagingOffset {
    StagingOffset { slot: staging.slots().nth(slot).unwrap(), at }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn import(engine: &mut CopyEngine, buffer: &Buffer) -> Bo {
    engine.import(buffer.export().unwrap().as_fd(), buffer.size()).unwrap()
}

fn run(engine: &mut CopyEngine, transfers: &[Transfer]) {
    let ticket = engine.submit(transfers).unwrap();
    engine.wait(ticket, soon()).unwrap();
}

fn pattern(bytes: u64, seed: u64) -> Vec<u8> {
    (0..bytes).map(|byte| u8::try_from((byte * 7 + byte / 251 + seed) % 255).unwrap() + 1).collect()
}

fn read(staging: &Staging, from: StagingOffset, bytes: u64) -> Vec<u8> {
    let mut read = vec![0; usize::try_from(bytes).unwrap()];
    staging.read(from, &mut read);
    read
}

/// The reason why copies do not take the time that the parameter says.
fn bandwidth() -> Result<(), &'static str> {
    rings()?;
    let found = softgpu("copy_mbps").is_some_and(|found| found > 0);
    if found { Ok(()) } else { Err("softgpu.ko was loaded without copy_mbps") }
}

/// Runs `body` where rings copy `mbps` MB/s, and copies wait instead of computing. It runs in another
/// process: the machine changes while no process uses it. Skipped without rings, or on real GPUs.
fn where_copies_wait(scene: &Scene, mbps: &str, body: fn()) {
    if scene.role().is_some() {
        return body();
    }
    need!(rings());
    let machine = need!(Machine::find(), REAL_GPUS);
    machine.becomes(&[("copy_mbps", mbps)]);
    scene.peer("copies").finish();
}

/// The reason where the GPU has no rings.
fn rings() -> Result<(), &'static str> {
    let found = softgpu("sdma_rings") != Some(0);
    if found { Ok(()) } else { Err("softgpu.ko was loaded without copy rings") }
}
