// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sessions with memory of GPUs. A `rewake stream-gpu` serves each, in processes of its own, so that what happens to one is no other's, nor this
//! daemon's; here it is started, listened to, and looked at.

use std::cell::{Cell, RefCell};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Child;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use nix::sys::socket::{MsgFlags, recv, setsockopt, sockopt};
use tokio::io::unix::AsyncFd;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tracing::warn;

use super::client::Client;
use super::proto::{self, State};
use super::registry::nanos;
use super::status_server::{picture, socket};
use rewake_streamer::ledger::{NO_FD, SessionSlot, SessionState};
use rewake_streamer::record::files;
use rewake_streamer::supervise::launch::{self, RestoreOutcome, StatusFlags};
use rewake_streamer::sys;

/// What it logs, in the work directory.
const LOG: &str = "rewake-stream-gpu.log";
/// Between two looks how far it is.
const LOOK: Duration = Duration::from_millis(500);
/// For a streamer to begin, and to answer, on a machine that has much else to do. A client waits longer: [`super::OPEN_LIMIT`].
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
/// Room for the words of as many processes as a restore may have, while nobody listens: each takes the kernel about a kilobyte.
const WORDS: usize = 4 << 20;

/// One of them.
#[derive(Debug)]
pub(super) struct StreamerSession {
    slot: &'static SessionSlot,
    since: Instant,
    /// Its `--status-fd`.
    words: AsyncFd<OwnedFd>,
    /// None of one that a worker started which died.
    child: RefCell<Option<Child>>,
    /// When all of one kind of memory was there, of both the later.
    there: Cell<Option<Duration>>,
    /// How far it was when it was looked at, and when its own time began.
    seen: RefCell<(Duration, proto::Streaming)>,
}

impl StreamerSession {
    /// Starts one for a slot that was taken. With `pages` it brings memory of CPUs, too, with `record` it records what they touch. It listens
    /// when this returns.
    ///
    /// # Errors
    /// It cannot be started, or refused: with its own words.
    pub(super) async fn start(slot: &'static SessionSlot, pages: bool, record: bool) -> anyhow::Result<Self> {
        let (ours, theirs) = UnixStream::pair().context("making a socket")?;
        ours.set_nonblocking(true).context("making a socket")?;
        // With less of it, too.
        let _ = setsockopt(&theirs, sockopt::SndBufForce, &WORDS);
        let stream = Self::of(slot, ours.into())?;
        slot.pages.store(pages.into(), Ordering::Relaxed);
        slot.connection.store(stream.words.as_raw_fd(), Ordering::Release);
        // From here on a successor takes it up, or finds that it has ended.
        slot.set_state(SessionState::Streaming);
        if let Err(error) = stream.begin(theirs, record).await {
            stream.ask_to_end();
            stream.close();
            return Err(error.context("starting rewake stream-gpu"));
        }
        Ok(stream)
    }

    async fn begin(&self, theirs: UnixStream, record: bool) -> anyhow::Result<()> {
        let (images, work) = self.slot.paths();
        let pages = self.brings_pages();
        let log = work.join(LOG);
        let errors = File::create(&log).with_context(|| format!("making {}", log.display()))?;
        let mut command = launch::command(&work, pages.then_some(images.as_path()), record)?;
        command.stdout(OwnedFd::from(theirs)).stderr(errors);
        sys::leave_descriptors(&mut command);
        let child = command.spawn()?;
        // It has the other end of the socket.
        drop(command);
        self.slot.streamer.store(child.id().cast_signed(), Ordering::Release);
        self.child.replace(Some(child));
        let ready = async {
            while !self.said().is_ready() {
                if !self.hear().await? {
                    self.exit_code();
                    bail!("{}", last_words(&work).unwrap_or_else(|| "it said nothing".to_owned()));
                }
            }
            Ok(())
        };
        timeout(ANSWER_LIMIT, ready).await.context("it does not begin").flatten()
    }

    /// Takes up one that a worker started which died.
    ///
    /// # Errors
    /// It cannot be listened to.
    pub(super) fn inherit(slot: &'static SessionSlot) -> anyhow::Result<Self> {
        let number = slot.connection.load(Ordering::Acquire);
        ensure!(number != NO_FD, "the connection with rewake stream-gpu is lost");
        // SAFETY: the dead worker left it open in the shared table for us; the ledger names it once.
        let stream = Self::of(slot, unsafe { sys::take_over(number) })?;
        // When exactly nobody knows any more.
        stream.there.set(stream.said().any_there().then_some(Duration::ZERO));
        Ok(stream)
    }

    fn of(slot: &'static SessionSlot, words: OwnedFd) -> anyhow::Result<Self> {
        Ok(Self {
            slot,
            since: Instant::now(),
            words: sys::watch(words).context("listening to rewake stream-gpu")?,
            child: RefCell::default(),
            there: Cell::default(),
            seen: RefCell::default(),
        })
    }

    /// Follows it to its end: whether there was something to bring. `limit`: when no restore has come by then, none is waited for.
    ///
    /// # Errors
    /// Why it is no good end.
    pub(super) async fn run(&self, limit: Duration) -> Result<bool, String> {
        let looks = async { tokio::join!(self.look_often(), self.end_unless_met(limit)) };
        tokio::select! {
            ended = self.hear_all() => ended,
            _ = looks => Ok(false),
        }
    }

    async fn hear_all(&self) -> Result<bool, String> {
        loop {
            match self.hear().await {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => return Err(format!("listening to rewake stream-gpu: {error}")),
            }
        }
        let code = self.exit_code();
        let (_, work) = self.slot.paths();
        if let Ok(Some(record)) = files::read(&work) {
            self.saw(picture(&record));
        }
        let (said, words) = (self.said(), last_words(&work));
        let fate = said.fate(self.brings_pages(), code);
        Err(match (fate.reason(), words) {
            (None, _) => return Ok(fate == RestoreOutcome::Open),
            (Some(_), None) if !said.any_ran() => {
                "ended before a restore had handed anything over".to_owned()
            }
            // It has said it all.
            (Some(_), Some(words)) if !said.any_ran() => words,
            (Some(reason), Some(words)) => format!("{reason}: {words}"),
            (Some(reason), None) => reason.to_owned(),
        })
    }

    /// Its last process has let go of the socket, so that this is no wait.
    fn exit_code(&self) -> Option<i32> {
        self.child.take()?.wait().ok()?.code()
    }

    /// Takes what it has said; false when nobody is left to say more. A word is noted before it is taken: a worker that dies between
    /// leaves it for its successor.
    async fn hear(&self) -> io::Result<bool> {
        loop {
            let mut ready = self.words.readable().await?;
            let mut bytes = [0; 64];
            let number = self.words.as_raw_fd();
            match recv(number, &mut bytes, MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT) {
                Err(nix::Error::EAGAIN) => ready.clear_ready(),
                Err(error) => return Err(error.into()),
                Ok(0) => return Ok(false),
                Ok(count) => {
                    let mut said = self.said();
                    // No `any`: all are heard.
                    if bytes[..count].iter().filter(|byte| said.hear(**byte)).count() > 0 {
                        self.there.set(Some(self.since.elapsed()));
                    }
                    self.slot.said.store(said.bits(), Ordering::Release);
                    recv(number, &mut bytes[..count], MsgFlags::MSG_DONTWAIT)?;
                    return Ok(true);
                }
            }
        }
    }

    /// Never returns.
    async fn look_often(&self) {
        let (_, work) = self.slot.paths();
        let mut looks = interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            looks.tick().await;
            let asked = async { Client::connect(&socket(&work)).await?.streaming().await };
            // One that does not answer now will, or has ended.
            if let Ok(Ok(seen)) = timeout(ANSWER_LIMIT, asked).await {
                self.saw(seen);
            }
        }
    }

    fn saw(&self, seen: proto::Streaming) {
        let began = self.since.elapsed().saturating_sub(Duration::from_micros(seen.elapsed_us));
        self.seen.replace((began, seen));
    }

    /// Never returns. Of a restore that never comes nobody else would end it.
    async fn end_unless_met(&self, limit: Duration) {
        sleep(limit).await;
        if !self.is_met() {
            warn!(
                session = self.slot.number(),
                "no `criu restore` has come within {} s",
                limit.as_secs_f32()
            );
            self.ask_to_end();
        }
        std::future::pending::<()>().await;
    }

    fn is_met(&self) -> bool {
        launch::is_met(&self.slot.paths().1)
    }

    /// No other restore will come for it.
    pub(super) fn ask_to_end(&self) {
        let group = self.slot.streamer.load(Ordering::Acquire);
        // While the connection is open one of its processes lives, and the number is its group's.
        if group > 0 && !sys::has_hung_up(self.slot.connection.load(Ordering::Acquire)) {
            launch::ask_to_end(group);
        }
    }

    /// Whether CRIU is to be called with `--lazy-pages`.
    pub(super) fn brings_pages(&self) -> bool {
        self.slot.pages.load(Ordering::Relaxed) == 1
    }

    fn said(&self) -> StatusFlags {
        StatusFlags::from_bits(self.slot.said.load(Ordering::Acquire))
    }

    /// Frees its slot, before its socket is closed: a successor must not take what has that number by then for it.
    pub(super) fn close(&self) {
        self.slot.set_state(SessionState::Free);
    }

    /// As a session is told: pages for its bytes of both kinds.
    pub(super) fn report(&self) -> proto::Session {
        let (images, work) = self.slot.paths();
        let (began, seen) = &*self.seen.borrow();
        let parts =
            || seen.processes.iter().flat_map(|process| process.memory.iter().chain(&process.of_cpus));
        let pages = |bytes: u64| bytes.div_ceil(rewake_uffd::PAGE_SIZE);
        let state = match seen.state() {
            State::Unknown | State::Listening if self.is_met() => State::Restoring,
            State::Unknown => State::Listening,
            state => state,
        };
        let ran = seen.processes.iter().map(|process| process.runs_us).filter(|at| *at > 0).min();
        proto::Session {
            session: self.slot.number(),
            images_dir: images.as_os_str().as_bytes().to_vec(),
            work_dir: work.as_os_str().as_bytes().to_vec(),
            state: state as i32,
            elapsed_ns: nanos(self.since.elapsed()),
            running_ns: ran.map_or(0, |ran| nanos(*began + Duration::from_micros(ran))),
            tasks: u32::try_from(seen.processes.len()).unwrap_or(u32::MAX),
            pages_total: pages(parts().map(|part| part.bytes).sum()),
            pages_copied: pages(parts().map(|part| part.resident).sum()),
            faults: seen.processes.iter().map(|process| process.faults + process.page_faults).sum(),
            gpus: true,
            // What was at 0 is told as at 1: 0 is not yet.
            there_ns: self.there.get().map_or(0, |there| nanos(there).max(1)),
            ..Default::default()
        }
    }
}

/// What it complained of last.
fn last_words(work: &Path) -> Option<String> {
    let log = fs::read_to_string(work.join(LOG)).ok()?;
    let lines = || log.lines().rev().map(str::trim).filter(|line| !line.is_empty());
    let complaint =
        |line: &str| ["ERROR ", "rewake: "].iter().find_map(|mark| Some(line.strip_prefix(mark)?.to_owned()));
    let complaint = lines().find_map(complaint);
    complaint.or_else(|| lines().next().map(str::to_owned))
}
