// SPDX-License-Identifier: MIT OR Apache-2.0
//! An image can be restored any number of times; a damaged one is refused with one line that says what is
//! wrong.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use gpu_app::shape::Shape;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_amdgpu_uapi::abi::{KFD_IOC_ALLOC_MEM_FLAGS_GTT, KFD_IOC_ALLOC_MEM_FLAGS_VRAM};
use rewake_amdgpu_uapi::criu::blob::Private;
use rewake_criu_images::ImageDir;
use rewake_criu_images::amdgpu::{KfdBuffer, KfdImage, kfd_name, pages_name};
use rewake_skip::need;
use softgpu_tests::app::App;
use softgpu_tests::criu::{Criu, Plugin, Version, queues, wait_for_the_end_of};
use softgpu_tests::{Judge, REAL_GPUS, isolated};

/// Bytes of address space that a restore gets, so that a damaged image cannot make it allocate more.
const ADDRESS_SPACE: u64 = 4 << 30;
/// What CRIU logs when it makes the first task.
const FORKING: &str = "Forking task with";
/// Damaged images of the random test; `PLUGIN_DAMAGES` sets another number.
const DAMAGES: u64 = 4;

fn shape() -> Shape {
    Shape { layers: 1, layer_kib: 64, cache_mib: 1, queues: 1, ..Shape::small() }
}

/// A server that has answered.
fn server(folder: &Path) -> (App, u32, Criu) {
    let app = App::start(&shape(), folder).unwrap();
    app.answers(&[1, 2], 2).unwrap();
    let pid = app.pid().unwrap();
    (app, pid, Criu::with(Plugin::Ours, Version::V4_2, &folder.join("images")).unwrap())
}

fn end(pid: u32) {
    kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL).unwrap();
    wait_for_the_end_of(pid).unwrap();
}

#[test]
fn a_second_time() {
    isolated(1, |_| {
        let folder = tempfile::tempdir().unwrap();
        let (mut app, pid, criu) = server(folder.path());
        criu.dump(pid).unwrap();
        app.was_dumped();
        need!(queues());
        for prompt in 5..7 {
            criu.restore().unwrap();
            app.answers(&[prompt], 2).unwrap();
            end(pid);
        }
        criu.restore().unwrap();
        app.answers(&[9], 2).unwrap();
        app.quit().unwrap();
        wait_for_the_end_of(pid).unwrap();
    });
}

#[test]
fn a_restored_process_is_dumped_like_any_other() {
    isolated(1, |_| {
        let folder = tempfile::tempdir().unwrap();
        let (mut app, pid, criu) = server(folder.path());
        criu.dump(pid).unwrap();
        app.was_dumped();
        need!(queues());
        criu.restore().unwrap();
        app.answers(&[5], 2).unwrap();
        let again = Criu::with(Plugin::Ours, Version::V4_2, &folder.path().join("again")).unwrap();
        again.dump(pid).unwrap();
        wait_for_the_end_of(pid).unwrap();
        again.restore().unwrap();
        app.answers(&[6], 2).unwrap();
        app.quit().unwrap();
        wait_for_the_end_of(pid).unwrap();
    });
}

#[test]
fn dumped_and_left_running() {
    isolated(1, |_| {
        let folder = tempfile::tempdir().unwrap();
        let (mut app, pid, criu) = server(folder.path());
        gpu_app::client::start(app.socket(), &[7, 8], 6).unwrap();
        criu.dump_running(pid).unwrap();
        // The answer that was begun continues here, and once more in the restored process.
        app.answer_is(&[7, 8], 6).unwrap();
        app.answers(&[5], 2).unwrap();
        kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL).unwrap();
        app.was_dumped();
        need!(queues());
        criu.restore().unwrap();
        app.answer_is(&[7, 8], 6).unwrap();
        app.answers(&[6], 2).unwrap();
        app.quit().unwrap();
        wait_for_the_end_of(pid).unwrap();
    });
}

/// A dumped process with its files, to be damaged one after the other.
struct Dumped {
    criu: Criu,
    app: App,
    pid: u32,
    files: BTreeMap<String, Vec<u8>>,
    alive: BTreeMap<String, u64>,
    _folder: tempfile::TempDir,
}

/// How a restore of a damaged image ended.
struct Ended {
    success: bool,
    log: String,
}

impl Dumped {
    fn new() -> Result<Self, &'static str> {
        let alive = Judge::find().ok_or(REAL_GPUS)?.alive();
        queues()?;
        let folder = tempfile::tempdir().unwrap();
        let (mut app, pid, criu) = server(folder.path());
        criu.dump(pid).unwrap();
        app.was_dumped();
        let names = fs::read_dir(criu.images()).unwrap().map(|entry| entry.unwrap().path());
        let own = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with("amdgpu-");
        let file = |path: PathBuf| {
            (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap())
        };
        let files = names.filter(own).map(file).collect();
        Ok(Self { criu, app, pid, files, alive, _folder: folder })
    }

    /// The id of the process's file, and its image.
    fn kfd(&self) -> (u32, KfdImage) {
        let number = |name: &String| name.strip_prefix("amdgpu-kfd-")?.strip_suffix(".img")?.parse().ok();
        let id = self.files.keys().find_map(number).unwrap();
        (id, ImageDir::open(self.criu.images()).unwrap().kfd(id).unwrap().unwrap())
    }

    /// Restores with one file changed (None: without it), and puts the file back.
    fn restored_with(&self, name: &str, bytes: Option<&[u8]>) -> Ended {
        let path = self.criu.images().join(name);
        match bytes {
            Some(bytes) => fs::write(&path, bytes).unwrap(),
            None => fs::remove_file(&path).unwrap(),
        }
        let restore = self.criu.command(&["restore", "--restore-detached"]);
        let mut command = Command::new("prlimit");
        command.arg(format!("--as={ADDRESS_SPACE}")).arg(restore.get_program()).args(restore.get_args());
        let status = command.status().unwrap();
        fs::write(&path, &self.files[name]).unwrap();
        Ended { success: status.success(), log: self.criu.log("restore") }
    }

    /// Checks that the restore is refused before a task exists, with one line that has these words, and that
    /// nothing is left.
    fn is_refused(&self, name: &str, bytes: Option<&[u8]>, words: &[&str]) {
        let ended = self.restored_with(name, bytes);
        assert!(!ended.success, "{words:?}");
        let errors: Vec<&str> =
            ended.log.lines().filter(|line| line.contains("Error (amdgpu_plugin)")).collect();
        let says = |line: &&str| words.iter().all(|word| line.contains(word));
        assert!(errors.len() == 1 && errors.iter().all(says), "{words:?}: {errors:#?}\n{}", tail(&ended.log));
        assert!(!ended.log.contains(FORKING), "{words:?}");
        self.nothing_is_left();
    }

    fn nothing_is_left(&self) {
        wait_for_the_end_of(self.pid).unwrap();
        let judge = Judge::find().unwrap();
        let gone = (0..600).any(|_| {
            judge.alive() == self.alive || {
                thread::sleep(Duration::from_millis(50));
                false
            }
        });
        assert!(gone, "left on the GPUs: {:?}", judge.alive());
    }

    /// The image can still be restored.
    fn restores(self) {
        self.criu.restore().unwrap();
        assert!(self.criu.log("restore").contains(FORKING));
        self.app.answers(&[9], 2).unwrap();
        self.app.quit().unwrap();
        wait_for_the_end_of(self.pid).unwrap();
    }
}

fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}

#[test]
fn damaged_files_are_named() {
    isolated(1, |_| {
        let dumped = need!(Dumped::new());
        let (id, image) = dumped.kfd();
        let kfd = kfd_name(id);
        let bytes = &dumped.files[&kfd];
        for length in [0, 3, 4, 40, bytes.len() - 1] {
            dumped.is_refused(&kfd, Some(&bytes[..length]), &[&kfd]);
        }
        let changed = |change: &dyn Fn(&mut KfdImage)| {
            let mut image = image.clone();
            change(&mut image);
            image.to_bytes()
        };
        let refused = |change: &dyn Fn(&mut KfdImage), words: &[&str]| {
            dumped.is_refused(&kfd, Some(&changed(change)), &[&[kfd.as_str()], words].concat());
        };
        refused(&|image| image.buffers[0].gpu_id = 0x77, &["0x77"]);
        refused(&|image| image.objects = u32::MAX, &["checkpoint data"]);
        refused(&|image| image.objects -= 1, &["after the last object"]);
        refused(&|image| image.private.clear(), &["0 bytes"]);
        refused(&|image| image.private[0] = 9, &["version 9"]);
        refused(&|image| image.private.truncate(image.private.len() - 1), &["checkpoint data"]);
        refused(&|image| image.buffers.truncate(1), &["checkpoint data"]);
        let last = image.buffers.len() - 1;
        refused(&|image| image.buffers[last].address = u64::MAX, &["inside the address space"]);
        let private = |image: &mut KfdImage, change: &dyn Fn(&mut Private)| {
            let (gpus, buffers) = (image.gpus as usize, image.buffers.len());
            let mut private = Private::read(&image.private, gpus, buffers, image.objects as usize).unwrap();
            change(&mut private);
            image.private = private.write();
        };
        let queue = |private: &mut Private| private.queues_mut().for_each(|queue| queue.gpu = 0x55);
        refused(&|image| private(image, &queue), &["queue", "GPU 0x55"]);
        let mapped = |private: &mut Private| private.bos_mut()[0].set_mapped(&[0x66]).unwrap();
        refused(&|image| private(image, &mapped), &["mapped on GPU 0x66"]);
        let overlapping = |image: &mut KfdImage| {
            let all = |private: &mut Private| {
                let gpus = private.bos().iter().map(|bo| bo.mapped()).max().unwrap();
                private.bos_mut().iter_mut().for_each(|bo| bo.set_mapped(&gpus).unwrap());
            };
            private(image, &all);
            image.buffers[1].address = image.buffers[0].address;
        };
        refused(&overlapping, &["overlap"]);
        let gpu = image.nodes.iter().map(|node| node.properties.gpu_id).find(|gpu| *gpu != 0).unwrap();
        let pages = pages_name(id, gpu);
        let bytes = &dumped.files[&pages];
        dumped.is_refused(&pages, None, &["open", &pages, "No such file"]);
        dumped.is_refused(&pages, Some(&[]), &[&pages, "need"]);
        dumped.is_refused(&pages, Some(&bytes[..bytes.len() - 1]), &[&pages, "need"]);
        let mut longer = bytes.clone();
        longer[0] ^= 1;
        dumped.is_refused(&pages, Some(&longer), &[&pages, "by its header", "need"]);
        let size = |image: &mut KfdImage| image.buffers.iter_mut().for_each(|buffer| buffer.size = 1 << 40);
        dumped.is_refused(&kfd, Some(&changed(&size)), &["overlap"]);
        let render = dumped.files.keys().find(|name| name.starts_with("amdgpu-renderD-")).unwrap();
        dumped.is_refused(render, Some(&dumped.files[render][..5]), &[render]);
        let unknown = rewake_criu_images::amdgpu::RenderImage { gpu_id: 0x99, contents: None }.to_bytes();
        dumped.is_refused(render, Some(&unknown), &[render, "GPU 0x99"]);
        dumped.restores();
    });
}

#[test]
fn random_damage_does_no_harm() {
    isolated(1, |_| {
        let dumped = need!(Dumped::new());
        let judge = need!(Judge::find(), REAL_GPUS);
        let wanted = std::env::var("PLUGIN_DAMAGES").ok().and_then(|count| count.parse().ok());
        let names: Vec<&String> = dumped.files.keys().filter(|name| !name.contains("-pages-")).collect();
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = |below: usize| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            usize::try_from(random % below as u64).unwrap()
        };
        for number in 0..wanted.unwrap_or(DAMAGES) {
            let name = names[next(names.len())];
            let mut bytes = dumped.files[name].clone();
            for _ in 0..=next(3) {
                let at = next(bytes.len());
                match next(4) {
                    0 => bytes[at] ^= 1 << next(8),
                    1 => bytes[at] = u8::try_from(next(256)).unwrap(),
                    2 => bytes.truncate(at.max(1)),
                    _ => bytes.insert(at, u8::try_from(next(256)).unwrap()),
                }
            }
            let ended = dumped.restored_with(name, Some(&bytes));
            let log = &ended.log;
            let plugin = |line: &&str| line.contains("Error (amdgpu_plugin)");
            assert!(!log.contains("panicked"), "{number}, {name}: {}", tail(log));
            if ended.success {
                // It may have ended by itself: see below.
                let killed = kill(Pid::from_raw(dumped.pid.cast_signed()), Signal::SIGKILL);
                assert!(matches!(killed, Ok(()) | Err(Errno::ESRCH)), "{number}, {name}: {killed:?}");
            } else {
                assert!(log.lines().any(|line| plugin(&line)), "{number}, {name}: {}", tail(log));
            }
            dumped.nothing_is_left();
            // A program with damaged memory may do anything to itself.
            judge.clear();
        }
        dumped.restores();
    });
}

#[test]
fn a_mapping_of_a_buffer_at_another_offset_is_no_freed_one() {
    isolated(1, |_| {
        let dumped = need!(Dumped::new());
        let (id, mut image) = dumped.kfd();
        let vmas = ImageDir::open(dumped.criu.images()).unwrap().mm(dumped.pid).unwrap().vmas;
        // Not doorbells, which are mapped from another file.
        let is_mapped = |buffer: &&mut KfdBuffer| {
            buffer.alloc_flags & (KFD_IOC_ALLOC_MEM_FLAGS_VRAM | KFD_IOC_ALLOC_MEM_FLAGS_GTT) != 0
                && vmas.iter().any(|vma| (vma.start, vma.offset) == (buffer.address, buffer.offset))
        };
        let mapped = image.buffers.iter_mut().find(is_mapped).unwrap();
        // At an address where no other mapping is.
        mapped.offset += 1 << 44;
        let words = format!("at {:#x}, offset", mapped.address);
        let ended = dumped.restored_with(&kfd_name(id), Some(&image.to_bytes()));
        assert!(!ended.success, "it would end of SIGBUS later");
        let says = |line: &str| {
            line.contains("Error (amdgpu_plugin)")
                && line.contains(&words)
                && line.contains("image is damaged")
        };
        assert!(ended.log.lines().any(says), "{}", tail(&ended.log));
        dumped.nothing_is_left();
        dumped.restores();
    });
}
