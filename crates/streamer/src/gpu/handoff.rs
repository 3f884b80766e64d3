// SPDX-License-Identifier: MIT OR Apache-2.0
//! Receives what the plugin hands over: `proto/handover.proto`.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};
use rewake_amdgpu_uapi::Kfd;
use rewake_amdgpu_uapi::topology::Topology;
use rewake_bo_contents::{GpuPagesFile, ProcessBuffers, find_duplicates};
use rewake_criu_images::amdgpu::{KfdImage, kfd_name, pages_name};
use rewake_criu_images::{ImageDir, ImageLease};
use rewake_image_io::io_budget::{BackgroundHold, IoBudget};
use rewake_ioctl_filter::BlockList;
use rewake_manifest::{ImageChecksums, WORKING_SET_NAME, read_checksums};
use rewake_plugin_protocol::proto::{self, to_plugin, to_server};
use rewake_plugin_protocol::{Channel, Error, Listener, VERSION};
use tracing::{info, warn};

use super::blocked_calls::BlockedCalls;
use super::fetched_files::{FetchedGpuFiles, SessionGpuFiles};
use super::gate::Gate;
use super::placeholder_range::PlaceholderBuffer;
use super::placeholders::{Placeholders, ReceivedPlaceholders};
use super::queue_monitor::QueueMonitor;
use crate::ledger::Ledger;
use crate::working_set::file::{self, AddedToFile, REMEDY};
use crate::working_set::{BufferId, WorkingSet};

/// The name of the image directory in messages: it arrives as a descriptor without a path.
const FOLDER: &str = "the image directory";

/// The most ranges of bytes that the plugin needs. Adjacent buffers are one range, and the memory of all
/// ranges takes 3 MiB.
const MAX_NEEDED: usize = 1 << 16;

/// A restore that the plugin has handed over.
#[derive(Debug)]
pub(super) struct Handoff {
    channel: Channel,
    /// The image directory.
    images: Option<OwnedFd>,
    /// A dump that replaces the image keeps its files for that long.
    lease: Option<ImageLease>,
    processes: Vec<GpuProcess>,
    /// Sets of buffers with the same bytes, if the image is sealed: processes and the image's numbers of the
    /// buffers.
    pub(super) duplicates: Vec<Vec<(usize, usize)>>,
    /// Monitors the queues from before the gates are closed; `None` where the driver sends no events.
    pub(super) monitor: Option<QueueMonitor>,
    /// Holds background reads of CPU memory from the plugin's first message until the processes run.
    pub(super) hold: Option<BackgroundHold>,
}

/// A process that uses GPUs.
#[derive(Debug)]
struct GpuProcess {
    /// N of its `amdgpu-kfd-N.img`.
    id: u32,
    image: KfdImage,
    kfd: OwnedFd,
    /// The GPUs: names in the image, and N of `/dev/dri/renderDN`.
    gpus: Vec<(u32, u32)>,
    /// The process's own render node files, by the GPUs' names in the image.
    renders: Vec<(u32, OwnedFd)>,
    files: Vec<GpuPagesFile>,
    /// The dmabufs of the buffers to load, by the image's number of the buffer.
    dmabufs: Vec<Option<OwnedFd>>,
    placeholders: Option<ReceivedPlaceholders>,
}

/// A restored process whose gate is closed.
#[derive(Debug)]
pub(super) struct StartedProcess<'a> {
    pub(super) gate: Gate<'a>,
    /// The placeholders, if its CPUs have mapped buffers that are to be loaded.
    pub(super) placeholders: Option<Placeholders<'a>>,
}

/// Receives what the plugin hands over, and opens all files: the restore is refused while no process runs
/// yet. Returns `None` if the listener is closed before. `holds` is the I/O budget of CPU memory, where
/// calls that register it can be held. `images` is the image directory of the CPU memory, if this streamer
/// serves it, and the files of GPU memory there that a fetcher writes.
pub(super) fn accept(
    listener: &Listener,
    holds: Option<&Arc<IoBudget>>,
    images: (Option<&ImageDir>, &SessionGpuFiles),
) -> anyhow::Result<Option<Handoff>> {
    loop {
        let Some(channel) = listener.accept()? else { return Ok(None) };
        let mut handoff = Handoff {
            channel,
            images: None,
            lease: None,
            processes: Vec::new(),
            duplicates: Vec::new(),
            monitor: None,
            hold: None,
        };
        // A peer only checked whether a streamer listens.
        let first = match handoff.receive() {
            Err(Error::Closed) => continue,
            first => first.map_err(anyhow::Error::from),
        };
        // Another plugin finds no listener and loads everything itself.
        listener.close();
        match first.and_then(|(what, _)| handoff.collect(&what, holds, images)) {
            Ok(()) => return Ok(Some(handoff)),
            Err(error) => {
                // The plugin writes the reason to CRIU's log, unless it has ended.
                let reason = format!("{error:#}");
                let _ = handoff.send_to_plugin(to_plugin::What::Refused(proto::Refused { reason }));
                return Err(error);
            }
        }
    }
}

impl Handoff {
    fn collect(
        &mut self,
        first: &to_server::What,
        holds: Option<&Arc<IoBudget>>,
        (images, fetched): (Option<&ImageDir>, &SessionGpuFiles),
    ) -> anyhow::Result<()> {
        let to_server::What::Hello(hello) = first else { bail!(unexpected("Hello", first)) };
        hello.check()?;
        self.hold = holds.map(IoBudget::hold_background);
        self.send_to_plugin(to_plugin::What::Hello(proto::Hello {
            version: VERSION,
            holds: holds.is_some(),
        }))?;
        // No timeout: CRIU restores all tasks meanwhile.
        self.channel.remove_timeout()?;
        // Opening `/dev/kfd` blocks while the driver tears down an ended process; here no process waits for
        // it.
        let driver = Kfd::open().map_err(anyhow::Error::from);
        let (mut sealed, mut needed, mut ranges) = (None, Vec::new(), 0);
        loop {
            let (what, mut with) = self.receive()?;
            match what {
                to_server::What::Image(_) => {
                    self.images = with.pop();
                    check_image(self.images.as_ref(), images)?;
                    sealed = self.open_image(fetched.get())?;
                }
                to_server::What::Process(process) => {
                    let folder = self
                        .images
                        .as_ref()
                        .context("the plugin sent a process before its image directory")?;
                    self.processes.push(GpuProcess::open(
                        folder,
                        &process,
                        with,
                        sealed.as_ref(),
                        fetched.get(),
                    )?);
                }
                to_server::What::Buffers(buffers) => self.last()?.take(&buffers, with)?,
                to_server::What::Placeholders(_) => {
                    self.last()?.placeholders = Some(ReceivedPlaceholders::new(with)?);
                }
                to_server::What::Mappings(mappings) => {
                    let placeholders = self.last()?.placeholders.as_mut();
                    placeholders
                        .context("the plugin sent mappings before their placeholders")?
                        .add(mappings)?;
                }
                to_server::What::Needed(bytes) => {
                    // A message without a range counts, too.
                    ranges += bytes.ranges.len().max(1);
                    ensure!(ranges <= MAX_NEEDED, "MAX_NEEDED = {MAX_NEEDED} ranges of needed bytes");
                    needed.push(bytes);
                }
                to_server::What::Ready(_) => {
                    fetched.get().map_or(Ok(()), |fetched| fetched.wait_for(&needed))?;
                    let processes: Vec<ProcessBuffers<'_>> = self.processes().collect();
                    self.duplicates =
                        sealed.as_ref().map_or_else(Vec::new, |sealed| find_duplicates(&processes, sealed));
                    let minors = self.processes.iter().flat_map(GpuProcess::minors);
                    let monitor = driver.and_then(|kfd| QueueMonitor::new(&kfd, minors));
                    match monitor {
                        Ok(monitor) => self.monitor = Some(monitor),
                        Err(error) => warn!("no log will show whether queues run: {error:#}"),
                    }
                    return Ok(self.send_to_plugin(to_plugin::What::Ready(proto::Ready {}))?);
                }
                other => bail!(unexpected("what is to be loaded", &other)),
            }
        }
    }

    /// Leases the image, and reads the checksums of its memory.
    fn open_image(&mut self, fetched: Option<&FetchedGpuFiles>) -> anyhow::Result<Option<ImageChecksums>> {
        let Some(folder) = &self.images else { return Ok(None) };
        let images = ImageDir::of(folder.try_clone()?, path_of(folder))?;
        expect_fetcher(&images, fetched)?;
        self.lease = ImageLease::of(&images)?;
        Ok(read_checksums(&images)?)
    }

    fn last(&mut self) -> anyhow::Result<&mut GpuProcess> {
        self.processes.last_mut().context("the plugin sent data of a process before the process")
    }

    /// Waits until all processes are stopped with closed gates, and becomes responsible for them. Returns
    /// them in the order of [`Handoff::processes`].
    pub(super) fn go(
        &self,
        ledger: Ledger,
        marks: Option<&BlockList>,
    ) -> anyhow::Result<Vec<StartedProcess<'_>>> {
        let gated = self.all_started(ledger).inspect_err(|error| {
            let reason = format!("{error:#}");
            let _ = self.send_to_plugin(to_plugin::What::Refused(proto::Refused { reason }));
        });
        let mut gated = gated?;
        if let Some(marks) = marks
            && let Err(error) = self.block_calls(marks, &mut gated)
        {
            for gated in &mut gated {
                gated.gate.blocked_calls = None;
            }
            warn!(
                "calls cannot be blocked, so gates are opened together, and missing memory can be exported \
                 or accessed by mprotect: {error:#}"
            );
        }
        if let Err(error) = self.send_to_plugin(to_plugin::What::Go(proto::Go {})) {
            // The processes must end before they can export missing memory.
            ledger.gates().end_all();
            return Err(error.into());
        }
        Ok(gated)
    }

    /// Blocks calls while no process runs: none can export missing memory.
    fn block_calls<'a>(&'a self, marks: &BlockList, gated: &mut [StartedProcess<'a>]) -> anyhow::Result<()> {
        let machine = Topology::read()?;
        let own = |minor: u32| machine.gpus().find(|gpu| gpu.render_minor() == minor).map(|gpu| gpu.gpu_id);
        for (GpuProcess { gpus, renders, .. }, gated) in self.processes.iter().zip(gated) {
            // The process names a GPU as in the image, and the driver looks up some calls' buffers by its own
            // id.
            let names = gpus.iter().flat_map(|(name, minor)| own(*minor).into_iter().chain([*name]));
            let kfd = gated.gate.kfd;
            gated.gate.blocked_calls = Some(BlockedCalls::new(marks, kfd, names.collect(), renders)?);
        }
        Ok(())
    }

    fn all_started(&self, ledger: Ledger) -> anyhow::Result<Vec<StartedProcess<'_>>> {
        let mut started: BTreeMap<usize, StartedProcess<'_>> = BTreeMap::new();
        loop {
            let (what, mut with) = self.receive()?;
            match what {
                to_server::What::Started(process) => {
                    let announced = self.place(process.kfd);
                    let place = announced.filter(|place| !started.contains_key(place));
                    let place = place
                        .with_context(|| format!("{} was not announced, or twice", kfd_name(process.kfd)))?;
                    let pidfd = with.pop().context("the plugin sent a process without its descriptor")?;
                    started.insert(place, self.processes[place].started(place, pidfd, ledger)?);
                }
                to_server::What::Go(_) => break,
                other => bail!(unexpected("Go", &other)),
            }
        }
        if let Some(place) = (0..self.processes.len()).find(|place| !started.contains_key(place)) {
            bail!("{}: its process was announced, and did not start", kfd_name(self.processes[place].id));
        }
        Ok(started.into_values().collect())
    }

    /// Returns the index of a process, by the image's number.
    fn place(&self, kfd: u32) -> Option<usize> {
        self.processes.iter().position(|process| process.id == kfd)
    }

    /// Returns the files and buffers of all processes.
    pub(super) fn processes(&self) -> impl Iterator<Item = ProcessBuffers<'_>> {
        self.processes.iter().map(|of| ProcessBuffers { files: &of.files, dmabufs: &of.dmabufs })
    }

    /// Returns the working set that an earlier restore recorded, if any.
    pub(super) fn recorded(&self) -> Vec<(usize, usize)> {
        let read = || -> anyhow::Result<Option<WorkingSet>> {
            self.image_dir()?.map_or(Ok(None), |images| file::of_image(&images))
        };
        let recorded = read().unwrap_or_else(|error| {
            warn!("{WORKING_SET_NAME} is not used: {error:#}: {REMEDY}");
            None
        });
        let buffers = recorded.unwrap_or_default().buffers;
        if !buffers.is_empty() {
            info!("{WORKING_SET_NAME}: buffers that are loaded first: {}", buffers.len());
        }
        // The load ignores buffers that the image does not have.
        buffers.iter().filter_map(|of| Some((self.place(of.kfd)?, of.buffer))).collect()
    }

    /// The image directory, to read and write files of Rewake's own.
    fn image_dir(&self) -> anyhow::Result<Option<ImageDir>> {
        let open = |folder: &OwnedFd| Ok(ImageDir::of(folder.try_clone()?, path_of(folder))?);
        self.images.as_ref().map(open).transpose()
    }

    /// Records the working set for later restores. A failure is logged only: this restore has succeeded.
    pub(super) fn record(&self, accessed: &[(usize, usize)]) {
        let accessed = accessed
            .iter()
            .map(|(place, buffer)| BufferId { kfd: self.processes[*place].id, buffer: *buffer });
        let accessed = WorkingSet { pages: Vec::new(), buffers: accessed.collect() };
        let count = accessed.buffers.len();
        if count == 0 {
            info!("{WORKING_SET_NAME}: no buffers are recorded, as CPUs accessed none that was missing");
            return;
        }
        let written = self.image_dir().and_then(|images| {
            let add = |images: ImageDir| file::add(images.as_fd(), images.dump_id()?, accessed);
            images.map_or_else(|| Ok(AddedToFile::default()), add)
        });
        match written {
            Ok(added) => {
                let added = added.buffers;
                info!("{WORKING_SET_NAME}: added {added} of {count} buffers that CPUs accessed");
            }
            Err(error) => warn!("the working set of GPU memory is not recorded: {error:#}"),
        }
    }

    fn send_to_plugin(&self, what: to_plugin::What) -> Result<(), Error> {
        self.channel.send(&proto::ToPlugin { what: Some(what) }, &[])
    }

    fn receive(&self) -> Result<(to_server::What, Vec<OwnedFd>), Error> {
        let (message, with) = self.channel.receive::<proto::ToServer>()?;
        let what = message.what;
        let what =
            what.ok_or_else(|| Error::Malformed { expected: "a message", found: "an empty one".to_owned() })?;
        Ok((what, with))
    }
}

impl GpuProcess {
    fn open(
        folder: &OwnedFd,
        process: &proto::Process,
        with: Vec<OwnedFd>,
        sealed: Option<&ImageChecksums>,
        fetched: Option<&FetchedGpuFiles>,
    ) -> anyhow::Result<Self> {
        let images = ImageDir::of(folder.try_clone()?, Path::new(FOLDER))?;
        let image = images.kfd(process.kfd)?;
        let image = image.with_context(|| format!("{} is not in {FOLDER}", kfd_name(process.kfd)))?;
        let mut files = Vec::new();
        for gpu in &process.gpus {
            let name = pages_name(process.kfd, gpu.gpu_id);
            if let Some(file) = fetched.and_then(|fetched| fetched.file(&name)) {
                files.push(GpuPagesFile::arriving(file, &image, gpu.gpu_id, gpu.minor)?);
                continue;
            }
            let file = GpuPagesFile::open(folder.as_fd(), process.kfd, &image, gpu.gpu_id, gpu.minor)?;
            sealed.map_or(Ok(()), |sealed| file.verify_with(sealed))?;
            files.push(file);
        }
        let dmabufs = (0..image.buffers.len()).map(|_| None).collect();
        let (count, wanted) = (with.len(), process.gpus.len() + 1);
        ensure!(count == wanted, "the plugin sent a process with {count} descriptors, not {wanted}");
        let mut with = with.into_iter();
        let kfd = with.next().context("the plugin sent a process without its /dev/kfd")?;
        let renders = process.gpus.iter().map(|gpu| gpu.gpu_id).zip(with).collect();
        let gpus = process.gpus.iter().map(|gpu| (gpu.gpu_id, gpu.minor)).collect();
        Ok(Self { id: process.kfd, image, kfd, gpus, renders, files, dmabufs, placeholders: None })
    }

    /// Returns N of the `/dev/dri/renderDN` of each of its GPUs.
    fn minors(&self) -> impl Iterator<Item = u32> {
        self.gpus.iter().map(|(_, minor)| *minor)
    }

    /// Takes a stopped process with a closed gate and all its mappings: watches its placeholders, and has it
    /// killed if its gate can never be opened.
    fn started(&self, place: usize, pidfd: OwnedFd, ledger: Ledger) -> anyhow::Result<StartedProcess<'_>> {
        let process = ledger.gates().close(pidfd)?;
        let placeholders = match &self.placeholders {
            Some(handed) => {
                let pid = crate::sys::pidfd_pid(process).context("finding the process")?;
                let store = ledger.store_of_process(pid);
                let store = store.with_context(|| format!("opening the fd store of process {pid}"))?;
                Some(handed.watch(place, process, self.mapped(handed)?, &self.renders, &store)?)
            }
            None => None,
        };
        let (kfd, minors) = (self.kfd.as_fd(), self.minors().collect());
        let gate = Gate { process, kfd, minors, blocked_calls: None };
        Ok(StartedProcess { gate, placeholders })
    }

    /// Returns the buffers that have placeholders.
    fn mapped(&self, handed: &ReceivedPlaceholders) -> anyhow::Result<Vec<PlaceholderBuffer<'_>>> {
        let of = |number: usize| {
            let buffer = self.image.buffers.get(number)?;
            let gpu = self.gpus.iter().find(|(name, _)| *name == buffer.gpu_id)?;
            let dmabuf = self.dmabufs[number].as_ref()?.as_fd();
            Some(PlaceholderBuffer { number, gpu: *gpu, dmabuf, bytes: buffer.size })
        };
        let known = |number| {
            of(number).with_context(|| {
                format!("the plugin sent a placeholder for buffer {number}, and not the buffer")
            })
        };
        handed.buffers().into_iter().map(known).collect()
    }

    fn take(&mut self, buffers: &proto::Buffers, dmabufs: Vec<OwnedFd>) -> anyhow::Result<()> {
        ensure!(
            buffers.numbers.len() == dmabufs.len(),
            "the plugin sent {} buffers with {} descriptors",
            buffers.numbers.len(),
            dmabufs.len()
        );
        for (number, dmabuf) in buffers.numbers.iter().zip(dmabufs) {
            let count = self.image.buffers.len();
            let place = self.dmabufs.get_mut(*number as usize);
            let place = place
                .with_context(|| format!("the plugin sent buffer {number}, and the image has {count}"))?;
            *place = Some(dmabuf);
        }
        Ok(())
    }
}

/// Checks that the plugin's image directory has the image whose CPU memory this streamer serves, or a copy.
fn check_image(handed: Option<&OwnedFd>, served: Option<&ImageDir>) -> anyhow::Result<()> {
    let (Some(handed), Some(served)) = (handed, served) else { return Ok(()) };
    let handed = ImageDir::of(handed.try_clone()?, path_of(handed))?;
    ensure!(
        handed.id() == served.id() || handed.dump_id()? == served.dump_id()?,
        "`criu restore` restores the image in {}, and this streamer serves the CPU memory of another dump: \
         give both the same directory (-D)",
        handed.path().display()
    );
    Ok(())
}

/// Checks that a fetcher brings the files of an image that arrive: without one their memory would be zeros.
fn expect_fetcher(images: &ImageDir, fetched: Option<&FetchedGpuFiles>) -> anyhow::Result<()> {
    let is_fetched = |name: &String| fetched.is_some_and(|fetched| fetched.file(name).is_some());
    if let Some(name) = images.arriving_files()?.iter().find(|name| !is_fetched(name)) {
        bail!(
            "{name}: GPU memory of a migration, and this streamer has no fetcher that brings it: only the \
             migration can restore the image"
        );
    }
    Ok(())
}

/// The path of an open directory, for messages.
fn path_of(directory: &OwnedFd) -> PathBuf {
    std::fs::read_link(format!("/proc/self/fd/{}", directory.as_raw_fd())).unwrap_or_default()
}

fn unexpected(expected: &str, found: &to_server::What) -> String {
    format!("expected {expected}, found {found:?}: are plugin and server of one version?")
}

#[cfg(test)]
mod tests {
    use std::thread;

    use rewake_criu_images::{Inventory, add_arriving_file, write};
    use rewake_plugin_protocol::{SOCKET, connect};

    use super::*;

    #[test]
    fn a_plugin_of_another_version_is_refused_with_a_reason() {
        let folder = tempfile::tempdir().unwrap();
        let listener = Listener::new(folder.path()).unwrap();
        let plugin = thread::spawn({
            let path = folder.path().join(SOCKET);
            move || {
                let server = connect(&path).unwrap().unwrap();
                let hello = to_server::What::Hello(proto::Hello { version: VERSION + 1, holds: false });
                server.send(&proto::ToServer { what: Some(hello) }, &[]).unwrap();
                server.receive::<proto::ToPlugin>().unwrap().0.what.unwrap()
            }
        });
        let why = accept(&listener, None, (None, &SessionGpuFiles::default())).unwrap_err().to_string();
        let answer = plugin.join().unwrap();
        let wanted = format!("speaks version {}, this one {VERSION}: install", VERSION + 1);
        assert!(why.contains(&wanted), "{why}");
        assert_eq!(answer, to_plugin::What::Refused(proto::Refused { reason: why }));
    }

    #[test]
    fn the_number_of_needed_ranges_is_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let listener = Listener::new(folder.path()).unwrap();
        let plugin = thread::spawn({
            let path = folder.path().join(SOCKET);
            move || {
                let server = connect(&path).unwrap().unwrap();
                let send = |what| server.send(&proto::ToServer { what: Some(what) }, &[]);
                send(to_server::What::Hello(proto::Hello { version: VERSION, holds: false })).unwrap();
                let range = proto::ByteRange { offset: 0, length: 1 };
                let needed = proto::Needed { file: "file".to_owned(), ranges: vec![range; 256] };
                // The last ones find a closed socket.
                for _ in 0..=MAX_NEEDED / 256 {
                    let _ = send(to_server::What::Needed(needed.clone()));
                }
                let _ = send(to_server::What::Ready(proto::Ready {}));
                // Unread messages would reset the connection.
                while server.receive::<proto::ToPlugin>().is_ok() {}
            }
        });
        let why = accept(&listener, None, (None, &SessionGpuFiles::default())).unwrap_err().to_string();
        plugin.join().unwrap();
        assert_eq!(why, "MAX_NEEDED = 65536 ranges of needed bytes");
    }

    #[test]
    fn a_plugin_with_the_image_of_another_dump_is_refused_by_its_path() {
        let [served, copy, other] = [7, 7, 8].map(image);
        let handed = |of: &tempfile::TempDir| OwnedFd::from(std::fs::File::open(of.path()).unwrap());
        let dir = ImageDir::open(served.path()).unwrap();
        check_image(Some(&handed(&served)), Some(&dir)).unwrap();
        check_image(Some(&handed(&copy)), Some(&dir)).unwrap();
        check_image(Some(&handed(&other)), None).unwrap();
        let why = check_image(Some(&handed(&other)), Some(&dir)).unwrap_err().to_string();
        let path = other.path().display().to_string();
        assert!(why.contains(&path) && why.contains("give both the same directory"), "{why}");
    }

    #[test]
    fn an_image_whose_files_arrive_needs_a_fetcher() {
        let folder = image(7);
        let images = ImageDir::open(folder.path()).unwrap();
        expect_fetcher(&images, None).unwrap();
        add_arriving_file(folder.path(), "amdgpu-pages-1-00ab.img").unwrap();
        let why = expect_fetcher(&images, None).unwrap_err().to_string();
        assert!(why.starts_with("amdgpu-pages-1-00ab.img: GPU memory of a migration"), "{why}");
    }

    /// An image directory with an inventory only.
    fn image(dump: u32) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let run_id = Some(format!("run {dump}").into());
        write::inventory(dir.path(), &Inventory { version: 2, plugins: Vec::new(), run_id }).unwrap();
        dir
    }
}
