// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs hooks: keeps the plugin's instance, catches panics, logs errors, and checks the process.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, OnceLock, PoisonError, TryLockError};

use crate::abi::{ProcessMark, Registered};
use crate::answer::{Answer, Refusal, one_line};
use crate::host::Host;
use crate::plugin::Stage;

thread_local! {
    /// The message and the place of this thread's last panic.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// The place of a `cdylib`'s plugin; [`crate::register!`] makes it.
#[derive(Debug)]
pub struct PluginSlot<P> {
    instance: Mutex<Option<Instance<P>>>,
    main: OnceLock<ProcessMark>,
}

#[derive(Debug)]
struct Instance<P> {
    plugin: P,
    stage: Stage,
    /// After a panic only `exit` is called, because the plugin's state is unknown.
    panicked: bool,
}

impl<P> PluginSlot<P> {
    /// Makes a slot without a plugin.
    #[must_use]
    pub const fn new() -> Self {
        Self { instance: Mutex::new(None), main: OnceLock::new() }
    }
}

impl<P> Default for PluginSlot<P> {
    fn default() -> Self {
        Self::new()
    }
}

/// The kind of process that a hook must run in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProcessKind {
    /// CRIU's main process.
    Main,
    /// A task that is being restored: a fork of the main process.
    Task,
}

/// Makes the plugin's instance. Returns `Err` when CRIU's command must fail; the reason is logged.
pub(crate) fn init<P: Registered>(stage: Option<Stage>) -> Result<(), ()> {
    let host = Host::new(P::NAME);
    catch_panics();
    let Some(stage) = stage else {
        host.warn("this CRIU loads plugins for an unknown command: the plugin does nothing");
        return Ok(());
    };
    let mark = match ProcessMark::new() {
        Ok(mark) => mark,
        Err(error) => {
            host.error(format_args!("init: mark the process (Linux 4.14): {error}"));
            return Err(());
        }
    };
    // CRIU loads a plugin once; an earlier mark is as good.
    let _ = P::slot().main.set(mark);
    match guarded(|| P::init(&host, stage)) {
        Ok(Ok(plugin)) => {
            *P::slot().instance.lock().unwrap_or_else(PoisonError::into_inner) =
                Some(Instance { plugin, stage, panicked: false });
            Ok(())
        }
        Ok(Err(Refusal::NotMine)) => Ok(()),
        Ok(Err(Refusal::Failed(error))) => {
            host.error(format_args!("init: {}", one_line(&*error)));
            Err(())
        }
        Err(panic) => {
            host.error(format_args!("init: panicked: {panic}"));
            Err(())
        }
    }
}

/// Ends the plugin's instance. It does nothing except in the main process, which owns the instance.
pub(crate) fn exit<P: Registered>(result: i32) {
    if !P::slot().main.get().is_some_and(ProcessMark::is_here) {
        return;
    }
    let host = Host::new(P::NAME);
    let instance = P::slot().instance.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(Instance { plugin, stage, .. }) = instance else { return };
    if let Err(panic) = guarded(|| plugin.exit(&host, stage, result)) {
        host.error(format_args!("exit: panicked: {panic}"));
    }
}

/// Why a hook has no result; errors are logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HookError {
    NotMine,
    Failed,
}

/// Calls one hook of the plugin.
pub(crate) fn hook<P: Registered, T>(
    name: &str,
    kind: ProcessKind,
    act: impl FnOnce(&mut P, &Host) -> Answer<T>,
) -> Result<T, HookError> {
    let host = Host::new(P::NAME);
    let failed = |reason: &str| {
        host.error(format_args!("{name}: {reason}"));
        Err(HookError::Failed)
    };
    let mut instance = match P::slot().instance.try_lock() {
        Ok(instance) => instance,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return failed("called while another hook runs"),
    };
    // The plugin refused in `init`.
    let Some(instance) = instance.as_mut() else { return Err(HookError::NotMine) };
    if kind == ProcessKind::Main && !P::slot().main.get().is_some_and(ProcessMark::is_here) {
        return failed("called in a fork of CRIU, expected CRIU's main process");
    }
    if instance.panicked {
        return failed("not called: the plugin has panicked before");
    }
    match guarded(|| act(&mut instance.plugin, &host)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(Refusal::NotMine)) => Err(HookError::NotMine),
        Ok(Err(Refusal::Failed(error))) => failed(&one_line(&*error)),
        Err(panic) => {
            instance.panicked = true;
            failed(&format!("panicked: {panic}"))
        }
    }
}

/// Stores a panic's message instead of writing it to standard error, which in a restored task is the task's
/// own.
fn catch_panics() {
    std::panic::set_hook(Box::new(|panic| {
        PANIC.with_borrow_mut(|slot| *slot = Some(panic.to_string()));
    }));
}

/// Returns `Err` with the message of a panic, on one line.
fn guarded<T>(act: impl FnOnce() -> T) -> Result<T, String> {
    // State that a panic left incomplete is not used again: see `Instance::panicked`.
    catch_unwind(AssertUnwindSafe(act)).map_err(|payload| {
        // A payload whose drop panics would unwind into CRIU.
        std::mem::forget(payload);
        let text = PANIC.take().unwrap_or_else(|| "of unknown reason".to_owned());
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    })
}
