// SPDX-License-Identifier: MIT OR Apache-2.0
//! User queues: rings in memory that a GPU reads itself after a write to a doorbell.

use std::io::ErrorKind;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rewake_amdgpu_uapi::abi::call::Argument as _;
use rewake_amdgpu_uapi::abi::memory::{Mapping, PAGE};
use rewake_amdgpu_uapi::abi::{call, *};
use rewake_amdgpu_uapi::{Error, FailedCall};

use super::aql::Aql;
use super::{Buffer, Device, MemoryKind, Spec, Userptr, svm};

/// Bytes of the doorbells of one process on one GPU: 1024 queues of 8 bytes.
const DOORBELLS: u64 = 8192;
/// The offsets of the pointers in their page.
const WRITE_POINTER: u64 = 0;
const READ_POINTER: u64 = 128;
/// The poll interval for a full ring.
const POLL_INTERVAL: Duration = Duration::from_micros(200);

/// The properties of a queue.
#[derive(Debug, Clone, Copy)]
pub struct QueueSpec {
    /// Bytes of the ring: a power of two, 4 KiB or more.
    pub ring: u64,
    /// The share of time, 0 to 100. 0 stops the queue.
    pub percentage: u32,
    /// 0 to 15.
    pub priority: u32,
}

impl Default for QueueSpec {
    fn default() -> Self {
        Self { ring: 16 * 1024, percentage: 100, priority: 7 }
    }
}

/// The state of a queue of any kind.
#[derive(Debug)]
struct Common {
    device: Arc<Device>,
    id: u32,
    ring: Buffer,
    pointers: Buffer,
    doorbells: Arc<Buffer>,
    doorbell: u64,
    /// The value of the write pointer after the last packet.
    written: u64,
}

/// A queue of AQL packets for the compute units, destroyed on drop.
#[derive(Debug)]
pub struct ComputeQueue {
    common: Common,
    _end_of_pipe: Buffer,
    saved: SavedWork,
}

/// A queue of packets for a copy engine, destroyed on drop.
#[derive(Debug)]
pub struct SdmaQueue {
    common: Common,
}

/// The host memory where interrupted work is saved.
#[derive(Debug)]
enum SavedWork {
    /// Ordinary memory with attributes.
    Shared(Mapping),
    /// A userptr buffer, where the kernel has no such attributes.
    Registered(Userptr),
}

impl SavedWork {
    fn new(device: &Arc<Device>, bytes: u64) -> Result<Self, Error> {
        let act = FailedCall::named("mmap of a save area").on(device.gpu_id()).at(0, bytes);
        let memory = Mapping::anonymous(bytes).map_err(act.failed())?;
        if device.node().has_svm() {
            svm::map_always(device, &memory)?;
            return Ok(Self::Shared(memory));
        }
        Userptr::register(device, memory).map(Self::Registered)
    }

    fn memory(&self) -> &Mapping {
        match self {
            Self::Shared(memory) => memory,
            Self::Registered(userptr) => userptr.cpu(),
        }
    }
}

/// Allocates the doorbells of this process on a GPU, for all its queues there.
///
/// # Errors
/// As [`Buffer::mapped`].
pub fn doorbells(device: &Arc<Device>) -> Result<Arc<Buffer>, Error> {
    let spec = Spec { size: DOORBELLS, kind: MemoryKind::Doorbell, flags: 0 };
    Ok(Arc::new(Buffer::mapped(device, spec)?))
}

impl Common {
    fn new(
        device: &Arc<Device>,
        doorbells: &Arc<Buffer>,
        spec: QueueSpec,
        mut argument: kfd_ioctl_create_queue_args,
    ) -> Result<Self, Error> {
        let ring = Buffer::mapped(device, Spec::gtt(spec.ring).executable())?;
        let pointers = Buffer::mapped(device, Spec::gtt(PAGE))?;
        if argument.queue_type == KFD_IOC_QUEUE_TYPE_COMPUTE_AQL {
            for slot in 0..spec.ring / Aql::SIZE {
                ring.cpu().store32(slot * Aql::SIZE, Aql::INVALID);
            }
        }
        argument.ring_base_address = ring.address();
        argument.ring_size = u32::try_from(spec.ring).unwrap_or(u32::MAX);
        argument.write_pointer_address = pointers.address() + WRITE_POINTER;
        argument.read_pointer_address = pointers.address() + READ_POINTER;
        argument.gpu_id = device.gpu_id();
        argument.queue_percentage = spec.percentage;
        argument.queue_priority = spec.priority;
        let act = FailedCall::named("CREATE_QUEUE").on(device.gpu_id()).at(ring.address(), spec.ring);
        call::create_queue(device.kfd().as_fd(), &mut argument).map_err(act.failed())?;
        Ok(Self {
            device: Arc::clone(device),
            id: argument.queue_id,
            ring,
            pointers,
            doorbells: Arc::clone(doorbells),
            doorbell: argument.doorbell_offset % DOORBELLS,
            written: 0,
        })
    }

    fn read_pointer(&self) -> u64 {
        self.pointers.cpu().load64(READ_POINTER)
    }

    /// Rings the doorbell for everything that was written.
    fn publish(&self, doorbell: u64) {
        self.pointers.cpu().store64(WRITE_POINTER, self.written);
        self.doorbells.cpu().store64(self.doorbell, doorbell);
    }

    /// Waits until the GPU has read all but `left` of what was written.
    fn wait(&self, left: u64, limit: Duration) -> Result<(), Error> {
        // Polls are counted, because a clock continues while a process is in an image.
        for _ in 0..=limit.as_micros() / POLL_INTERVAL.as_micros() {
            if self.written.saturating_sub(self.read_pointer()) <= left {
                return Ok(());
            }
            thread::sleep(POLL_INTERVAL);
        }
        let late = FailedCall::named("wait for a queue").on(self.device.gpu_id());
        Err(late.failed()(ErrorKind::TimedOut.into()))
    }

    fn update(&self, ring: u64, percentage: u32, priority: u32) -> Result<(), Error> {
        let mut argument = kfd_ioctl_update_queue_args {
            ring_base_address: ring,
            queue_id: self.id,
            ring_size: u32::try_from(self.ring.size()).unwrap_or(u32::MAX),
            queue_percentage: percentage,
            queue_priority: priority,
        };
        let act = FailedCall::named("UPDATE_QUEUE").on(self.device.gpu_id()).at(ring, self.ring.size());
        call::update_queue(self.device.kfd().as_fd(), &mut argument).map_err(act.failed())
    }
}

impl Drop for Common {
    fn drop(&mut self) {
        let mut argument = kfd_ioctl_destroy_queue_args { queue_id: self.id, pad: 0 };
        // The driver destroys all queues with the process.
        let _ = call::destroy_queue(self.device.kfd().as_fd(), &mut argument);
    }
}

macro_rules! common {
    ($name:ident) => {
        impl $name {
            /// Returns the driver's id of the queue in this process.
            #[must_use]
            pub fn id(&self) -> u32 {
                self.common.id
            }

            /// Returns what the GPU has read: packets, or bytes for a copy engine.
            #[must_use]
            pub fn read_pointer(&self) -> u64 {
                self.common.read_pointer()
            }

            /// Returns what was written, in the same unit.
            #[must_use]
            pub fn written(&self) -> u64 {
                self.common.written
            }

            /// Returns the ring's memory.
            #[must_use]
            pub fn ring(&self) -> &Buffer {
                &self.common.ring
            }

            /// Waits until the GPU has read everything.
            ///
            /// # Errors
            /// The GPU does not read everything in time.
            pub fn drain(&self, limit: Duration) -> Result<(), Error> {
                self.common.wait(0, limit)
            }

            /// Sets the share of time (0 stops the queue) and the priority.
            ///
            /// # Errors
            /// UPDATE_QUEUE failed.
            pub fn update(&self, percentage: u32, priority: u32) -> Result<(), Error> {
                self.common.update(self.common.ring.address(), percentage, priority)
            }
        }
    };
}
common!(ComputeQueue);
common!(SdmaQueue);

impl ComputeQueue {
    /// Creates a queue with all the memory that it needs.
    ///
    /// # Errors
    /// An allocation or CREATE_QUEUE failed; [`Error::Topology`] if the node's properties give no size of the
    /// save area.
    pub fn new(device: &Arc<Device>, doorbells: &Arc<Buffer>, spec: QueueSpec) -> Result<Self, Error> {
        let sizes = device.node().save_area().ok_or_else(|| Error::Topology {
            path: rewake_amdgpu_uapi::topology::SYSFS.into(),
            reason: format!("node {} gives no sizes for queues", device.node().number),
        })?;
        let end_of_pipe = Buffer::mapped(device, Spec::gtt(PAGE).executable())?;
        let saved = SavedWork::new(device, sizes.total)?;
        let argument = kfd_ioctl_create_queue_args {
            queue_type: KFD_IOC_QUEUE_TYPE_COMPUTE_AQL,
            eop_buffer_address: end_of_pipe.address(),
            eop_buffer_size: PAGE,
            ctx_save_restore_address: saved.memory().address(),
            ctx_save_restore_size: sizes.area,
            ctl_stack_size: sizes.control_stack,
            ..kfd_ioctl_create_queue_args::zeroed()
        };
        let common = Common::new(device, doorbells, spec, argument)?;
        Ok(Self { common, _end_of_pipe: end_of_pipe, saved })
    }

    /// Returns the memory where interrupted work is saved.
    #[must_use]
    pub fn save_area(&self) -> &Mapping {
        self.saved.memory()
    }

    /// Writes packets when the ring has room, and rings the doorbell.
    ///
    /// # Errors
    /// The ring gets no room in time.
    pub fn submit(&mut self, packets: &[Aql], limit: Duration) -> Result<(), Error> {
        let slots = self.common.ring.size() / Aql::SIZE;
        for packet in packets {
            self.common.wait(slots - 1, limit)?;
            let at = self.common.written % slots * Aql::SIZE;
            let bytes = packet.bytes();
            self.common.ring.cpu().write(at + 4, &bytes[4..]);
            // The header is last, because it makes the packet valid.
            let header = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            self.common.ring.cpu().store32(at, header);
            self.common.written += 1;
            self.common.publish(self.common.written - 1);
        }
        Ok(())
    }
}

impl SdmaQueue {
    /// Creates a queue on a copy engine that the driver chooses.
    ///
    /// # Errors
    /// An allocation or CREATE_QUEUE failed: ENOMEM if all engines' queues are in use.
    pub fn new(device: &Arc<Device>, doorbells: &Arc<Buffer>, spec: QueueSpec) -> Result<Self, Error> {
        let argument = kfd_ioctl_create_queue_args {
            queue_type: KFD_IOC_QUEUE_TYPE_SDMA,
            ..kfd_ioctl_create_queue_args::zeroed()
        };
        Ok(Self { common: Common::new(device, doorbells, spec, argument)? })
    }

    /// Writes packets of whole words when the ring has room, and rings the doorbell.
    ///
    /// # Errors
    /// The ring gets no room in time.
    ///
    /// # Panics
    /// The packets exceed the ring.
    pub fn submit(&mut self, packets: &[u8], limit: Duration) -> Result<(), Error> {
        let size = self.common.ring.size();
        let length = packets.len() as u64;
        assert!(length < size, "{length} bytes of packets in a ring of {size}");
        self.common.wait(size - length - 1, limit)?;
        for word in packets.chunks(4) {
            self.common.ring.cpu().write(self.common.written % size, word);
            self.common.written += word.len() as u64;
        }
        self.common.publish(self.common.written);
        Ok(())
    }
}
