// SPDX-License-Identifier: MIT OR Apache-2.0
//! One process's GPUs and the kinds of memory on them.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use rewake_amdgpu_uapi::Kfd;
use rewake_amdgpu_uapi::abi::KFD_IOC_ALLOC_MEM_FLAGS_PUBLIC;
use rewake_amdgpu_uapi::abi::memory::{Access, Mapping, PAGE};
use rewake_amdgpu_uapi::packet::Sdma;
use rewake_amdgpu_uapi::topology::Topology;

use crate::kernel;
use crate::kfd::{
    Buffer, Device, Event, Events, MemoryKind, QueueSpec, SdmaQueue, Spec, Userptr, doorbells, svm,
};

/// Patience with a GPU, in waiting time of this process: none of it passes while the process does not exist.
pub const PATIENCE: Duration = Duration::from_secs(300);
/// Polling interval for a fence.
const LOOK: Duration = Duration::from_micros(200);
/// Bytes of one copy.
const STAGING: u64 = 1 << 20;

/// The GPUs, with what every queue on them needs.
#[derive(Debug)]
pub struct Gpus {
    devices: Vec<Arc<Device>>,
    doorbells: Vec<Arc<Buffer>>,
    code: Vec<Buffer>,
    events: Arc<Events>,
    fault: Event,
    _registers: Vec<Buffer>,
}

impl Gpus {
    /// Opens the first `count` GPUs.
    ///
    /// # Errors
    /// The machine has fewer GPUs, or one of them refuses.
    pub fn open(count: usize) -> anyhow::Result<Arc<Self>> {
        let topology = Topology::read()?;
        let found = topology.gpus().count();
        ensure!(found >= count, "{count} GPUs are wanted, this machine has {found}");
        let kfd = Arc::new(Kfd::open()?);
        let mut devices = Vec::new();
        for node in topology.gpus().take(count) {
            devices.push(Device::open(&kfd, node)?);
        }
        Self::on(devices)
    }

    /// The same on devices that are open already.
    ///
    /// # Errors
    /// One of them refuses.
    pub fn on(devices: Vec<Arc<Device>>) -> anyhow::Result<Arc<Self>> {
        let ids: Vec<u32> = devices.iter().map(|device| device.gpu_id()).collect();
        let first = devices.first().context("no GPU is wanted")?;
        let events = Events::new(first, &ids)?;
        let fault = events.memory_fault()?;
        let mut gpus =
            Self { devices, doorbells: Vec::new(), code: Vec::new(), events, fault, _registers: Vec::new() };
        for device in gpus.devices.clone() {
            gpus.doorbells.push(doorbells(&device)?);
            let registers = Spec { size: 4096, kind: MemoryKind::MmioRemap, flags: 0 };
            gpus._registers.push(Buffer::mapped(&device, registers)?);
            let place = if device.node().has_large_bar() { Spec::vram } else { Spec::gtt };
            let code = Buffer::mapped(&device, place(kernel::CODE).executable())?;
            code.cpu().write(0, &kernel::code());
            gpus.code.push(code);
        }
        Ok(Arc::new(gpus))
    }

    /// Number of GPUs.
    #[must_use]
    pub fn count(&self) -> usize {
        self.devices.len()
    }

    /// One of them.
    #[must_use]
    pub fn device(&self, gpu: usize) -> &Arc<Device> {
        &self.devices[gpu]
    }

    /// Its doorbells.
    #[must_use]
    pub fn doorbells(&self, gpu: usize) -> &Arc<Buffer> {
        &self.doorbells[gpu]
    }

    /// Address of the kernels' descriptors for it.
    #[must_use]
    pub fn code(&self, gpu: usize) -> u64 {
        self.code[gpu].address()
    }

    /// This process's events.
    #[must_use]
    pub fn events(&self) -> &Arc<Events> {
        &self.events
    }

    /// The event of any GPU's fault.
    #[must_use]
    pub fn fault(&self) -> &Event {
        &self.fault
    }

    fn ids(&self) -> Vec<u32> {
        self.devices.iter().map(|device| device.gpu_id()).collect()
    }

    /// Zeroed host memory that the driver allocates and all GPUs can access.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn host(&self, bytes: u64) -> anyhow::Result<Buffer> {
        let mut buffer = Buffer::alloc(&self.devices[0], Spec::gtt(bytes))?;
        buffer.map(&self.ids())?;
        buffer.map_cpu()?;
        buffer.cpu().write(0, &vec![0; usize::try_from(buffer.size())?]);
        Ok(buffer)
    }

    /// VRAM of one GPU that only it can access, and the CPU if the BAR is large.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn local(&self, gpu: usize, bytes: u64) -> anyhow::Result<Buffer> {
        let device = &self.devices[gpu];
        let large = device.node().has_large_bar();
        let mut spec = Spec::vram(bytes);
        if !large {
            spec.flags &= !KFD_IOC_ALLOC_MEM_FLAGS_PUBLIC;
        }
        let mut buffer = Buffer::alloc(device, spec)?;
        buffer.map(&[device.gpu_id()])?;
        if large {
            buffer.map_cpu()?;
        }
        Ok(buffer)
    }

    /// The same, mapped without access for the CPU.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn local_without_access(&self, gpu: usize, bytes: u64) -> anyhow::Result<Buffer> {
        let device = &self.devices[gpu];
        let mut spec = Spec::vram(bytes);
        spec.flags &= !KFD_IOC_ALLOC_MEM_FLAGS_PUBLIC;
        let mut buffer = Buffer::alloc(device, spec)?;
        buffer.map(&[device.gpu_id()])?;
        buffer.map_cpu_without_access()?;
        Ok(buffer)
    }

    /// Whether all GPUs can access each other's VRAM: a single GPU can, others by links of their own.
    /// (Debian's kernels have no access to a peer's VRAM over PCIe.)
    #[must_use]
    pub fn reach_each_other(&self) -> bool {
        let hive = |device: &Arc<Device>| device.node().property("hive_id");
        let first = hive(&self.devices[0]);
        self.count() == 1 || (first != 0 && self.devices.iter().all(|device| hive(device) == first))
    }

    /// Memory that all GPUs can access, to be shared with other processes: VRAM of the first GPU if possible,
    /// or host memory.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn shared(&self, bytes: u64) -> anyhow::Result<Buffer> {
        if !self.reach_each_other() {
            return self.host(bytes);
        }
        let mut buffer = self.local(0, bytes)?;
        buffer.map(&self.ids())?;
        Ok(buffer)
    }

    /// Memory that another process shares, on all GPUs.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn import(&self, dmabuf: std::os::fd::BorrowedFd<'_>) -> anyhow::Result<Buffer> {
        let mut buffer = Buffer::import(&self.devices[0], dmabuf)?;
        buffer.map(&self.ids())?;
        Ok(buffer)
    }

    /// Ordinary memory of this process that all GPUs can access, holding `bytes`.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn registered(&self, bytes: &[u8]) -> anyhow::Result<Userptr> {
        let memory = Mapping::anonymous((bytes.len() as u64).next_multiple_of(PAGE))?;
        memory.write(0, bytes);
        let mut userptr = Userptr::register(&self.devices[0], memory)?;
        userptr.map(&self.ids())?;
        Ok(userptr)
    }

    /// Zeroed memory of this process with attributes by which all GPUs can access it in place.
    ///
    /// # Errors
    /// The kernel has no SVM: EPERM.
    pub fn attributed(&self, bytes: u64) -> anyhow::Result<Mapping> {
        let memory = Mapping::anonymous(bytes.next_multiple_of(PAGE))?;
        for device in &self.devices {
            svm::map_always(device, &memory).context("--mode svm needs a kernel with SVM")?;
        }
        Ok(memory)
    }
}

/// Memory of any kind that GPUs can access; at one address for them and the CPU.
#[derive(Debug)]
pub enum Memory {
    /// Allocated by the driver.
    Buffer(Buffer),
    /// The program's, registered with the driver.
    Registered(Userptr),
    /// The program's, with SVM attributes.
    Attributed(Mapping),
}

impl Memory {
    /// The CPU's view of it.
    #[must_use]
    pub fn cpu(&self) -> &Mapping {
        match self {
            Self::Buffer(buffer) => buffer.cpu(),
            Self::Registered(userptr) => userptr.cpu(),
            Self::Attributed(memory) => memory,
        }
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.cpu().address()
    }
}

/// A copy engine's queue on one GPU, with host memory to copy from.
#[derive(Debug)]
pub struct Uploader {
    queue: SdmaQueue,
    staging: Buffer,
    fence: Buffer,
    done: u32,
}

impl Uploader {
    /// Takes a copy engine of that GPU.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn new(gpus: &Gpus, gpu: usize) -> anyhow::Result<Self> {
        let device = gpus.device(gpu);
        Ok(Self {
            queue: SdmaQueue::new(device, gpus.doorbells(gpu), QueueSpec::default())?,
            staging: Buffer::mapped(device, Spec::gtt(STAGING))?,
            fence: Buffer::mapped(device, Spec::gtt(4096))?,
            done: 0,
        })
    }

    /// Writes `bytes` that `source` makes (from which byte, into what) to memory: by the CPU where it can.
    ///
    /// # Errors
    /// The copy engine does not finish.
    pub fn write(&mut self, to: &Memory, bytes: u64, source: impl Fn(u64, &mut [u8])) -> anyhow::Result<()> {
        let direct = to.cpu().access() == Access::ReadWrite;
        let mut part = vec![0; usize::try_from(STAGING)?];
        for at in (0..bytes).step_by(part.len()) {
            let length = (bytes - at).min(STAGING);
            let part = &mut part[..usize::try_from(length)?];
            source(at, part);
            if direct {
                to.cpu().write(at, part);
            } else {
                self.staging.cpu().write(0, part);
                self.run(Sdma::new().copy(to.address() + at, self.staging.address(), length))?;
            }
        }
        Ok(())
    }

    /// Zeroes a buffer by the copy engine.
    ///
    /// # Errors
    /// The copy engine does not finish.
    pub fn zero(&mut self, buffer: &Buffer) -> anyhow::Result<()> {
        for at in (0..buffer.size()).step_by(usize::try_from(Sdma::LARGEST)?) {
            let length = (buffer.size() - at).min(Sdma::LARGEST);
            self.run(Sdma::new().fill(buffer.address() + at, 0, length))?;
        }
        Ok(())
    }

    /// Executes packets and waits for their end.
    ///
    /// # Errors
    /// The copy engine does not finish.
    pub fn run(&mut self, packets: Sdma) -> anyhow::Result<()> {
        self.done += 1;
        let packets = packets.fence(self.fence.address(), self.done).trap();
        self.queue.submit(packets.bytes(), PATIENCE)?;
        // Not the read pointer: it counts packets that were read, not executed. Polls are counted, no clock
        // is read.
        for _ in 0..PATIENCE.as_micros() / LOOK.as_micros() {
            if self.fence.cpu().load32(0) == self.done {
                return Ok(());
            }
            thread::sleep(LOOK);
        }
        bail!("a copy engine's fence stays at {}, expected {}", self.fence.cpu().load32(0), self.done)
    }
}
