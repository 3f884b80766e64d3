// SPDX-License-Identifier: MIT OR Apache-2.0
//! Events: what a CPU thread sleeps on until a GPU signals, and how GPU faults are told.

use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, PoisonError};

use crate::abi::call::Argument as _;
use crate::abi::{call, *};
use crate::buffer::{Buffer, Spec};
use crate::{Device, Error, FailedCall};

/// Events of this process, with the page of slots that GPUs write to.
#[derive(Debug)]
pub struct Events {
    device: Arc<Device>,
    page: Buffer,
    /// Whether the driver knows the page.
    named: Mutex<bool>,
}

/// One event, ended when dropped.
#[derive(Debug)]
pub struct Event {
    events: Arc<Events>,
    id: u32,
    slot: u32,
}

/// How a wait ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// What was waited for came.
    Signalled,
    /// It did not come in time.
    Timeout,
    /// A GPU reached where nothing is mapped for it.
    Fault {
        /// The GPU.
        gpu: u32,
        /// Where.
        address: u64,
    },
}

impl Events {
    /// Takes a page of slots, in host memory that all of `gpus` reach. Once in a process.
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

    /// An event that GPUs and [`Event::set`] signal, and that goes back by itself when a wait has seen it.
    ///
    /// # Errors
    /// CREATE_EVENT failed.
    pub fn signal(self: &Arc<Self>) -> Result<Event, Error> {
        self.create(KFD_IOC_EVENT_SIGNAL)
    }

    /// The event that a GPU's access to unmapped memory signals.
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

    /// Waits for any of `events`, `milliseconds` at most.
    ///
    /// # Errors
    /// WAIT_EVENTS failed.
    pub fn wait(&self, events: &[&Event], milliseconds: u32) -> Result<Outcome, Error> {
        let mut list: Vec<kfd_event_data> = events
            .iter()
            .map(|event| kfd_event_data { event_id: event.id, ..kfd_event_data::zeroed() })
            .collect();
        let act = FailedCall::named("WAIT_EVENTS").on(self.device.gpu_id());
        let result = call::wait_events(self.device.kfd().as_fd(), &mut list, false, milliseconds)
            .map_err(act.failed())?;
        if result == KFD_IOC_WAIT_RESULT_TIMEOUT {
            return Ok(Outcome::Timeout);
        }
        let fault = list.iter().map(call::memory_exception).find(|fault| fault.gpu_id != 0);
        Ok(fault.map_or(Outcome::Signalled, |fault| Outcome::Fault { gpu: fault.gpu_id, address: fault.va }))
    }
}

impl Event {
    /// The driver's name for it, which a GPU writes to the slot.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Address of its slot, for GPUs.
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

    /// Takes a signal back.
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
        // The driver ends all events with the process.
        let _ = call::destroy_event(self.events.device.kfd().as_fd(), &mut argument);
    }
}
