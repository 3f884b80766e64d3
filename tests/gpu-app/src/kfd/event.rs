// SPDX-License-Identifier: MIT OR Apache-2.0
//! Events, on which a CPU thread sleeps until a GPU signals. GPU faults are events too.

use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, PoisonError};

use rewake_amdgpu_uapi::abi::call::Argument as _;
use rewake_amdgpu_uapi::abi::{call, *};
use rewake_amdgpu_uapi::{Error, FailedCall};

use super::{Buffer, Device, Spec};

/// The events of this process, with the page of slots that GPUs write to.
#[derive(Debug)]
pub struct Events {
    device: Arc<Device>,
    page: Buffer,
    /// Whether the driver knows the page.
    named: Mutex<bool>,
}

/// An event, destroyed on drop.
#[derive(Debug)]
pub struct Event {
    events: Arc<Events>,
    id: u32,
    slot: u32,
}

/// The result of a wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WaitOutcome {
    /// An event was signalled.
    Signalled,
    /// No event was signalled in time.
    Timeout,
    /// A GPU accessed an address without a mapping.
    Fault {
        /// The GPU.
        gpu: u32,
        /// The address.
        address: u64,
    },
}

impl Events {
    /// Allocates the page of slots, in host memory that all of `gpus` can access. A process may do this once.
    ///
    /// # Errors
    /// As [`Buffer::mapped`].
    pub fn new(device: &Arc<Device>, gpus: &[u32]) -> Result<Arc<Self>, Error> {
        let size = u64::from(KFD_SIGNAL_EVENT_LIMIT) * 8;
        let mut page = Buffer::alloc(device, Spec::gtt(size))?;
        page.map(gpus)?;
        page.map_cpu()?;
        Ok(Arc::new(Self { device: Arc::clone(device), page, named: Mutex::new(false) }))
    }

    /// Creates an event that GPUs and [`Event::set`] signal. A wait that has seen the signal resets it.
    ///
    /// # Errors
    /// CREATE_EVENT failed.
    pub fn signal(self: &Arc<Self>) -> Result<Event, Error> {
        self.create(KFD_IOC_EVENT_SIGNAL)
    }

    /// Creates the event that a GPU's access to unmapped memory signals.
    ///
    /// # Errors
    /// CREATE_EVENT failed.
    pub fn memory_fault(self: &Arc<Self>) -> Result<Event, Error> {
        self.create(KFD_IOC_EVENT_MEMORY)
    }

    fn create(self: &Arc<Self>, kind: u32) -> Result<Event, Error> {
        let mut argument = kfd_ioctl_create_event_args::zeroed();
        argument.event_type = kind;
        argument.auto_reset = 1;
        // The first event names the page, and no other may.
        let mut named = self.named.lock().unwrap_or_else(PoisonError::into_inner);
        argument.event_page_offset = if *named { 0 } else { self.page.handle() };
        let act = FailedCall::named("CREATE_EVENT").on(self.device.gpu_id());
        call::create_event(self.device.kfd().as_fd(), &mut argument).map_err(act.failed())?;
        *named = true;
        Ok(Event { events: Arc::clone(self), id: argument.event_id, slot: argument.event_slot_index })
    }

    /// Waits for any of `events`, for at most `milliseconds`.
    ///
    /// # Errors
    /// WAIT_EVENTS failed.
    pub fn wait(&self, events: &[&Event], milliseconds: u32) -> Result<WaitOutcome, Error> {
        let mut list: Vec<kfd_event_data> = events
            .iter()
            .map(|event| kfd_event_data { event_id: event.id, ..kfd_event_data::zeroed() })
            .collect();
        let act = FailedCall::named("WAIT_EVENTS").on(self.device.gpu_id());
        let result = call::wait_events(self.device.kfd().as_fd(), &mut list, false, milliseconds)
            .map_err(act.failed())?;
        if result == KFD_IOC_WAIT_RESULT_TIMEOUT {
            return Ok(WaitOutcome::Timeout);
        }
        let fault = list.iter().map(call::memory_exception).find(|fault| fault.gpu_id != 0);
        Ok(fault.map_or(WaitOutcome::Signalled, |fault| WaitOutcome::Fault {
            gpu: fault.gpu_id,
            address: fault.va,
        }))
    }
}

impl Event {
    /// Returns the driver's id, which a GPU writes to the slot.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Returns the address of its slot, for GPUs.
    #[must_use]
    pub fn mailbox(&self) -> u64 {
        self.events.page.address() + u64::from(self.slot) * 8
    }

    /// Signals it from the CPU.
    ///
    /// # Errors
    /// SET_EVENT failed.
    pub fn set(&self) -> Result<(), Error> {
        let mut argument = kfd_ioctl_set_event_args { event_id: self.id, pad: 0 };
        let act = FailedCall::named("SET_EVENT").on(self.events.device.gpu_id());
        call::set_event(self.events.device.kfd().as_fd(), &mut argument).map_err(act.failed())
    }

    /// Resets the signal.
    ///
    /// # Errors
    /// RESET_EVENT failed.
    pub fn reset(&self) -> Result<(), Error> {
        let mut argument = kfd_ioctl_reset_event_args { event_id: self.id, pad: 0 };
        let act = FailedCall::named("RESET_EVENT").on(self.events.device.gpu_id());
        call::reset_event(self.events.device.kfd().as_fd(), &mut argument).map_err(act.failed())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let mut argument = kfd_ioctl_destroy_event_args { event_id: self.id, pad: 0 };
        // The driver destroys all events with the process.
        let _ = call::destroy_event(self.events.device.kfd().as_fd(), &mut argument);
    }
}
