// SPDX-License-Identifier: MIT OR Apache-2.0
//! The BOs and contexts of a process on its render nodes, by its role.

use std::fmt::Write as _;
use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use gpu_app::gpu::Gpus;
use gpu_app::kfd::Buffer;
use nix::sys::memfd::{MFdFlags, memfd_create};
use rewake_amdgpu_uapi::abi::memory::{Mapping, PAGE};
use rewake_amdgpu_uapi::abi::{
    AMDGPU_GEM_CREATE_CPU_ACCESS_REQUIRED, AMDGPU_GEM_CREATE_NO_CPU_ACCESS, AMDGPU_GEM_DOMAIN_GTT,
    AMDGPU_GEM_DOMAIN_VRAM, drm_amdgpu_gem_create_in, drm_amdgpu_gem_vm_entry, udmabuf,
};
use rewake_amdgpu_uapi::packet::Sdma;
use rewake_amdgpu_uapi::render::Render;
use rewake_amdgpu_uapi::topology::Topology;
use rewake_testkit::soon;

use super::state;

/// `AMDGPU_GEM_CREATE_VM_ALWAYS_VALID`
const ALWAYS_VALID: u64 = 1 << 6;
const SEEN: u64 = AMDGPU_GEM_CREATE_CPU_ACCESS_REQUIRED as u64;
const UNSEEN: u64 = AMDGPU_GEM_CREATE_NO_CPU_ACCESS as u64;

#[derive(Debug, Default)]
pub(crate) struct Stage {
    views: Vec<Mapping>,
    renders: Vec<Render>,
    computed: Vec<Buffer>,
    gpus: Option<Arc<Gpus>>,
    exported: Vec<OwnedFd>,
    minor: u32,
}

impl Stage {
    pub(crate) fn new(role: &str) -> anyhow::Result<Self> {
        let topology = Topology::read()?;
        let minor = topology.gpus().next().context("a GPU")?.render_minor();
        let mut stage = Self { minor, ..Self::default() };
        match role {
            "numbers" => stage.numbers()?,
            "common" => stage.common()?,
            "mixed" => stage.mixed()?,
            "beside" => stage.beside()?,
            "idle" => stage.renders.push(Render::open(minor)?),
            "userptr" => {
                let memory = Mapping::anonymous(4 * PAGE)?;
                let render = stage.open()?;
                render.userptr(&memory)?;
                stage.views.push(memory);
            }
            "always-valid" => {
                stage.open()?.create(PAGE, AMDGPU_GEM_DOMAIN_VRAM, ALWAYS_VALID)?;
            }
            "foreign" => {
                let dmabuf = foreign()?;
                stage.open()?.import(dmabuf.as_fd())?;
            }
            "syncobjs" => {
                state::syncobjs(stage.open()?)?;
                state::syncobj_without_buffers(stage.open()?)?;
            }
            "metadata" => state::metadata(stage.open()?)?,
            "submissions" => state::submissions(stage.open()?)?,
            "power" => state::pstate(stage.open()?)?,
            other => {
                let exported = state::refused(other, stage.open()?)?;
                stage.exported.extend(exported);
            }
        }
        Ok(stage)
    }

    fn open(&mut self) -> anyhow::Result<&Render> {
        self.renders.push(Render::open(self.minor)?);
        self.renders.last().context("just opened")
    }

    /// Gaps among the numbers, every kind of memory, contexts, mappings of parts, twice, and in the upper
    /// half.
    fn numbers(&mut self) -> anyhow::Result<()> {
        let minor = self.minor;
        let render = self.open()?;
        let (vram, gtt) = (AMDGPU_GEM_DOMAIN_VRAM, AMDGPU_GEM_DOMAIN_GTT);
        let kinds =
            [(vram, 0), (vram, SEEN), (gtt, SEEN), (vram, UNSEEN), (gtt, 0), (vram | gtt, 0), (vram, SEEN)];
        for (index, (domain, flags)) in (1..).zip(kinds) {
            let size = index * 3 * PAGE;
            let alignment = if index == 4 { 16 * PAGE } else { 0 };
            let wanted = drm_amdgpu_gem_create_in {
                bo_size: size,
                alignment,
                domains: u64::from(domain),
                domain_flags: flags,
            };
            let handle = render.create_as(wanted)?;
            ensure!(u64::from(handle) == index, "buffer {index} has number {handle}");
            // The last BO but one stays zero.
            if index != 6 {
                put(render, minor, handle, size, u8::try_from(index)?)?;
            }
        }
        let map = |handle, addr, offset, size, flags| {
            render.map_again(handle, &drm_amdgpu_gem_vm_entry { addr, size, offset, flags })
        };
        map(2, 1 << 32, 0, 6 * PAGE, 2 | 4)?;
        map(3, 2 << 32, PAGE, 2 * PAGE, 2)?;
        map(3, 3 << 32, 0, 9 * PAGE, 2 | 4 | 8)?;
        map(4, 0xffff_8000_0000_0000, 0, 12 * PAGE, 2)?;
        for gone in [1, 5] {
            render.close(gone)?;
        }
        for context in 1..=4 {
            ensure!(render.context()? == context);
        }
        render.free_context(2)?;
        let views = [render.map(2, 6 * PAGE)?, render.map(3, 9 * PAGE)?];
        self.views.extend(views);
        Ok(())
    }

    /// The second file has three BOs of its own, and the first file's BO as its second number.
    fn common(&mut self) -> anyhow::Result<()> {
        let minor = self.minor;
        let first = Render::open(minor)?;
        let handle = first.create(4 * PAGE, AMDGPU_GEM_DOMAIN_VRAM, SEEN)?;
        put(&first, minor, handle, 4 * PAGE, 7)?;
        let second = Render::open(minor)?;
        second.create(PAGE, AMDGPU_GEM_DOMAIN_GTT, 0)?;
        let shared = second.import(dmabuf(&first, handle)?.as_fd())?;
        ensure!(shared == 2);
        second.map_gpu(shared, 1 << 32, 4 * PAGE)?;
        second.create(PAGE, AMDGPU_GEM_DOMAIN_GTT, 0)?;
        self.views.push(second.map(shared, 4 * PAGE)?);
        self.renders = vec![first, second];
        Ok(())
    }

    /// A process that computes. The file with its compute address space has a BO of its own, and maps one of
    /// the compute side's BOs a second time. Another file has BOs of the same numbers.
    fn mixed(&mut self) -> anyhow::Result<()> {
        let minor = self.minor;
        let other = Render::open(minor)?;
        let gpus = Gpus::open(1)?;
        let buffer = gpus.local(0, 8 * PAGE)?;
        let mut bytes = vec![0; usize::try_from(8 * PAGE)?];
        bytes.iter_mut().zip((0_u8..251).cycle()).for_each(|(byte, value)| *byte = value);
        buffer.cpu().write(0, &bytes);
        let compute = gpus.device(0).render();
        for (render, value) in [(&other, 1), (compute, 2)] {
            let handle = render.create(2 * PAGE, AMDGPU_GEM_DOMAIN_VRAM, SEEN)?;
            ensure!(handle == 1);
            put(render, minor, handle, 2 * PAGE, value)?;
            self.views.push(render.map(handle, 2 * PAGE)?);
            ensure!(render.context()? == 1);
        }
        other.map_gpu(1, 5 << 40, 2 * PAGE)?;
        compute.map_gpu(1, 5 << 40, 2 * PAGE)?;
        let again = compute.import(buffer.export()?.as_fd())?;
        compute.map_gpu(again, 6 << 40, 8 * PAGE)?;
        self.computed.push(buffer);
        self.gpus = Some(gpus);
        self.renders.push(other);
        Ok(())
    }

    /// A process that computes, and a file with a BO that has no mapping.
    fn beside(&mut self) -> anyhow::Result<()> {
        let gpus = Gpus::open(1)?;
        let buffer = gpus.local(0, 8 * PAGE)?;
        buffer.cpu().write(0, &[3; 4096]);
        self.computed.push(buffer);
        self.gpus = Some(gpus);
        self.open()?.create(PAGE, AMDGPU_GEM_DOMAIN_VRAM, SEEN)?;
        Ok(())
    }

    fn renders(&self) -> impl Iterator<Item = &Render> {
        self.renders.iter().chain(self.gpus.iter().map(|gpus| gpus.device(0).render()))
    }

    /// A text of all BOs, mappings and contexts.
    pub(crate) fn look(&mut self) -> anyhow::Result<String> {
        let mut text = String::new();
        for (number, render) in self.renders().enumerate() {
            for handle in 1..16 {
                let Some(info) = render.created_as(handle)? else { continue };
                let (size, flags) = (info.bo_size, info.domain_flags);
                write!(
                    text,
                    "; file {number}: {handle} {size:#x} {:#x} {:#x} {flags:#x}",
                    info.alignment, info.domains
                )?;
                if let Some(dmabuf) = render.export(handle)? {
                    write!(text, " {:x}", hash(&get(self.minor, &dmabuf, size)?))?;
                }
                for mapping in render.mappings(handle).unwrap_or_default() {
                    let drm_amdgpu_gem_vm_entry { addr, size, offset, flags } = mapping;
                    write!(text, " at {addr:#x} {size:#x} {offset:#x} {flags:#x}")?;
                }
            }
        }
        for view in self.views.iter().chain(self.computed.iter().map(Buffer::cpu)) {
            let mut bytes = vec![0; usize::try_from(view.len())?];
            view.read(0, &mut bytes);
            write!(text, "; view {:#x} {:x}", view.address(), hash(&bytes))?;
        }
        let contexts =
            |render: &Render| (1..8).map(|number| render.has_context(number)).collect::<Result<Vec<_>, _>>();
        write!(text, "; contexts {:?}", self.renders().map(contexts).collect::<Result<Vec<_>, _>>()?)?;
        for (number, render) in self.renders().enumerate() {
            write!(text, "; state of file {number}{}", state::look(render)?)?;
        }
        Ok(text)
    }

    /// Checks that BOs and contexts can be used as before. Views show the BOs, and the next number is the
    /// lowest free one. Submissions run in old contexts, and the compute side's new BOs can be mapped.
    pub(crate) fn use_all(&mut self) -> anyhow::Result<String> {
        for render in self.renders() {
            let numbers: Vec<u32> = (1..16)
                .filter_map(|number| render.created_as(number).ok().flatten().map(|_| number))
                .collect();
            let lowest = (1..).find(|number| !numbers.contains(number)).context("a number")?;
            let found = render.create(PAGE, AMDGPU_GEM_DOMAIN_GTT, SEEN)?;
            ensure!(found == lowest, "number {found}, expected {lowest}");
            let context = (1..8).find(|number| render.has_context(*number).unwrap_or(false));
            if let Some(context) = context {
                run(render, context, found)?;
            }
            render.close(found)?;
            state::use_all(render)?;
        }
        for view in &self.views {
            view.write(0, &[0x5a; 16]);
        }
        if let ([first, second], [_]) = (&self.renders[..], &self.views[..]) {
            let both = [first.map(1, PAGE)?.load64(0), second.map(2, PAGE)?.load64(0)];
            ensure!(both == [0x5a5a_5a5a_5a5a_5a5a; 2], "the buffer in common is two: {both:x?}");
        }
        if let Some(gpus) = &self.gpus {
            let before = self.computed[0].cpu().load64(0);
            let again = gpus.device(0).render().map(2, 8 * PAGE)?;
            ensure!(again.load64(0) == before);
            self.computed[0].cpu().store64(0, !before);
            ensure!(again.load64(0) == !before, "the compute side's buffer and its handle are two");
            let fresh = gpus.local(0, PAGE)?;
            fresh.cpu().write(0, &[1]);
        }
        Ok("done".to_owned())
    }
}

/// A dma-buf of another driver.
fn foreign() -> anyhow::Result<OwnedFd> {
    let memory = memfd_create(c"foreign", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    nix::unistd::ftruncate(&memory, 4096)?;
    nix::fcntl::fcntl(&memory, nix::fcntl::FcntlArg::F_ADD_SEALS(nix::fcntl::SealFlag::F_SEAL_SHRINK))?;
    let device = File::options().read(true).write(true).open("/dev/udmabuf")?;
    Ok(udmabuf::create(device.as_fd(), memory.as_fd(), 0, PAGE)?)
}

fn dmabuf(render: &Render, handle: u32) -> anyhow::Result<OwnedFd> {
    render.export(handle)?.context("a dma-buf")
}

/// Imports a BO into a render file of its own, with memory for commands and bytes, so that the GPU accesses
/// what the CPU cannot.
fn beside(
    minor: u32,
    dmabuf: &OwnedFd,
    size: u64,
    act: impl FnOnce(&Mapping, Sdma, [u64; 2]) -> Sdma,
) -> anyhow::Result<Mapping> {
    const AT: [u64; 2] = [1 << 32, 2 << 32];
    let render = Render::open(minor)?;
    let buffer = render.import(dmabuf.as_fd())?;
    let own = render.create(size + PAGE, AMDGPU_GEM_DOMAIN_GTT, SEEN)?;
    render.map_gpu(buffer, AT[0], size)?;
    render.map_gpu(own, AT[1], size + PAGE)?;
    let view = render.map(own, size + PAGE)?;
    let mut packets = act(&view, Sdma::new(), AT);
    while !packets.bytes().len().is_multiple_of(32) {
        packets = packets.nop();
    }
    view.write(size, packets.bytes());
    let bytes = u32::try_from(packets.bytes().len())?;
    let context = render.context()?;
    let submission = render.copy_engine(context, 0, (AT[1] + size, bytes), &[buffer, own], &[])?;
    ensure!(soon(|| render.wait(submission, 0).unwrap_or(false)), "a copy does not end");
    Ok(view)
}

/// Fills a BO with bytes that begin with `seed`.
fn put(render: &Render, minor: u32, handle: u32, size: u64, seed: u8) -> anyhow::Result<()> {
    let bytes: Vec<u8> = (0..size).map(|at| ((at / 7) ^ (at >> 11)).to_le_bytes()[0] ^ seed).collect();
    beside(minor, &dmabuf(render, handle)?, size, |view, packets, [there, here]| {
        view.write(0, &bytes);
        packets.copy(there, here, size)
    })?;
    Ok(())
}

fn get(minor: u32, dmabuf: &OwnedFd, size: u64) -> anyhow::Result<Vec<u8>> {
    let view = beside(minor, dmabuf, size, |_, packets, [there, here]| packets.copy(here, there, size))?;
    let mut bytes = vec![0; usize::try_from(size)?];
    view.read(0, &mut bytes);
    Ok(bytes)
}

/// Runs a fill of its second half in a BO of one page.
fn run(render: &Render, context: u32, handle: u32) -> anyhow::Result<()> {
    let at = 7 << 40;
    render.map_gpu(handle, at, PAGE)?;
    let view = render.map(handle, PAGE)?;
    let mut packets = Sdma::new().fill(at + PAGE / 2, 0x1234_5678, PAGE / 2);
    while !packets.bytes().len().is_multiple_of(32) {
        packets = packets.nop();
    }
    view.write(0, packets.bytes());
    let bytes = u32::try_from(packets.bytes().len())?;
    let submission = render.copy_engine(context, 0, (at, bytes), &[handle], &[])?;
    let done = soon(|| render.wait(submission, 0).unwrap_or(false));
    ensure!(done && view.load32(PAGE - 4) == 0x1234_5678, "a submission in an old context");
    render.unmap_gpu(handle, at, PAGE)?;
    Ok(())
}

fn hash(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}
