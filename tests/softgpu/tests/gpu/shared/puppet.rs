// SPDX-License-Identifier: MIT OR Apache-2.0
//! Dumped programs that the test controls over a socket: one order, one line, a connection.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};
use drm::control::Device as _;
use gpu_app::chain::{Lane, Step};
use gpu_app::gpu::Gpus;
use gpu_app::kernel::Kernel;
use gpu_app::kfd::Buffer;
use rewake_amdgpu_uapi::Kfd;
use rewake_amdgpu_uapi::abi::call;
use rewake_amdgpu_uapi::abi::memory::Mapping;
use rewake_testkit::soon;
use softgpu_tests::{Scene, sys};

/// Bytes of every buffer.
pub(crate) const SIZE: u64 = 8192;

/// A puppet, as the test sees it.
#[derive(Debug, Clone)]
pub(crate) struct Puppet {
    socket: PathBuf,
    pub(crate) pid: u32,
}

impl Puppet {
    /// Starts a puppet that is this process's child.
    pub(crate) fn start(scene: &Scene, folder: &Path, name: &str) -> (Self, Child) {
        let socket = folder.join(name);
        let log = File::create(socket.with_extension("log")).unwrap();
        let child = scene.apart(&socket.to_string_lossy(), log);
        (Self { socket, pid: child.id() }.up(), child)
    }

    /// Has it start another puppet, its child: a program of its own, or its fork.
    pub(crate) fn child(&self, act: &str, name: &str) -> Self {
        let socket = self.socket.with_file_name(name);
        let pid = self.tell(&format!("{act} {}", socket.display())).parse().unwrap();
        Self { socket, pid }.up()
    }

    fn up(self) -> Self {
        assert!(
            soon(|| UnixStream::connect(&self.socket).is_ok()),
            "{} does not answer",
            self.socket.display()
        );
        self
    }

    /// Sends it an order; returns its answer.
    pub(crate) fn tell(&self, words: &str) -> String {
        let answer = self.ask(words).unwrap_or_else(|error| panic!("{words:?} of {self:?}: {error:#}"));
        assert!(!answer.starts_with("failed"), "{words:?} of {self:?}: {answer}");
        answer
    }

    fn ask(&self, words: &str) -> anyhow::Result<String> {
        let mut stream = UnixStream::connect(&self.socket)?;
        writeln!(stream, "{words}")?;
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer)?;
        ensure!(!answer.is_empty(), "no answer");
        Ok(answer.trim().to_owned())
    }
}

/// The state of a puppet. Fields drop in order.
#[derive(Debug, Default)]
struct Stage {
    views: BTreeMap<String, Mapping>,
    buffers: BTreeMap<String, Buffer>,
    dmabufs: BTreeMap<i32, OwnedFd>,
    second: Option<Kfd>,
    gpus: Option<(Lane, Arc<Gpus>)>,
    /// A descriptor with a lower number than the GPUs' descriptors.
    low: Option<File>,
    children: Vec<Child>,
}

/// The body of a puppet; ends when the test asks.
pub(crate) fn obey(scene: &Scene, socket: &Path) {
    let low = Some(File::open("/dev/null").unwrap());
    Stage { low, ..Stage::default() }.serve(scene, socket).unwrap();
}

impl Stage {
    fn serve(&mut self, scene: &Scene, socket: &Path) -> anyhow::Result<()> {
        let listener = UnixListener::bind(socket)?;
        loop {
            let (mut stream, _) = listener.accept()?;
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line)?;
            let words: Vec<&str> = line.split_whitespace().collect();
            let answer = match words[..] {
                // A probe of whether this process answers yet.
                [] => continue,
                ["quit"] => "bye".to_owned(),
                _ => self.act(scene, &words).unwrap_or_else(|error| format!("failed {error:#}")),
            };
            // The peer may have closed the connection.
            let _ = writeln!(stream, "{}", answer.replace('\n', " "));
            if words == ["quit"] {
                for child in &mut self.children {
                    child.wait()?;
                }
                return Ok(());
            }
        }
    }

    fn act(&mut self, scene: &Scene, words: &[&str]) -> anyhow::Result<String> {
        let done = Ok("done".to_owned());
        match *words {
            ["gpus", count] => {
                let gpus = Gpus::open(count.parse()?)?;
                self.gpus = Some((Lane::new(&gpus, gpus.count(), 1)?, gpus));
                done
            }
            ["start", socket] => {
                let log = File::create(Path::new(socket).with_extension("log"))?;
                self.children.push(scene.apart(socket, log));
                Ok(self.children.last().map_or(0, Child::id).to_string())
            }
            ["fork", socket] => self.fork(scene, Path::new(socket)),
            ["second"] => {
                self.second = Some(Kfd::open()?);
                done
            }
            ["export-by-second", name] => {
                let kfd = self.second.as_ref().context("no second /dev/kfd")?;
                let flags = (libc::O_RDWR | libc::O_CLOEXEC).cast_unsigned();
                let dmabuf = call::export_dmabuf(kfd.as_fd(), self.buffer(name)?.handle(), flags)?;
                Ok(self.keep(dmabuf))
            }
            ["take", pid, number] => {
                let dmabuf = sys::descriptor_of(pid.parse()?, number.parse()?)?;
                Ok(self.keep(dmabuf))
            }
            ["lower", number] => {
                self.low = None;
                let dmabuf = self.dmabuf(number)?.try_clone()?;
                self.dmabufs.remove(&number.parse()?);
                Ok(self.keep(dmabuf))
            }
            ["close", number] => {
                self.dmabufs.remove(&number.parse()?).context("no such descriptor")?;
                done
            }
            _ => self.with_buffers(words),
        }
    }

    fn with_buffers(&mut self, words: &[&str]) -> anyhow::Result<String> {
        match *words {
            ["vram", name] => {
                let buffer = self.gpus()?.local(0, SIZE)?;
                let number = buffer.handle();
                self.buffers.insert(name.to_owned(), buffer);
                return Ok(number.to_string());
            }
            ["host", name] => {
                let buffer = self.gpus()?.host(SIZE)?;
                self.buffers.insert(name.to_owned(), buffer);
            }
            ["export", name] => {
                let dmabuf = self.buffer(name)?.export()?;
                return Ok(self.keep(dmabuf));
            }
            ["import", name, number, gpu] => {
                let device = Arc::clone(self.gpus()?.device(gpu.parse()?));
                let mut buffer = Buffer::import(&device, self.dmabuf(number)?.as_fd())?;
                buffer.map(&[device.gpu_id()])?;
                self.buffers.insert(name.to_owned(), buffer);
            }
            // The driver expects the GPU number that this process knows.
            ["remap", name] => {
                let gpu = self.gpus()?.device(0).gpu_id();
                let buffer = self.buffers.get_mut(name).context("no such buffer")?;
                buffer.unmap(&[gpu])?;
                buffer.map(&[gpu])?;
            }
            ["view", name, number] => {
                let render = self.gpus()?.device(0).render();
                let handle = render.prime_fd_to_buffer(self.dmabuf(number)?.as_fd())?;
                let view = render.map(handle.into(), SIZE)?;
                self.views.insert(name.to_owned(), view);
            }
            ["free", name] => drop(self.buffers.remove(name).context("no such buffer")?),
            ["poke", name, value] => self.seen(name)?.fill32(0, words_of(SIZE)?, value.parse()?),
            ["peek", name] => return all_of(self.seen(name)?),
            ["fill", name, value, gpu] => {
                let (to, value) = (self.buffer(name)?.address(), value.parse()?);
                let kernel = Kernel::Fill { to, words: SIZE / 4, value };
                self.run(gpu.parse()?, kernel)?;
            }
            ["load", name, gpu] => {
                let from = self.buffer(name)?.address();
                let back = self.gpus()?.host(SIZE)?;
                self.run(gpu.parse()?, Kernel::Copy { to: back.address(), from, bytes: SIZE })?;
                return all_of(back.cpu());
            }
            _ => bail!("{words:?} is no order"),
        }
        Ok("done".to_owned())
    }

    /// A child with this process's memory and descriptors, and without its GPU state.
    fn fork(&mut self, scene: &Scene, socket: &Path) -> anyhow::Result<String> {
        // SAFETY: the child has this thread alone, and uses nothing that other threads may have locked: it
        // serves, and ends.
        let pid = unsafe { libc::fork() };
        ensure!(pid >= 0, "fork: {}", std::io::Error::last_os_error());
        if pid == 0 {
            self.children.clear();
            let served = self.serve(scene, socket);
            // SAFETY: it does not return; the driver cleans up what this copy of the program has.
            unsafe { libc::_exit(i32::from(served.is_err())) };
        }
        Ok(pid.to_string())
    }

    fn keep(&mut self, dmabuf: OwnedFd) -> String {
        let number = dmabuf.as_raw_fd();
        self.dmabufs.insert(number, dmabuf);
        number.to_string()
    }

    fn dmabuf(&self, number: &str) -> anyhow::Result<&OwnedFd> {
        self.dmabufs.get(&number.parse()?).with_context(|| format!("no descriptor {number}"))
    }

    fn gpus(&self) -> anyhow::Result<&Arc<Gpus>> {
        Ok(&self.gpus.as_ref().context("no GPUs")?.1)
    }

    fn buffer(&self, name: &str) -> anyhow::Result<&Buffer> {
        self.buffers.get(name).with_context(|| format!("no buffer {name}"))
    }

    /// The CPU's view.
    fn seen(&self, name: &str) -> anyhow::Result<&Mapping> {
        if let Some(view) = self.views.get(name) {
            return Ok(view);
        }
        Ok(self.buffer(name)?.cpu())
    }

    fn run(&mut self, gpu: usize, kernel: Kernel) -> anyhow::Result<()> {
        let (lane, _) = self.gpus.as_mut().context("no GPUs")?;
        lane.run(&[Step { gpu, queue: 0, kernel }])
    }
}

fn words_of(bytes: u64) -> anyhow::Result<usize> {
    Ok(usize::try_from(bytes / 4)?)
}

/// The value of all words.
fn all_of(memory: &Mapping) -> anyhow::Result<String> {
    let first = memory.load32(0);
    let other = (0..SIZE).step_by(4).find(|at| memory.load32(*at) != first);
    match other {
        Some(at) => bail!("{first:#x} at 0 and {:#x} at {at}", memory.load32(at)),
        None => Ok(first.to_string()),
    }
}
