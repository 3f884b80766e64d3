// SPDX-License-Identifier: MIT OR Apache-2.0
//! Hands lazy buffers ([`super::lazy_plan`]) to the streamer that listens in CRIU's work directory. The
//! streamer loads them, opens the processes' gates (PROCESS_INFO), and serves page faults in placeholders.

use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use rewake_amdgpu_uapi::criu;
use rewake_criu_plugin::{Answer, Host};
use rewake_plugin_protocol::proto::{self, to_plugin, to_server};
use rewake_plugin_protocol::{Channel, Error, MAX_DESCRIPTORS, SOCKET, VERSION, connect};
use rewake_process::pidfd::pidfd_open;
use rewake_process::proc;

use super::loading::UnloadedBuffers;
use super::shared_state::{MmapOffset, SharedState};
use super::{Restore, kfd_file};
use crate::image::Images;

/// Without a streamer the processes wait for memory that could be lazy. Only this line of CRIU's log reports
/// that.
const NO_STREAMER: &str = "so all GPU memory is loaded before the processes run; to load it in the \
                           background, use `rewake restore`, or start `rewake lazy-pages` with this work \
                           directory before CRIU";
/// Most placeholders in one message: a tenth of what fits.
const MAX_MAPPINGS: usize = 64;
/// Most ranges of needed bytes in one message: a third of what fits.
const MAX_RANGES: usize = 256;

/// The connection to the streamer.
#[derive(Debug)]
pub(super) struct StreamerConnection {
    channel: Channel,
    /// The streamer holds calls that register memory until that memory is resident.
    holds_calls: bool,
}

/// A process's state cannot be handed to the streamer. Its queues would stay evicted, or its placeholders
/// missing.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandoffError {
    #[error("process {0}: its pid in the image cannot be read from /proc")]
    NoNumber(i32),
    #[error(
        "process {0}: buffer {1} has a placeholder, and was not handed over: report this fault of the plugin"
    )]
    NotHandedOver(u32, usize),
}

impl StreamerConnection {
    /// Connects to the streamer that listens in CRIU's work directory. Returns none without one: all memory
    /// is loaded before the processes run. That is a warning if some of it `could_wait`.
    pub(super) fn connect_in_work_dir(host: &Host, could_wait: bool) -> Answer<Option<Self>> {
        let Some(channel) = connect(Path::new(SOCKET))? else {
            if could_wait {
                host.warn(format_args!(
                    "no streamer listens on {SOCKET} in CRIU's work directory, {NO_STREAMER}"
                ));
            }
            return Ok(None);
        };
        let streamer = Self::greet(channel)?;
        host.info("a streamer loads memory in the background");
        Ok(Some(streamer))
    }

    fn greet(channel: Channel) -> Result<Self, Error> {
        let streamer = Self { channel, holds_calls: false };
        streamer.send(to_server::What::Hello(proto::Hello { version: VERSION, holds: false }), &[])?;
        match streamer.receive()? {
            to_plugin::What::Hello(hello) => {
                hello.check()?;
                Ok(Self { holds_calls: hello.holds, ..streamer })
            }
            other => Err(unexpected("its version", &other)),
        }
    }

    /// Returns the connection. It is hung up when all processes of the streamer have ended.
    pub(super) fn connection(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }

    /// Returns whether the streamer holds calls that register memory until that memory is resident.
    pub(super) fn holds_calls(&self) -> bool {
        self.holds_calls
    }

    /// Hands over all lazy buffers with their placeholders. The rest stays in `memory` and is loaded now: a
    /// gate stops compute queues, but neither work on render nodes nor processes that have a dma-buf open.
    /// What stays has arrived when this returns, if some of the image is on another host.
    pub(super) fn hand_over(&self, host: &Host, restore: &Restore, memory: &mut [UnloadedBuffers]) -> Answer {
        self.send(to_server::What::Image(proto::Image {}), &[host.image_dir()?])?;
        for buffers in memory.iter_mut() {
            let Some(process) = buffers.process else { continue };
            let (id, image) = &restore.images.kfd[process];
            let mut lazy: Vec<(u32, OwnedFd)> = Vec::new();
            for (buffer, dmabuf) in buffers.dmabufs.iter_mut().enumerate() {
                if restore.lazy_plan.is_lazy(process, buffer)
                    && let Some(dmabuf) = dmabuf.take()
                {
                    lazy.push((u32::try_from(buffer)?, dmabuf));
                }
            }
            let mut gpus = Vec::new();
            let mut files = vec![kfd_file(host, &restore.images, &restore.shared_state, process)?];
            for (node, gpu) in image.nodes.iter().enumerate().filter(|(_, node)| node.properties.gpu_id != 0)
            {
                let minor = restore.assignment.of(&gpu.properties)?.minor;
                gpus.push(proto::Gpu { gpu_id: gpu.properties.gpu_id, minor });
                files.push(host.stored_fd(restore.shared_state.render(process, node))?);
            }
            let files: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.as_fd()).collect();
            self.send(to_server::What::Process(proto::Process { kfd: *id, gpus }), &files)?;
            for part in lazy.chunks(MAX_DESCRIPTORS) {
                let numbers = part.iter().map(|(number, _)| *number).collect();
                let dmabufs: Vec<BorrowedFd<'_>> = part.iter().map(|(_, dmabuf)| dmabuf.as_fd()).collect();
                self.send(to_server::What::Buffers(proto::Buffers { numbers }), &dmabufs)?;
            }
            let placeholders = self.placeholders(host, restore, process, &lazy)?;
            host.info(format_args!(
                "process {}: {} buffers are loaded in the background; {placeholders} mappings are \
                 placeholders until then",
                image.pid,
                lazy.len()
            ));
        }
        memory.iter().try_for_each(|buffers| self.need(buffers))?;
        Ok(self.await_ready(memory.iter().any(|buffers| buffers.may_be_missing))?)
    }

    /// Waits until the streamer has opened all files, and until bytes that are `needed` have arrived.
    fn await_ready(&self, needed: bool) -> Result<(), Error> {
        if needed {
            // A link may be slow. The streamer limits the time in which some bytes must arrive.
            self.channel.remove_timeout()?;
        }
        self.send(to_server::What::Ready(proto::Ready {}), &[])?;
        let ready = self.receive()?;
        self.channel.restore_timeout()?;
        match ready {
            to_plugin::What::Ready(_) => Ok(()),
            other => Err(unexpected("that it is ready", &other)),
        }
    }

    /// Names the bytes that the plugin reads itself, if some of the image may be on another host.
    fn need(&self, buffers: &UnloadedBuffers) -> Answer {
        if !buffers.may_be_missing {
            return Ok(());
        }
        for (file, ranges) in buffers.process().ranges() {
            for part in ranges.chunks(MAX_RANGES) {
                let range =
                    |of: &Range<u64>| proto::ByteRange { offset: of.start, length: of.end - of.start };
                let ranges = part.iter().map(range).collect();
                let needed = proto::Needed { file: file.to_owned(), ranges };
                self.send(to_server::What::Needed(needed), &[])?;
            }
        }
        Ok(())
    }

    /// Hands over the placeholders of a process, and returns their number.
    fn placeholders(
        &self,
        host: &Host,
        restore: &Restore,
        process: usize,
        lazy: &[(u32, OwnedFd)],
    ) -> Answer<usize> {
        let Some((file, uffd)) = restore.shared_state.placeholders(process) else { return Ok(0) };
        let image = &restore.images.kfd[process].1;
        let mut mappings = Vec::new();
        for (number, vma) in restore.lazy_plan.mappings(process).iter().enumerate() {
            let Some((buffer, offset)) = restore.shared_state.placeholder(process, number) else { continue };
            let handed_over = lazy.binary_search_by_key(&u32::try_from(buffer)?, |(number, _)| *number);
            let (Ok(_), MmapOffset::Offset(start)) =
                (handed_over, restore.shared_state.buffer(process, buffer))
            else {
                return Err(HandoffError::NotHandedOver(image.pid, buffer).into());
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
        self.send(to_server::What::Placeholders(proto::Placeholders {}), &[file.as_fd(), uffd.as_fd()])?;
        for part in mappings.chunks(MAX_MAPPINGS) {
            self.send(to_server::What::Mappings(proto::Mappings { mappings: part.to_vec() }), &[])?;
        }
        Ok(mappings.len())
    }

    /// Closes the gate of a stopped task if it computes: its queues stay evicted until the streamer opens the
    /// gate. Only the tracer may call this, before RESUME.
    pub(super) fn gate(&self, host: &Host, images: &Images, state: &SharedState, pid: i32) -> Answer {
        let number = pid_in_image(pid).ok_or(HandoffError::NoNumber(pid))?;
        let Some(process) = images.kfd.iter().position(|(_, image)| image.pid == number) else {
            return Ok(());
        };
        let task = pidfd_open(pid)?;
        criu::process_info(kfd_file(host, images, state, process)?.as_fd())?;
        let kfd = images.kfd[process].0;
        self.send(to_server::What::Started(proto::Started { kfd }), &[task.as_fd()])?;
        Ok(())
    }

    /// Reports that all tasks have closed gates and RESUME: from here on the streamer is responsible for
    /// them.
    pub(super) fn finish(self) -> Answer {
        self.send(to_server::What::Go(proto::Go {}), &[])?;
        match self.receive()? {
            to_plugin::What::Go(_) => Ok(()),
            other => Err(unexpected("that it took over", &other).into()),
        }
    }

    fn send(&self, what: to_server::What, descriptors: &[BorrowedFd<'_>]) -> Result<(), Error> {
        self.channel.send(&proto::ToServer { what: Some(what) }, descriptors)
    }

    fn receive(&self) -> Result<to_plugin::What, Error> {
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

/// Returns a task's pid in its own namespace, which is its pid in the image.
pub(super) fn pid_in_image(pid: i32) -> Option<u32> {
    proc::status(pid)?.own_number.map(i32::cast_unsigned)
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

    use rewake_plugin_protocol::STEP_LIMIT;

    use super::*;

    /// Both ends of a connection: the plugin's has this time limit.
    fn channels(limit: Duration) -> (Channel, Channel) {
        let (kind, flags) = (SockType::SeqPacket, SockFlag::SOCK_CLOEXEC);
        let (plugin, server) = socketpair(AddressFamily::Unix, kind, None, flags).unwrap();
        (Channel::with_timeout(plugin, limit).unwrap(), Channel::new(server).unwrap())
    }

    /// Greets a streamer that sends this answer.
    fn greeted_with(answer: to_plugin::What) -> Result<StreamerConnection, Error> {
        let (plugin, server) = channels(STEP_LIMIT);
        let server = thread::spawn(move || {
            server.receive::<proto::ToServer>().unwrap();
            server.send(&proto::ToPlugin { what: Some(answer) }, &[]).unwrap();
        });
        let greeted = StreamerConnection::greet(plugin);
        server.join().unwrap();
        greeted
    }

    #[test]
    fn a_streamer_reports_whether_it_holds_calls() {
        for holds in [false, true] {
            let hello = to_plugin::What::Hello(proto::Hello { version: VERSION, holds });
            assert_eq!(greeted_with(hello).unwrap().holds_calls(), holds);
        }
    }

    #[test]
    fn a_streamer_of_another_version_is_refused() {
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
    fn only_needed_bytes_may_take_longer_than_the_limit() {
        const LIMIT: Duration = Duration::from_millis(100);
        for needed in [true, false] {
            let (plugin, server) = channels(LIMIT);
            let streamer = StreamerConnection { channel: plugin, holds_calls: false };
            let server = thread::spawn(move || {
                server.receive::<proto::ToServer>().unwrap();
                thread::sleep(3 * LIMIT);
                let ready = to_plugin::What::Ready(proto::Ready {});
                let _ = server.send(&proto::ToPlugin { what: Some(ready) }, &[]);
                server
            });
            let ready = streamer.await_ready(needed);
            let _silent = server.join().unwrap();
            if needed {
                ready.unwrap();
                let next = streamer.receive().unwrap_err();
                assert!(matches!(next, Error::TimedOut(LIMIT)), "{next:?}");
            } else {
                assert!(matches!(ready, Err(Error::TimedOut(LIMIT))), "{ready:?}");
            }
        }
    }

    #[test]
    fn a_refusal_has_the_streamer_s_reason() {
        let refused = to_plugin::What::Refused(proto::Refused { reason: "it is too late".to_owned() });
        assert_eq!(greeted_with(refused).unwrap_err().to_string(), "the server refused: it is too late");
        let error = greeted_with(to_plugin::What::Go(proto::Go {})).unwrap_err().to_string();
        assert!(error.contains("expected its version, found Go"), "{error}");
    }
}
