// SPDX-License-Identifier: MIT OR Apache-2.0
//! Has an image parsed and planned by a confined process, the planner.
//!
//! An image is hostile input: lengths, addresses and links in it may be chosen to make a parser read, write
//! or use what it should not. And the file system below it may hang. So a child of the streamer, `rewake
//! planner`, opens and parses it ([`child`]):
//!
//! 1. It opens the image directory and its parents, and sends their descriptors. It has read no file by then.
//! 2. It confines itself ([`confine`]): limits, Landlock, seccomp. It opens what symbolic links of the
//!    directories lead to before that.
//! 3. It leases the image, parses it and its manifest, and writes the plan into a memory file that the
//!    streamer made. The plan has the checksums of the image's blocks.
//! 4. It sends the descriptors of the pages files and leases.
//!
//! The streamer seals the memory file and reads it like a successor does
//! ([`sealed`](crate::session::image)): it checks every number again. It also checks that every pages file is
//! in one of the directories. A planner that exceeds [`TIME_LIMIT`] is killed.

pub mod child;
mod confine;

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::signal::Signal;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::sys::stat::fstat;
use nix::sys::wait::waitpid;
use nix::unistd::Pid;
use rewake_criu_images::open;
use rewake_plugin_protocol::Channel;
use rewake_process::names::printable;
use rewake_process::proc;
use tokio::sync::oneshot;

use crate::failure::{Failure, FailureCause};
use crate::last_words::LastWords;
use crate::session::image::draft::DraftRemote;
use crate::session::image::remote_memory::RemoteMemory;
use crate::session::image::{Image, LazyMemory, plan_file};
use crate::sys;

pub use self::confine::confine_to_images;

/// The hidden command that is the planner.
pub const COMMAND: &str = "planner";

/// Its option for an image whose lazy pages a page server has.
const REMOTE: &str = "--remote";
/// Its option for an image some of whose blocks an image server has.
const PARTIAL: &str = "--partial";
/// Its option for such an image in the node's cache: other restores use it, too.
const IN_CACHE: &str = "--in-cache";

/// CPU time of a planner, and wall time in which it may use none: its file system does not answer then. A
/// plan of 2^24 extents takes 4 s without optimisation, and longer on a busy machine.
pub const TIME_LIMIT: Duration = Duration::from_secs(20);

/// Address space of a planner.
///
/// An extent takes 64 bytes while its task is planned, 32 of them for its record in the pagemap, and 32 bytes
/// afterwards. A vector that grows may have twice its length. So 2^24 extents take 1 to 2 GiB: that is 1 TiB
/// of memory with a gap in each 64 KiB.
pub const MEMORY: u64 = 4 << 30;

/// Length of a plan: an extent takes 28 bytes, so 2^24 take 448 MiB. The checksums of 1 TiB take 128 MiB.
pub const PLAN: u64 = 1 << 30;

/// Pages files and leases of a plan: each takes a descriptor of the streamer.
const MAX_FILES: usize = 1 << 16;

/// Time that a planner has to exit when its work is done.
const EXIT_LIMIT: Duration = Duration::from_millis(100);

/// The steps of a planner, each with descriptors.
mod step {
    /// The directories were opened.
    pub(super) const DIRECTORIES: u32 = 1;
    /// Some pages files, then leases; more follow.
    pub(super) const FILES: u32 = 2;
    /// The plan is written.
    pub(super) const DONE: u32 = 3;
    /// The image cannot be served.
    pub(super) const REFUSED: u32 = 4;
    /// The image cannot be served, because it is damaged.
    pub(super) const DAMAGED: u32 = 5;
}

/// A message of the planner.
#[derive(Clone, PartialEq, Eq, prost::Message)]
struct PlannerReport {
    /// What it has done: one of [`step`].
    #[prost(uint32, tag = "1")]
    step: u32,
    /// Why the image cannot be served. With a plan: why CRIU cannot restore it lazily on this machine, or
    /// empty.
    #[prost(string, tag = "2")]
    reason: String,
}

/// Plans the restore of an image. If a page server has its lazy pages, it makes the cache file for them.
///
/// # Errors
/// The image cannot be served, or the planner exceeded a limit; or there is no space for the cache file.
pub fn plan(images: &Path, memory: &LazyMemory, signers: &[PathBuf]) -> anyhow::Result<Image> {
    match memory {
        LazyMemory::Here => Planner::start(images, &[], signers)?
            .finish(|_| bail!("a plan with memory of another host, without one")),
        LazyMemory::OnPageServer(work) => {
            Planner::start(images, &[REMOTE], signers)?.finish(|draft| RemoteMemory::create(work, draft))
        }
        LazyMemory::OnImageServer => {
            let image = Planner::start(images, &[PARTIAL], signers)?
                .finish(|draft| RemoteMemory::create(images, draft))?;
            image.note_arrived().context("looking for what has arrived")?;
            Ok(image)
        }
        LazyMemory::ForCache => {
            let image = Planner::start(images, &[IN_CACHE], signers)?
                .finish(|draft| RemoteMemory::create(images, draft))?;
            image.note_arrived().context("looking for what has arrived")?;
            Ok(image)
        }
        LazyMemory::InCache(presence) => Planner::start(images, &[IN_CACHE], signers)?
            .finish(|draft| RemoteMemory::inherit(presence.try_clone()?, None, draft)),
    }
}

/// Has an image checked and planned by a confined process. It blocks, up to the planner's time limit.
///
/// # Errors
/// Fails when a file is missing, damaged or truncated, or when the image lacks pages; also when the
/// planner exceeds a limit.
pub fn open(path: &Path, signers: &[PathBuf]) -> anyhow::Result<Image> {
    plan(path, &LazyMemory::Here, signers)
}

/// [`plan`] for the control thread, which serves other requests in the time.
///
/// # Errors
/// As for [`plan`].
pub async fn open_in_background(
    path: PathBuf,
    memory: LazyMemory,
    signers: Vec<PathBuf>,
) -> anyhow::Result<Image> {
    let (sender, opened) = oneshot::channel();
    let plan = move || plan(&path, &memory, &signers);
    // A receiver that has ended was asked to stop.
    let open = move || drop(sender.send(plan()));
    sys::thread_without_signals("planner", open).context("starting a thread")?;
    opened.await.context("the thread that plans the restore has ended")?
}

/// A planner that runs.
#[derive(Debug)]
struct Planner<'a> {
    images: &'a Path,
    child: Child,
    channel: Channel,
    /// Where it writes the plan.
    plan: File,
    /// What a panic or the allocator says.
    words: LastWords,
    deadline: Instant,
    /// CPU time that it had used when the deadline was set, in clock ticks.
    used: u64,
}

impl<'a> Planner<'a> {
    fn start(images: &'a Path, options: &[&str], signers: &[PathBuf]) -> anyhow::Result<Self> {
        let (ours, its) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
            .context("making a socket for the planner")?;
        let made = plan_file::memory_file().and_then(|plan| Ok((plan, LastWords::new()?)));
        let (plan, words) = made.context("making memory files for the planner")?;
        let mut command = Command::new(sys::program()?);
        command
            .arg(COMMAND)
            .args(options)
            .args(signers.iter().flat_map(|file| [OsStr::new("--signers"), file.as_os_str()]));
        command.arg(images).env_clear();
        command.stdin(Stdio::from(its)).stdout(plan.try_clone()?).stderr(words.writer()?);
        let deadline = Instant::now() + TIME_LIMIT;
        let child = command.spawn().context("starting the planner")?;
        let channel = Channel::with_timeout(ours, TIME_LIMIT)?;
        Ok(Self { images, child, channel, plan, words, deadline, used: 0 })
    }

    fn finish(
        mut self,
        remote: impl FnOnce(DraftRemote) -> anyhow::Result<RemoteMemory>,
    ) -> anyhow::Result<Image> {
        let (directories, files, reason) = self.receive_all()?;
        plan_file::seal(&self.plan).context("sealing the planner's plan")?;
        let image = Image::unseal_with(self.plan.as_fd(), files, remote)?;
        check_places(&image, &directories).context("checking the planner's plan")?;
        Ok(image.that_is_not_lazy(printable(reason.trim().as_bytes())))
    }

    /// Receives the descriptors of the directories and of the pages files, and why CRIU cannot restore the
    /// image lazily.
    fn receive_all(&mut self) -> anyhow::Result<(Vec<OwnedFd>, Vec<OwnedFd>, String)> {
        let (mut directories, mut files) = (Vec::new(), Vec::new());
        loop {
            let (report, descriptors) = self.receive()?;
            match report.step {
                step::DIRECTORIES if directories.is_empty() => directories = descriptors,
                step::FILES if files.len() < MAX_FILES => files.extend(descriptors),
                step::DONE => return Ok((directories, files, report.reason)),
                step::REFUSED | step::DAMAGED => {
                    let is_damaged = report.step == step::DAMAGED;
                    let cause = if is_damaged { FailureCause::DamagedImage } else { FailureCause::Other };
                    return Err(Failure { cause, reason: printable(report.reason.trim().as_bytes()) }.into());
                }
                other => bail!("{}: unexpected report {other} of the planner", self.images.display()),
            }
        }
    }

    fn receive(&mut self) -> anyhow::Result<(PlannerReport, Vec<OwnedFd>)> {
        self.wait()?;
        match self.channel.receive() {
            Err(rewake_plugin_protocol::Error::Closed) => bail!("{}", self.last_words()),
            received => received.with_context(|| format!("{}: the planner's report", self.images.display())),
        }
    }

    /// Waits for a report, or the planner's end.
    fn wait(&mut self) -> anyhow::Result<()> {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            let limit = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
            match poll(&mut [PollFd::new(self.channel.as_fd(), PollFlags::POLLIN)], limit) {
                Ok(0) if left.is_zero() && self.has_worked() => self.deadline = Instant::now() + TIME_LIMIT,
                Ok(0) if left.is_zero() => bail!(
                    "{}: the planner of this image did nothing for {} s, and was killed: does the file \
                     system answer?",
                    self.images.display(),
                    TIME_LIMIT.as_secs()
                ),
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => return Ok(()),
                Err(errno) => return Err(errno).context("waiting for the planner"),
            }
        }
    }

    /// Returns whether the planner has used CPU time since this was asked last.
    fn has_worked(&mut self) -> bool {
        let used = proc::cpu_ticks(self.child.id().cast_signed());
        used.is_some_and(|used| used > std::mem::replace(&mut self.used, used))
    }

    /// Returns why the planner ended without a plan.
    fn last_words(&mut self) -> String {
        let ended = self.ends_within(EXIT_LIMIT).then(|| self.child.wait().ok()).flatten();
        let how = match ended.map(|status| (status.signal(), status.code())) {
            Some((Some(signal), _)) => {
                let name = Signal::try_from(signal).map_or_else(|_| signal.to_string(), |it| it.to_string());
                format!("was killed by {name}")
            }
            Some((None, Some(code))) => format!("exited with {code}"),
            _ => "closed its socket".to_owned(),
        };
        format!(
            "{}: the planner of this restore {how}{} (its limits: {} MiB of memory, {} MiB of plan, {} s): \
             is the image damaged? If another program killed it, restore again",
            self.images.display(),
            self.words.take(),
            own_limit(Resource::RLIMIT_AS, MEMORY) >> 20,
            own_limit(Resource::RLIMIT_FSIZE, PLAN) >> 20,
            TIME_LIMIT.as_secs()
        )
    }

    fn ends_within(&self, limit: Duration) -> bool {
        let pidfd = sys::pidfd_open(self.child.id().cast_signed());
        pidfd.is_ok_and(|pidfd| sys::ends_within(pidfd.as_raw_fd(), limit))
    }
}

impl Drop for Planner<'_> {
    /// Ends the planner. One that waits for a dead file system may end much later: a thread waits for that.
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        if self.ends_within(EXIT_LIMIT) {
            let _ = self.child.wait();
            return;
        }
        let id = self.child.id().cast_signed();
        // Without a thread it stays a zombie until this process ends.
        let _ = sys::thread_without_signals("planner's end", move || {
            let _ = waitpid(Pid::from_raw(id), None);
        });
    }
}

/// Checks that the planner planned the directory that it opened, and that every pages file is a regular file
/// in that directory or a parent, or that a link there leads to it.
pub(crate) fn check_places(image: &Image, directories: &[OwnedFd]) -> anyhow::Result<()> {
    let opened = directories.first().context("no directory was opened")?;
    let opened = fstat(opened).context("stat of the image directory")?;
    ensure!((opened.st_dev, opened.st_ino) == image.directory(), "it is not of the image directory");
    for file in image.files() {
        let name = file.name().file_name().context("a pages file without a name")?;
        let is_in = |directory: &OwnedFd| {
            let found = open::find(directory, name).ok().flatten();
            found.is_some_and(|found| {
                found.is_regular()
                    && (found.stat.st_dev, found.stat.st_ino) == (file.key().dev, file.key().ino)
            })
        };
        ensure!(directories.iter().any(is_in), "{} is not a file of the image", file.name().display());
    }
    Ok(())
}

/// The limit of a planner: it inherits a lower one of this process.
fn own_limit(resource: Resource, value: u64) -> u64 {
    getrlimit(resource).map_or(value, |(_, most)| most.min(value))
}

/// Why a planner cannot be confined.
fn failed(act: &str, error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::other(format!("{act}: {error}"))
}
