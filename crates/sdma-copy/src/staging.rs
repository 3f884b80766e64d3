// SPDX-License-Identifier: MIT OR Apache-2.0
//! CPU memory between a file or socket and a GPU.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use drm::control::Device as _;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::ftruncate;
use rewake_amdgpu_uapi::abi::memory::{Mapping, PAGE};
use rewake_amdgpu_uapi::abi::{AMDGPU_GEM_CREATE_CPU_ACCESS_REQUIRED, AMDGPU_GEM_DOMAIN_GTT, udmabuf};
use rewake_amdgpu_uapi::render::Render;

use crate::Error;
use crate::caps::SdmaCaps;

/// Bytes of ordinary pages in one dma-buf: half of the udmabuf module's default limit.
const MAX_DMABUF_BYTES: u64 = 32 << 20;
/// The limit for all staging memory.
const MAX_BYTES: u64 = 1 << 40;

/// The number and size of slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// The number of slots, at least one.
    pub slots: u32,
    /// Bytes of a slot, in whole pages.
    pub slot_bytes: u64,
}

impl Default for Shape {
    /// Returns 32 slots of 2 MiB.
    fn default() -> Self {
        Self { slots: 32, slot_bytes: 2 << 20 }
    }
}

/// A slot of staging memory, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(pub(crate) u32);

impl Slot {
    /// Returns its number, counted from 0.
    #[must_use]
    pub fn index(self) -> u32 {
        self.0
    }
}

/// A byte of staging memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StagingOffset {
    /// The slot.
    pub slot: Slot,
    /// The offset in the slot.
    pub at: u64,
}

/// The kind of staging memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StagingMemory {
    /// Ordinary pages: O_DIRECT can read into them, and io_uring can register them.
    Pages,
    /// Buffers of the GPU driver (GTT), mapped as device memory. O_DIRECT and io_uring fail with EFAULT: read
    /// into other memory, then call [`Staging::write`].
    Gtt,
}

/// Staging memory for all GPUs of a transfer. Clones share the memory, which is freed with the last one.
///
/// GPUs write to it, so bytes are copied in and out, and never borrowed. Callers decide who uses which slot.
#[derive(Debug, Clone)]
pub struct Staging(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    shape: Shape,
    /// One mapping of all slots, or one for each.
    views: Vec<Mapping>,
    source: Source,
    /// The reason why it is not ordinary pages.
    reason: Option<String>,
}

#[derive(Debug)]
enum Source {
    Pages { memfd: OwnedFd, udmabuf: Result<File, io::ErrorKind> },
    Gtt(Vec<OwnedFd>),
}

impl Staging {
    /// Allocates memory that the copy rings of all these GPUs accept: ordinary pages, or else GTT of the
    /// first GPU.
    ///
    /// # Errors
    /// Memory is exhausted, or the shape is not valid.
    pub fn new(shape: Shape, gpus: &[&Render]) -> Result<Self, Error> {
        let pages = Self::pages(shape)?;
        for gpu in gpus {
            if let SdmaCaps::Rings { .. } = SdmaCaps::of(gpu)?
                && let Err(error) = pages.check_import(gpu)
            {
                return Self::gtt(shape, gpu, &error.to_string());
            }
        }
        Ok(pages)
    }

    /// Allocates ordinary pages. GPUs with copy rings need `/dev/udmabuf` to access them.
    ///
    /// # Errors
    /// Memory is exhausted, or the shape is not valid.
    pub fn pages(shape: Shape) -> Result<Self, Error> {
        let bytes = checked(shape)?;
        let memfd = memfd(bytes)?;
        let view = Mapping::shared(memfd.as_fd(), 0, bytes).map_err(failed(bytes, "mmap of a memfd"))?;
        view.keep_from_core_dumps().map_err(failed(bytes, "madvise of a memfd"))?;
        let udmabuf = OpenOptions::new().read(true).write(true).open("/dev/udmabuf");
        let source = Source::Pages { memfd, udmabuf: udmabuf.map_err(|error| error.kind()) };
        Ok(Self(Arc::new(Inner { shape, views: vec![view], source, reason: None })))
    }

    /// Allocates a GTT buffer of the GPU for each slot. `reason` appears in
    /// [`CopyEngine::path`](crate::CopyEngine::path).
    ///
    /// # Errors
    /// Memory is exhausted, or the shape is not valid.
    pub fn gtt(shape: Shape, gpu: &Render, reason: &str) -> Result<Self, Error> {
        checked(shape)?;
        let made: Result<Vec<_>, Error> = (0..shape.slots).map(|_| gtt_slot(gpu, shape.slot_bytes)).collect();
        let (views, dmabufs) = made?.into_iter().unzip();
        let reason = Some(reason.to_owned());
        Ok(Self(Arc::new(Inner { shape, views, source: Source::Gtt(dmabufs), reason })))
    }

    /// Returns the kind of memory.
    #[must_use]
    pub fn memory(&self) -> StagingMemory {
        match self.0.source {
            Source::Pages { .. } => StagingMemory::Pages,
            Source::Gtt(_) => StagingMemory::Gtt,
        }
    }

    /// Returns the reason why it is not ordinary pages.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        self.0.reason.as_deref()
    }

    /// Returns the shape.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.0.shape
    }

    /// Returns all slots.
    pub fn slots(&self) -> impl ExactSizeIterator<Item = Slot> + use<> {
        (0..self.0.shape.slots).map(Slot)
    }

    /// Copies bytes out of a slot.
    ///
    /// # Panics
    /// The bytes exceed the slot.
    pub fn read(&self, from: StagingOffset, into: &mut [u8]) {
        let (view, at) = self.view(from, into.len() as u64);
        view.read(at, into);
    }

    /// Copies bytes into a slot.
    ///
    /// # Panics
    /// The bytes exceed the slot.
    pub fn write(&self, to: StagingOffset, bytes: &[u8]) {
        let (view, at) = self.view(to, bytes.len() as u64);
        view.write(at, bytes);
    }

    /// Returns whether all of these bytes are zero, at the speed of memory.
    ///
    /// # Panics
    /// The bytes exceed the slot.
    #[must_use]
    pub fn is_zero(&self, from: StagingOffset, bytes: usize) -> bool {
        let (view, at) = self.view(from, bytes as u64);
        view.is_zero(at, bytes)
    }

    /// Returns the address of these bytes for calls that access them (io_uring, `pread`); see
    /// [`Mapping::pointer`].
    ///
    /// # Panics
    /// The bytes exceed the slot.
    #[must_use]
    pub fn pointer(&self, at: StagingOffset, bytes: usize) -> NonNull<u8> {
        let (view, at) = self.view(at, bytes as u64);
        view.pointer(at, bytes)
    }

    /// Returns the address and size of all slots, which are contiguous, to register with io_uring. Returns
    /// None for GTT.
    #[must_use]
    pub fn whole(&self) -> Option<(NonNull<u8>, usize)> {
        let bytes = usize::try_from(self.bytes()).ok()?;
        (self.memory() == StagingMemory::Pages).then(|| (self.0.views[0].pointer(0, bytes), bytes))
    }

    /// Returns the bytes of all slots.
    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.0.shape.slots) * self.0.shape.slot_bytes
    }

    /// Returns the offset of a byte from the first slot's start.
    pub(crate) fn offset(&self, place: StagingOffset) -> u64 {
        u64::from(place.slot.0) * self.0.shape.slot_bytes + place.at
    }

    /// Returns the mapping that holds some bytes, and their offset.
    ///
    /// # Panics
    /// The bytes exceed the slot, which is a bug of the caller.
    pub(crate) fn view(&self, place: StagingOffset, bytes: u64) -> (&Mapping, u64) {
        let Shape { slots, slot_bytes } = self.0.shape;
        let fits = place.at.checked_add(bytes).is_some_and(|end| end <= slot_bytes) && place.slot.0 < slots;
        assert!(
            fits,
            "{bytes} bytes at {:#x} of slot {} of {slots} slots of {slot_bytes:#x} bytes",
            place.at, place.slot.0
        );
        match self.memory() {
            StagingMemory::Pages => (&self.0.views[0], self.offset(place)),
            StagingMemory::Gtt => (&self.0.views[place.slot.0 as usize], place.at),
        }
    }

    /// Returns the bytes in each part of [`Self::dmabuf`], except the last.
    pub(crate) fn part_bytes(&self) -> u64 {
        match self.memory() {
            StagingMemory::Pages => MAX_DMABUF_BYTES,
            StagingMemory::Gtt => self.0.shape.slot_bytes,
        }
    }

    /// Returns a dma-buf of one part. For ordinary pages, each call creates a new one: GPUs that share a
    /// dma-buf wait for each other's fences on it. GPUs that share only its pages do not.
    pub(crate) fn dmabuf(&self, part: u64) -> Result<OwnedFd, Error> {
        let bytes = self.bytes();
        match &self.0.source {
            Source::Pages { memfd, udmabuf } => {
                let device =
                    udmabuf.as_ref().map_err(|kind| failed(bytes, "/dev/udmabuf")((*kind).into()))?;
                let size = (bytes - part * MAX_DMABUF_BYTES).min(MAX_DMABUF_BYTES);
                udmabuf::create(device.as_fd(), memfd.as_fd(), part * MAX_DMABUF_BYTES, size)
                    .map_err(failed(bytes, "UDMABUF_CREATE"))
            }
            Source::Gtt(slots) => {
                let slot = &slots[usize::try_from(part).unwrap_or(usize::MAX)];
                slot.try_clone().map_err(failed(bytes, "dup of a dma-buf"))
            }
        }
    }

    /// Checks whether a GPU accepts the memory.
    fn check_import(&self, gpu: &Render) -> Result<(), Error> {
        let dmabuf = self.dmabuf(0)?;
        let refused = |call| move |source| Error::Drm { minor: gpu.minor(), call, source };
        let handle =
            gpu.prime_fd_to_buffer(dmabuf.as_fd()).map_err(refused("PRIME_FD_TO_HANDLE of a udmabuf"))?;
        gpu.close_buffer(handle).map_err(refused("GEM_CLOSE"))
    }
}

fn checked(shape: Shape) -> Result<u64, Error> {
    let Shape { slots, slot_bytes } = shape;
    let bytes = u64::from(slots).checked_mul(slot_bytes).filter(|bytes| (1..MAX_BYTES).contains(bytes));
    let whole = slot_bytes.is_multiple_of(PAGE);
    bytes.filter(|_| whole).ok_or(Error::Shape { slots, slot_bytes })
}

fn failed(bytes: u64, act: &'static str) -> impl Fn(io::Error) -> Error {
    move |source| Error::Staging { bytes, act, source }
}

/// Creates shared memory of a fixed size, as udmabuf needs it.
fn memfd(bytes: u64) -> Result<OwnedFd, Error> {
    let failed = |act| move |errno: nix::Error| failed(bytes, act)(errno.into());
    let memfd = memfd_create(c"rewake staging", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)
        .map_err(failed("memfd_create"))?;
    ftruncate(&memfd, bytes.cast_signed()).map_err(failed("ftruncate"))?;
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(&memfd, FcntlArg::F_ADD_SEALS(seals)).map_err(failed("F_ADD_SEALS"))?;
    Ok(memfd)
}

/// Creates a GTT buffer, which its mapping and dma-buf keep alive.
fn gtt_slot(gpu: &Render, bytes: u64) -> Result<(Mapping, OwnedFd), Error> {
    let minor = gpu.minor();
    let kernel = |source| Error::Kernel { minor, source };
    let generic = |call| move |source| Error::Drm { minor, call, source };
    let flags = u64::from(AMDGPU_GEM_CREATE_CPU_ACCESS_REQUIRED);
    let handle = gpu.create(bytes, AMDGPU_GEM_DOMAIN_GTT, flags).map_err(kernel)?;
    let view = gpu.map(handle, bytes).map_err(kernel);
    let handle = drm::control::from_u32(handle)
        .ok_or_else(|| generic("GEM_CREATE")(io::ErrorKind::InvalidData.into()))?;
    let dmabuf =
        gpu.buffer_to_prime_fd(handle, drm::RDWR | drm::CLOEXEC).map_err(generic("PRIME_HANDLE_TO_FD"));
    gpu.close_buffer(handle).map_err(generic("GEM_CLOSE"))?;
    Ok((view?, dmabuf?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> Staging {
        Staging::pages(Shape { slots: 3, slot_bytes: 2 * PAGE }).unwrap()
    }

    fn place(slot: u32, at: u64) -> StagingOffset {
        StagingOffset { slot: Slot(slot), at }
    }

    #[test]
    fn slots_are_adjacent_and_do_not_overlap() {
        let staging = small();
        for slot in staging.slots() {
            assert!(staging.is_zero(StagingOffset { slot, at: 0 }, 8192), "fresh memory is zero");
            staging.write(StagingOffset { slot, at: 0 }, &[u8::try_from(slot.index()).unwrap() + 1; 8192]);
        }
        let mut read = [0; 3];
        staging.read(place(1, 8189), &mut read);
        assert_eq!(read, [2; 3]);
        assert!(!staging.is_zero(place(2, 5), 1));
        let (start, bytes) = staging.whole().unwrap();
        assert_eq!(
            (bytes, staging.pointer(place(2, 7), 1).addr().get() - start.addr().get()),
            (3 * 8192, 2 * 8192 + 7)
        );
    }

    #[test]
    #[should_panic(expected = "2 bytes at 0x1fff of slot 1 of 3 slots of 0x2000 bytes")]
    fn a_read_beyond_a_slot_panics() {
        let _ = small().is_zero(place(1, 8191), 2);
    }

    #[test]
    fn invalid_shapes_are_refused() {
        for (slots, slot_bytes) in
            [(0, PAGE), (1, 0), (1, PAGE + 1), (u32::MAX, 1 << 40), (1, 1 << 40), (2, u64::MAX)]
        {
            let error = Staging::pages(Shape { slots, slot_bytes }).unwrap_err();
            assert!(matches!(error, Error::Shape { .. }), "{slots} of {slot_bytes}: {error}");
        }
    }

    #[test]
    fn core_dumps_exclude_staging_memory() {
        let staging = small();
        let start = format!("{:x}-", staging.0.views[0].address());
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = maps.lines().skip_while(|line| !line.starts_with(&start));
        let flags = lines.find_map(|line| line.strip_prefix("VmFlags: ")).unwrap();
        assert!(flags.split(' ').any(|flag| flag == "dd"), "{flags}");
    }
}
