// SPDX-License-Identifier: MIT OR Apache-2.0
//! The built plugins as files, and in programs that are not the installed CRIU. Needs no CRIU and no root.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, ptr};

use rewake_tests::plugins::{amdgpu, later_criu, observer, rewake};

const NOT_MINE: c_int = -libc::ENOTSUP;
/// `CR_PLUGIN_STAGE__DUMP`, `CR_PLUGIN_STAGE__RESTORE`
const DUMP: c_int = 0;
const RESTORE: c_int = 2;

fn plugins() -> [PathBuf; 3] {
    [amdgpu().unwrap(), rewake().unwrap(), observer().unwrap()]
}

/// The output of a program of binutils.
fn output(program: &str, arguments: &[&str], file: &Path) -> String {
    let output = Command::new(program).args(arguments).arg(file).output().expect("binutils are installed");
    assert!(output.status.success(), "{program} {}", file.display());
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn only_the_c_library_is_needed() {
    for plugin in plugins() {
        let headers = output("readelf", &["-dW"], &plugin);
        let needed = headers.lines().filter(|line| line.contains("(NEEDED)"));
        let names: Vec<&str> = needed.filter_map(|line| line.split(['[', ']']).nth(1)).collect();
        assert!(names.contains(&"libc.so.6"), "{names:?}");
        let known = ["libc.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"];
        assert!(names.iter().all(|name| known.contains(name)), "{}: {names:?}", plugin.display());
    }
}

#[test]
fn only_the_descriptor_is_exported() {
    for plugin in plugins() {
        let symbols = output("nm", &["-D", "--defined-only"], &plugin);
        let names: Vec<&str> = symbols.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
        assert_eq!(names, ["CR_PLUGIN_DESC"], "{}", plugin.display());
    }
}

#[test]
fn every_undefined_symbol_is_the_c_library_s() {
    for plugin in plugins() {
        let symbols = output("nm", &["-D", "--undefined-only"], &plugin);
        let foreign: Vec<&str> = symbols
            .lines()
            .filter(|line| !line.contains("@GLIBC_") && !line.contains("@GCC_"))
            // Weak: the C runtime's own hooks, which may be missing.
            .filter(|line| !line.trim_start().starts_with("w "))
            .collect();
        assert!(foreign.is_empty(), "{}: {foreign:?}", plugin.display());
    }
}

/// `cr_plugin_desc_t`, defined a second time.
#[repr(C)]
struct Descriptor {
    name: *const c_char,
    init: extern "C" fn(c_int) -> c_int,
    exit: extern "C" fn(c_int, c_int),
    version: u32,
    max_hooks: u32,
    hooks: [*const c_void; 15],
}

fn open(library: &Path, flags: c_int) -> *mut c_void {
    let path = CString::new(library.as_os_str().as_bytes()).unwrap();
    // SAFETY: a terminated path of a library of this repository, whose constructors may run anywhere.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | flags) };
    // SAFETY: a null pointer, or a terminated string.
    assert!(!handle.is_null(), "{:?}", unsafe { CStr::from_ptr(libc::dlerror()) });
    handle
}

/// Loads a plugin as CRIU does.
fn load(plugin: &Path) -> &'static Descriptor {
    let handle = open(plugin, 0);
    // SAFETY: looks a name up in a library that is never closed.
    let descriptor = unsafe { libc::dlsym(handle, c"CR_PLUGIN_DESC".as_ptr()) };
    // SAFETY: the exported object has this layout; nothing writes it any more.
    unsafe { descriptor.cast::<Descriptor>().as_ref() }.expect("CR_PLUGIN_DESC")
}

fn threads() -> usize {
    fs::read_dir("/proc/self/task").unwrap().count()
}

/// Runs `act` in a process of its own: a plugin's state, and the program's symbols, must not affect other
/// tests.
fn alone(act: impl FnOnce()) {
    // SAFETY: the child runs `act`, which takes no lock that another thread of this test may hold except the
    // allocator's, and glibc keeps that one usable.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act)).is_ok();
        // SAFETY: ends the child, without what belongs to the test program.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    let mut status = -1;
    // SAFETY: `status` is live; the child is ours.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0, "see above");
}

/// Sets a variable in a process that [`alone`] made. At the fork another thread may have held the standard
/// library's lock for the environment. It would stay locked in the child.
fn set_variable(name: &CStr, value: &Path) {
    let value = CString::new(value.as_os_str().as_bytes()).unwrap();
    // SAFETY: terminated strings, which are copied. This process has one thread, and the test program never
    // changes its environment: no thread was changing it when this process was forked.
    assert_eq!(unsafe { libc::setenv(name.as_ptr(), value.as_ptr(), 1) }, 0);
}

#[test]
fn a_program_without_criu_s_symbols_gets_the_fewest_hooks() {
    for (plugin, name) in plugins().iter().zip([c"amdgpu_plugin", c"rewake_plugin", c"observer"]) {
        alone(|| {
            let before = threads();
            let descriptor = load(plugin);
            // SAFETY: a terminated constant of the plugin.
            assert_eq!(unsafe { CStr::from_ptr(descriptor.name) }, name);
            assert_eq!((descriptor.version, descriptor.max_hooks), (0x200, 10));
            assert_eq!((descriptor.init)(DUMP), 0);
            (descriptor.exit)(DUMP, 0);
            assert_eq!(threads(), before);
        });
    }
}

#[test]
fn a_plugin_that_stepped_aside_leaves_every_hook_to_others() {
    alone(|| {
        let descriptor = load(&amdgpu().unwrap());
        // Before init, and after a plugin that stepped aside: this program is no CRIU, so no image names the
        // plugin.
        let pause: extern "C" fn(c_int) -> c_int =
            // SAFETY: hook 10 takes a pid.
            unsafe { std::mem::transmute(descriptor.hooks[10]) };
        assert_eq!(pause(1), NOT_MINE);
    });
}

/// Hook 3 as CRIU after 4.2 calls it.
type RestoreFile = extern "C" fn(c_int, *mut bool) -> c_int;

fn restore_file(descriptor: &Descriptor) -> RestoreFile {
    // SAFETY: hook 3 has this prototype, where the host has 14 hooks or more; the second argument is ignored
    // elsewhere.
    unsafe { std::mem::transmute::<*const c_void, RestoreFile>(descriptor.hooks[3]) }
}

#[test]
fn a_later_criu_gets_all_hooks_and_a_second_argument() {
    let images = tempfile::tempdir().unwrap();
    fs::write(images.path().join("observer-7.img"), "/dev/null").unwrap();
    for (later, id, expected) in [(false, 8, None), (true, 7, Some(true))] {
        alone(|| {
            set_variable(c"LATER_CRIU_IMAGES", images.path());
            if later {
                set_variable(c"OBSERVER_LATER", Path::new("1"));
            }
            open(&later_criu().unwrap(), libc::RTLD_GLOBAL);
            let descriptor = load(&observer().unwrap());
            assert_eq!(descriptor.max_hooks, 15);
            assert_eq!((descriptor.init)(RESTORE), 0);
            // CRIU does not initialise it: its content must not matter.
            for garbage in [false, true] {
                let mut retry = garbage;
                let answer = restore_file(descriptor)(id, &raw mut retry);
                assert_eq!(retry, expected.unwrap_or(false), "the hook left the argument as it was");
                assert_eq!(answer >= 0, expected.is_some());
            }
        });
    }
}

#[test]
fn an_argument_that_an_earlier_criu_does_not_pass_is_not_used() {
    alone(|| {
        let descriptor = load(&observer().unwrap());
        assert_eq!((descriptor.init)(RESTORE), 0);
        // No image directory here: it fails, and must not use the content of the second register.
        assert_eq!(restore_file(descriptor)(7, ptr::without_provenance_mut(1)), -1);
    });
}

#[test]
fn a_fork_of_criu_does_not_run_what_belongs_to_the_main_process() {
    let calls = tempfile::NamedTempFile::new().unwrap();
    alone(|| {
        set_variable(c"OBSERVER_LOG", calls.path());
        let descriptor = load(&observer().unwrap());
        assert_eq!((descriptor.init)(DUMP), 0);
        // SAFETY: hook 11 takes a pid.
        let checkpoint: extern "C" fn(c_int) -> c_int = unsafe { std::mem::transmute(descriptor.hooks[11]) };
        alone(|| {
            assert_eq!(checkpoint(1), -1);
            (descriptor.exit)(DUMP, 0);
        });
        (descriptor.exit)(DUMP, 0);
    });
    let calls = fs::read_to_string(calls.path()).unwrap();
    assert_eq!(calls, "init Dump threads=1\nexit Dump true threads=1\n");
}
