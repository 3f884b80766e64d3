// SPDX-License-Identifier: MIT OR Apache-2.0
//! The page server in CRIU's work directory: memory that may come later ([`super::later`]) is its to load. Until it has, the queues of
//! all processes stand before a gate (PROCESS_INFO), which it opens, and placeholders stand where CPUs reach it, which it watches.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use rewake_amdgpu_uapi::criu;
use rewake_criu_plugin::{Answer, Host};
use rewake_plugin_protocol::proto::{self, to_plugin, to_server};
use rewake_plugin_protocol::{Channel, Error, MAX_DESCRIPTORS, SOCKET, VERSION, connect};

use super::loading::Memory;
use super::shared_state::{MmapOffset, SharedState};
use super::{Restore, kfd_file};
use crate::abi;
use crate::image::Images;

/// Without a page server the processes wait for what need not be there: CRIU's log is the only place where that is seen.
const NONE: &str = "so all memory of GPUs is loaded before anything runs; `rewake restore` brings it behind the running processes, and so does \
                    `rewake stream-gpu` with this work directory, if it is started before CRIU";
/// Placeholders in one message: a tenth of what it may have.
const AT_ONCE: usize = 64;

/// The page server.
#[derive(Debug)]
pub(super) struct Server {
    channel: Channel,
    /// Calls that register memory wait until it is there.
    holds: bool,
}

/// A process would stand still, or have placeholders, for ever.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoGate {
    #[error("process {0}: its number in the image cannot be found in /proc")]
    NoNumber(i32),
    #[error("process {0}: buffer {1} has a placeholder, and was not handed over: a fault of the plugin")]
    NotHandedOver(u32, usize),
}

impl Server {
    /// The one that listens in CRIU's work directory; none if there is none, and everything is loaded at once. A warning says so if some of it
    /// `could_wait`.
    pub(super) fn find(host: &Host, could_wait: bool) -> Answer<Option<Self>> {
        let Some(channel) = connect(Path::new(SOCKET))? else {
            if could_wait {
                host.warn(format_args!(
                    "no page server listens on {SOCKET} in CRIU's work directory, {NONE}"
                ));
            }
            return Ok(None);
        };
        let server = Self::greet(channel)?;
        host.info("a page server takes what may come later");
        Ok(Some(server))
    }

    fn greet(channel: Channel) -> Result<Self, Error> {
        let server = Self { channel, holds: false };
        server.say(to_server::What::Hello(proto::Hello { version: VERSION, holds: false }), &[])?;
        match server.hear()? {
            to_plugin::What::Hello(hello) => {
                hello.check()?;
                Ok(Self { holds: hello.holds, ..server })
            }
            other => Err(unexpected("its version", &other)),
        }
    }

    /// It hangs up when no process of the server is left.
    pub(super) fn connection(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }

    /// Whether calls that register memory wait until it is there.
    pub(super) fn holds(&self) -> bool {
        self.holds
    }

    /// Gives it all buffers that may come later, with their placeholders. What is left in `memory` is to be loaded now: gates hold
    /// compute queues back, and neither work that render nodes are given nor whoever has a dma-buf open.
    pub(super) fn take(&self, host: &Host, restore: &Restore, memory: &mut [Memory]) -> Answer {
        self.say(to_server::What::Image(proto::Image {}), &[host.image_dir()?])?;
        for of in memory {
            let Some(process) = of.process else { continue };
            let (id, image) = &restore.images.kfd[process];
            let mut later: Vec<(u32, OwnedFd)> = Vec::new();
            for (buffer, dmabuf) in of.dmabufs.iter_mut().enumerate() {
                if restore.later.has(process, buffer)
                    && let Some(dmabuf) = dmabuf.take()
                {
                    later.push((u32::try_from(buffer)?, dmabuf));
                }
            }
            let mut places = Vec::new();
            let mut files = vec![kfd_file(host, &restore.images, &restore.board, process)?];
            for (node, gpu) in image.nodes.iter().enumerate().filter(|(_, node)| node.properties.gpu_id != 0)
            {
                let minor = restore.places.of(&gpu.properties)?.minor;
                places.push(proto::Gpu { gpu_id: gpu.properties.gpu_id, minor });
                files.push(host.stored_fd(restore.board.render(process, node))?);
            }
            let files: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.as_fd()).collect();
            self.say(to_server::What::Process(proto::Process { kfd: *id, gpus: places }), &files)?;
            for part in later.chunks(MAX_DESCRIPTORS) {
                let numbers = part.iter().map(|(number, _)| *number).collect();
                let dmabufs: Vec<BorrowedFd<'_>> = part.iter().map(|(_, dmabuf)| dmabuf.as_fd()).collect();
                self.say(to_server::What::Buffers(proto::Buffers { numbers }), &dmabufs)?;
            }
            let placeholders = self.placeholders(host, restore, process, &later)?;
            host.info(format_args!(
                "process {}: {} buffers come later; {placeholders} mappings are placeholders until then",
                image.pid,
                later.len()
            ));
        }
        self.say(to_server::What::Ready(proto::Ready {}), &[])?;
        match self.hear()? {
            to_plugin::What::Ready(_) => Ok(()),
            other => Err(unexpected("that it is ready", &other).into()),
        }
    }

    /// Gives it the placeholders of a process; how many there are.
    fn placeholders(
        &self,
        host: &Host,
        restore: &Restore,
        process: usize,
        later: &[(u32, OwnedFd)],
    ) -> Answer<usize> {
        let Some((file, uffd)) = restore.board.placeholders(process) else { return Ok(0) };
        let image = &restore.images.kfd[process].1;
        let mut mappings = Vec::new();
        for (number, vma) in restore.later.mappings(process).iter().enumerate() {
            let Some((buffer, offset)) = restore.board.placeholder(process, number) else { continue };
            let handed_over = later.binary_search_by_key(&u32::try_from(buffer)?, |(number, _)| *number);
            let (Ok(_), MmapOffset::Offset(start)) = (handed_over, restore.board.buffer(process, buffer))
            else {
                return Err(NoGate::NotHandedOver(image.pid, buffer).into());
            };
            let within = vma.offset - image.buffers[buffer].offset;
            mappings.push(proto::Mapping {
                address: vma.start,
                length: vma.end - vma.start,
                offset,
                buffer: u32::try_from(buffer)?,
                device_offset: start + within,
                within,
            });
        }
        let (file, uffd) = (host.stored_fd(file)?, host.stored_fd(uffd)?);
        self.say(to_server::What::Placeholders(proto::Placeholders {}), &[file.as_fd(), uffd.as_fd()])?;
        for part in mappings.chunks(AT_ONCE) {
            self.say(to_server::What::Mappings(proto::Mappings { mappings: part.to_vec() }), &[])?;
        }
        Ok(mappings.len())
    }

    /// A task that is stopped: if it computes, its queues stay where they are until the server says so. To be called
    /// before RESUME, by the tracer.
    pub(super) fn gate(&self, host: &Host, images: &Images, board: &SharedState, pid: i32) -> Answer {
        let number = number_in_image(pid).ok_or(NoGate::NoNumber(pid))?;
        let Some(process) = images.kfd.iter().position(|(_, image)| image.pid == number) else {
            return Ok(());
        };
        let task = abi::task(pid)?;
        criu::process_info(kfd_file(host, images, board, process)?.as_fd())?;
        let kfd = images.kfd[process].0;
        self.say(to_server::What::Started(proto::Started { kfd }), &[task.as_fd()])?;
        Ok(())
    }

    /// All tasks are behind their gates, and resumed: from now on the server answers for them.
    pub(super) fn go(self) -> Answer {
        self.say(to_server::What::Go(proto::Go {}), &[])?;
        match self.hear()? {
            to_plugin::What::Go(_) => Ok(()),
            other => Err(unexpected("that it goes on", &other).into()),
        }
    }

    fn say(&self, what: to_server::What, descriptors: &[BorrowedFd<'_>]) -> Result<(), Error> {
        self.channel.send(&proto::ToServer { what: Some(what) }, descriptors)
    }

    fn hear(&self) -> Result<to_plugin::What, Error> {
        let (message, _) = self.channel.receive::<proto::ToPlugin>()?;
        match message.what {
            Some(to_plugin::What::Refused(refused)) => Err(Error::Refused(refused.reason)),
            Some(what) => Ok(what),
            None => Err(Error::Malformed { expected: "an answer", found: "an empty one".to_owned() }),
        }
    }
}

fn unexpected(expected: &'static str, found: &to_plugin::What) -> Error {
    Error::Malformed { expected, found: format!("{found:?}") }
}

/// What a task is called in its own namespace, and so in the image.
pub(super) fn number_in_image(pid: i32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    numbers.split_whitespace().last()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::thread;

    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

    use super::*;

    /// A server that answers the plugin's first word.
    fn greeted_with(answer: to_plugin::What) -> Result<Server, Error> {
        let (kind, flags) = (SockType::SeqPacket, SockFlag::SOCK_CLOEXEC);
        let (plugin, server) = socketpair(AddressFamily::Unix, kind, None, flags).unwrap();
        let server = Channel::new(server).unwrap();
        let server = thread::spawn(move || {
            server.receive::<proto::ToServer>().unwrap();
            server.send(&proto::ToPlugin { what: Some(answer) }, &[]).unwrap();
        });
        let greeted = Server::greet(Channel::new(plugin).unwrap());
        server.join().unwrap();
        greeted
    }

    #[test]
    fn a_server_says_whether_it_holds_calls() {
        for holds in [false, true] {
            let hello = to_plugin::What::Hello(proto::Hello { version: VERSION, holds });
            assert_eq!(greeted_with(hello).unwrap().holds(), holds);
        }
    }

    #[test]
    fn a_server_of_another_version_is_not_talked_to() {
        for version in [0, VERSION - 1, VERSION + 1] {
            let hello = to_plugin::What::Hello(proto::Hello { version, holds: true });
            let error = greeted_with(hello).unwrap_err().to_string();
            let wanted = format!(
                "speaks version {version}, this one {VERSION}: install plugin and `rewake` of one release"
            );
            assert!(error.contains(&wanted), "{error}");
        }
    }

    #[test]
    fn a_server_that_refuses_says_why() {
        let refused = to_plugin::What::Refused(proto::Refused { reason: "it is too late".to_owned() });
        assert_eq!(greeted_with(refused).unwrap_err().to_string(), "the server refused: it is too late");
        let error = greeted_with(to_plugin::What::Go(proto::Go {})).unwrap_err().to_string();
        assert!(error.contains("expected its version, found Go"), "{error}");
    }
}
