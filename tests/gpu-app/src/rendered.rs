// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process with render nodes only: no compute, but BOs and submissions of its own. No answer depends on it.
//! Each part of it is checked separately, since a restore may succeed for one and fail for another:
//!
//! * `node`: the open render nodes report their GPUs;
//! * `fresh`: new BOs and a new context work there;
//! * `kept`: the context and the BOs from the start work, and hold their bytes and the count of checks.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};
use drm::control::Device as _;
use rewake_amdgpu_uapi::abi::{
    AMDGPU_GEM_CREATE_CPU_ACCESS_REQUIRED, AMDGPU_GEM_DOMAIN_GTT, AMDGPU_GEM_DOMAIN_VRAM, AMDGPU_HW_IP_DMA,
};
use rewake_amdgpu_uapi::packet::Sdma;
use rewake_amdgpu_uapi::render::Render;
use rewake_amdgpu_uapi::topology::Topology;

use crate::gpu::PATIENCE;
use crate::shape::Shape;
use crate::weights;

/// Bytes of each buffer.
const SIZE: u64 = 128 * 1024;
/// Offset in the last one of the count of checks.
const COUNT: u64 = SIZE - 8;
/// Bytes of commands; engines take whole groups of eight words.
const COMMANDS: u32 = 64;

/// Polls of a submission.
const LOOK: Duration = Duration::from_micros(200);

/// The process, as the server sees it.
#[derive(Debug)]
pub struct Rendered {
    socket: UnixStream,
    child: Child,
}

impl Rendered {
    /// Starts the process.
    ///
    /// # Errors
    /// It cannot be started, or its first check fails.
    pub fn start(shape: &Shape) -> anyhow::Result<Self> {
        let (socket, theirs) = UnixStream::pair().context("a pair of sockets")?;
        let program = std::env::current_exe().context("the path of this program")?;
        let child = Command::new(program)
            .arg("rendered")
            .args(shape.arguments())
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .spawn()
            .context("start the process with render nodes")?;
        let mut rendered = Self { socket, child };
        for part in ["node", "fresh", "kept"] {
            rendered.check(part)?;
        }
        Ok(rendered)
    }

    /// Asks it to check a part.
    ///
    /// # Errors
    /// The check fails.
    pub fn check(&mut self, part: &str) -> anyhow::Result<()> {
        writeln!(self.socket, "{part}").context("ask the process with render nodes")?;
        let mut answer = String::new();
        BufReader::new(&self.socket)
            .read_line(&mut answer)
            .context("read from the process with render nodes")?;
        match answer.trim() {
            "ok" => Ok(()),
            "" => bail!("the process with render nodes has ended"),
            wrong => Err(anyhow!("{part}: {wrong}")),
        }
    }
}

impl Drop for Rendered {
    fn drop(&mut self) {
        // It ends when its socket closes; it may have ended already.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        let _ = self.child.wait();
    }
}

/// The body of that process; ends when its socket closes. Its socket is standard input.
///
/// # Errors
/// A GPU refuses at the start; later errors are answers.
pub fn work(shape: &Shape) -> anyhow::Result<()> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned().context("take standard input")?;
    let mut socket = UnixStream::from(socket);
    let topology = Topology::read()?;
    let mut nodes = Vec::new();
    for (gpu, node) in topology.gpus().take(shape.gpus).enumerate() {
        nodes.push(Node::open(node.render_minor(), shape.seed, gpu)?);
    }
    let mut lines = BufReader::new(socket.try_clone().context("share a socket")?).lines();
    while let Some(Ok(part)) = lines.next() {
        let answer = match nodes.iter_mut().try_for_each(|node| node.check(&part)) {
            Ok(()) => "ok".to_owned(),
            Err(error) => format!("{error:#}").replace('\n', " "),
        };
        writeln!(socket, "{answer}").context("answer")?;
    }
    Ok(())
}

/// One render node with its context and BOs.
#[derive(Debug)]
struct Node {
    render: Render,
    kept: Bench,
    seed: u64,
    gpu: usize,
    checks: u32,
}

/// A context with BOs: for commands and results, of host memory, and one of VRAM. None of them stays mapped
/// by the CPU: a BO that a restore loses could not be mapped again.
#[derive(Debug)]
struct Bench {
    context: u32,
    host: u32,
    local: u32,
    /// GPU address of the first; the second follows.
    address: u64,
}

impl Node {
    fn open(minor: u32, seed: u64, gpu: usize) -> anyhow::Result<Self> {
        let render = Render::open(minor)?;
        let rings = render.engine_info(AMDGPU_HW_IP_DMA)?.available_rings;
        ensure!(rings != 0, "--mode render-only needs copy engines, and renderD{minor} has none");
        let kept = Bench::new(&render, 1 << 32)?;
        let node = Self { render, kept, seed, gpu, checks: 0 };
        node.kept.put(&node.render, &node.numbers())?;
        Ok(node)
    }

    fn numbers(&self) -> Vec<u8> {
        let mut numbers = vec![0; usize::try_from(COUNT).unwrap_or(0)];
        weights::rendered(self.seed, self.gpu, &mut numbers);
        numbers
    }

    fn check(&mut self, part: &str) -> anyhow::Result<()> {
        match part {
            "node" => self.check_node(),
            "fresh" => self.check_fresh(),
            "kept" => self.check_kept(),
            other => bail!("{other:?} is no part: node, fresh or kept"),
        }
    }

    fn check_node(&self) -> anyhow::Result<()> {
        let info = self.render.device_info()?;
        ensure!(info.family != 0, "the GPU has no family");
        Ok(())
    }

    fn check_fresh(&self) -> anyhow::Result<()> {
        let bench = Bench::new(&self.render, 2 << 32)?;
        let numbers = self.numbers();
        bench.put(&self.render, &numbers)?;
        let (found, _) = bench.get(&self.render, 0)?;
        ensure!(found == numbers, "a new BO has other bytes than were written");
        bench.close(&self.render)
    }

    fn check_kept(&mut self) -> anyhow::Result<()> {
        let (found, count) = self.kept.get(&self.render, self.checks + 1)?;
        ensure!(found == self.numbers(), "a BO from the start has other bytes");
        ensure!(count == self.checks, "a BO counts {count} checks, there were {}", self.checks);
        self.checks += 1;
        Ok(())
    }
}

impl Bench {
    fn new(render: &Render, address: u64) -> anyhow::Result<Self> {
        let access = u64::from(AMDGPU_GEM_CREATE_CPU_ACCESS_REQUIRED);
        let host = render.create(2 * SIZE, AMDGPU_GEM_DOMAIN_GTT, access)?;
        render.map_gpu(host, address, 2 * SIZE)?;
        let local = render.create(SIZE, AMDGPU_GEM_DOMAIN_VRAM, 0)?;
        render.map_gpu(local, address + 2 * SIZE, SIZE)?;
        Ok(Self { context: render.context()?, host, local, address })
    }

    fn local_address(&self) -> u64 {
        self.address + 2 * SIZE
    }

    /// Writes bytes, and a count of 0 after them, into VRAM.
    fn put(&self, render: &Render, bytes: &[u8]) -> anyhow::Result<()> {
        let view = render.map(self.host, 2 * SIZE)?;
        view.write(0, bytes);
        view.write(COUNT, &[0; 8]);
        view.write(SIZE, &commands(Sdma::new().copy(self.local_address(), self.address, SIZE)));
        self.run(render)
    }

    /// Reads the bytes in VRAM, and the count, then sets the count.
    fn get(&self, render: &Render, count: u32) -> anyhow::Result<(Vec<u8>, u32)> {
        let view = render.map(self.host, 2 * SIZE)?;
        // No byte of an earlier copy may be taken for a new one.
        view.fill32(0, usize::try_from(SIZE / 4)?, 0xdead_beef);
        let packets = Sdma::new().copy(self.address, self.local_address(), SIZE);
        view.write(SIZE, &commands(packets.fence(self.local_address() + COUNT, count)));
        self.run(render)?;
        let mut bytes = vec![0; usize::try_from(COUNT)?];
        view.read(0, &mut bytes);
        Ok((bytes, view.load32(COUNT)))
    }

    fn run(&self, render: &Render) -> anyhow::Result<()> {
        let commands = (self.address + SIZE, COMMANDS);
        let submission = render.copy_engine(self.context, 0, commands, &[self.host, self.local], &[])?;
        // Polls are counted, no clock is read: a restored process's may jump.
        for _ in 0..PATIENCE.as_micros() / LOOK.as_micros() {
            if render.wait(submission, 0)? {
                return Ok(());
            }
            thread::sleep(LOOK);
        }
        bail!("a submission to a render node does not end")
    }

    fn close(self, render: &Render) -> anyhow::Result<()> {
        render.unmap_gpu(self.host, self.address, 2 * SIZE)?;
        render.unmap_gpu(self.local, self.local_address(), SIZE)?;
        for handle in [self.host, self.local] {
            let handle = drm::control::from_u32(handle).context("a handle is not 0")?;
            render.close_buffer(handle).context("close a BO")?;
        }
        Ok(render.free_context(self.context)?)
    }
}

fn commands(mut packets: Sdma) -> Vec<u8> {
    while packets.bytes().len() < COMMANDS as usize {
        packets = packets.nop();
    }
    packets.bytes().to_vec()
}
