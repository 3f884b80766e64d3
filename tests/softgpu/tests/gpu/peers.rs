// SPDX-License-Identifier: MIT OR Apache-2.0
//! Debian's programs and libraries for the hardware accept the soft GPUs as GPUs.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::process::Command;
use std::ptr;

use rewake_amdgpu_uapi::topology::{Node, Topology};
use softgpu_tests::isolated;

/// A GPU's name as compilers write it: gfx90a, gfx942, gfx1100.
fn gfx_name(gpu: &Node) -> String {
    let version = gpu.gfx_version();
    format!("gfx{}{:x}{:x}", version.major, version.minor, version.step)
}

/// Values of one field, in rocminfo's order.
fn values<'a>(text: &'a str, field: &str) -> Vec<&'a str> {
    let lines =
        text.lines().filter_map(|line| line.strip_prefix("  ")?.strip_prefix(field)?.strip_prefix(':'));
    lines.map(str::trim).collect()
}

/// ROCr, libhsakmt and libdrm together: every GPU with its name, in the topology's order.
#[test]
fn rocminfo_sees_every_gpu() {
    isolated(1, |_| {
        let output = Command::new("rocminfo").output().expect("rocminfo is in the machine");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "rocminfo: {}: {text}", output.status);
        let topology = Topology::read().unwrap();
        let gpus: Vec<String> = topology.gpus().map(gfx_name).collect();
        let mut agents = vec!["CPU"];
        agents.extend(gpus.iter().map(|_| "GPU"));
        assert_eq!(values(&text, "Device Type"), agents, "{text}");
        assert_eq!(values(&text, "Name")[1..], gpus, "{text}");
    });
}

/// `amdgpu_device_initialize(fd, &major, &minor, &device)` of libdrm's amdgpu.h.
type Initialize = unsafe extern "C" fn(c_int, *mut u32, *mut u32, *mut *mut c_void) -> c_int;
/// `amdgpu_device_deinitialize(device)`.
type Deinitialize = unsafe extern "C" fn(*mut c_void) -> c_int;

/// A symbol of libdrm_amdgpu.so.1, which stays loaded.
fn symbol(name: &CStr) -> *mut c_void {
    // SAFETY: loading a Debian library runs its constructors, which ask nothing of us; the name ends with
    // NUL.
    let library = unsafe { libc::dlopen(c"libdrm_amdgpu.so.1".as_ptr().cast::<c_char>(), libc::RTLD_NOW) };
    assert!(!library.is_null(), "libdrm_amdgpu.so.1 is in the machine");
    // SAFETY: a live library, and a name that ends with NUL.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!found.is_null(), "libdrm_amdgpu.so.1 has no {name:?}");
    found
}

/// Covers what a graphics driver reads first: firmware, memory, registers of the shader engines.
#[test]
fn libdrm_initialises_every_gpu() {
    isolated(1, |_| {
        // SAFETY: the function of that name has this type in amdgpu.h.
        let initialize: Initialize = unsafe { std::mem::transmute(symbol(c"amdgpu_device_initialize")) };
        // SAFETY: as above.
        let deinitialize: Deinitialize =
            unsafe { std::mem::transmute(symbol(c"amdgpu_device_deinitialize")) };
        for gpu in Topology::read().unwrap().gpus() {
            let path = format!("/dev/dri/renderD{}", gpu.render_minor());
            let file = File::options().read(true).write(true).open(&path).unwrap();
            let (mut major, mut minor, mut device) = (0, 0, ptr::null_mut());
            // SAFETY: the descriptor is open, and the three places are this function's own.
            let error =
                unsafe { initialize(file.as_raw_fd(), &raw mut major, &raw mut minor, &raw mut device) };
            assert_eq!(error, 0, "amdgpu_device_initialize of {path}");
            assert_eq!(major, 3, "the version of amdgpu's interface");
            // SAFETY: a device that was just initialised, and that is not used again.
            assert_eq!(unsafe { deinitialize(device) }, 0, "amdgpu_device_deinitialize of {path}");
        }
    });
}
