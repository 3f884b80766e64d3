// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the hosts compare before the program is touched: what it has here, and what the destination must
//! have.

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rewake_criu_images::{LazyMappings, Overcommit, user_namespace_refusal};
use rewake_process::names::field;
use rewake_process::proc;
use serde::{Deserialize, Serialize};

use crate::cgroup;
use crate::criu::{CriuChoice, CriuRelease};
use crate::file_hasher::{FileHasher, HASH_LIMIT};
use crate::file_look::looked_at;
use crate::program_files::{MAX_HASHED, ProgramFiles};
use crate::room::{self, HugePages, TreeSize};
use crate::sockets::{self, TreeSocket};
use crate::source_options::SourceOptions;
use crate::text_path::TextPath;

/// Names that a refusal shows.
const SHOWN: usize = 4;
/// How paths of GPU devices begin.
const GPU_DEVICES: [&str; 2] = ["/dev/kfd", "/dev/dri/renderD"];

/// What a destination must have.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HostOffer {
    architecture: String,
    /// The features of the source's CPUs.
    cpu_features: BTreeSet<String>,
    criu: CriuRelease,
    /// Pids that the tree will have.
    pids: BTreeSet<i32>,
    files: ProgramFiles,
    /// Device files of GPUs that the tree has open.
    gpus: BTreeSet<TextPath>,
    /// Numbers of terminals whose other end the tree has (`/dev/pts/NUMBER`).
    terminals: BTreeSet<u32>,
    /// What the destination must be able to bind: none of a tree that has its own network.
    sockets: BTreeSet<TreeSocket>,
    /// Connections that the dump does not close.
    #[serde(skip)]
    connected: BTreeSet<SocketAddr>,
    pub(crate) size: TreeSize,
    /// What CRIU maps at the destination, which restores lazily always.
    mappings: LazyMappings,
    /// Whether a process is in a user namespace of its own.
    has_users: bool,
    huge_pages: HugePages,
    /// Seconds without a connection that the source accepts before GRANT.
    pub(crate) give_up_after: u64,
}

impl HostOffer {
    /// Describes this host, and a tree on it.
    ///
    /// # Errors
    /// A process cannot be described, or a file system does not answer.
    pub(crate) fn in_time(processes: Vec<i32>, criu: &CriuChoice) -> anyhow::Result<Self> {
        let criu = criu.clone();
        looked_at(move || Self::of(&processes, &criu))
    }

    fn of(processes: &[i32], criu: &CriuChoice) -> anyhow::Result<Self> {
        let mut offer = Self {
            architecture: std::env::consts::ARCH.to_owned(),
            cpu_features: cpu_features()?,
            criu: criu.release()?,
            pids: BTreeSet::new(),
            files: ProgramFiles::default(),
            gpus: BTreeSet::new(),
            terminals: BTreeSet::new(),
            sockets: BTreeSet::new(),
            connected: BTreeSet::new(),
            size: TreeSize::default(),
            mappings: LazyMappings::default(),
            has_users: false,
            huge_pages: HugePages::default(),
            give_up_after: 0,
        };
        for pid in processes {
            let added = offer.add(*pid);
            // A child may end meanwhile: it shows no memory and no files then.
            if cgroup::lives(*pid) {
                added?;
            }
        }
        let left_out = offer.files.hash(&mut FileHasher::new(HASH_LIMIT));
        if !left_out.is_empty() {
            tracing::warn!(
                "executables and libraries are compared by their size alone, because {} MiB in {} s are \
                 hashed at most, of disks, NFS and tmpfs: {}",
                MAX_HASHED >> 20,
                HASH_LIMIT.as_secs(),
                shown(&left_out)
            );
        }
        // The others are closed by the dump.
        let closes = criu.has("--tcp-close");
        if closes {
            offer.sockets.retain(|socket| socket.listens);
            offer.connected.clear();
        }
        Ok(offer)
    }

    fn add(&mut self, pid: i32) -> anyhow::Result<()> {
        let number = proc::status(pid).and_then(|status| status.own_number);
        let number = number.with_context(|| format!("process {pid} has ended"))?;
        // In a pid namespace that is restored with the tree, its number is free.
        let number = shares(pid, "pid")?.then_some(number);
        if proc::status(pid).is_none_or(|status| status.has_ended()) {
            // CRIU restores a zombie, too: by its pid.
            self.pids.extend(number);
            return Ok(());
        }
        self.files.add(pid)?;
        self.gpus.extend(gpu_devices_of(pid));
        if shares(pid, "mnt")? {
            self.terminals.extend(terminals_of(pid));
        }
        let sockets = sockets::of_process(pid)?;
        self.connected.extend(sockets.iter().filter(|socket| !socket.listens).map(|socket| socket.local));
        if shares(pid, "net")? {
            self.sockets.extend(sockets);
        }
        self.size.add(pid)?;
        let path = format!("/proc/{pid}/smaps");
        let smaps = fs::read(&path).with_context(|| format!("reading {path}"))?;
        self.mappings.add_running(number.unwrap_or(pid).cast_unsigned(), &smaps);
        self.huge_pages.add(&smaps);
        self.has_users |= !shares(pid, "user")?;
        self.pids.extend(number);
        Ok(())
    }

    /// Why the source itself cannot give the tree away.
    pub(crate) fn refused_here(&self, options: &SourceOptions) -> Vec<String> {
        let mut refusals = Vec::new();
        if options.goal.max_downtime.is_some() && self.uses_gpus() {
            refusals.push(
                "--max-downtime: a dump of GPU memory is not interrupted when the time is over: leave it out"
                    .to_owned(),
            );
        }
        let connected: Vec<_> = self.connected.iter().map(ToString::to_string).collect();
        if !connected.is_empty() && !options.criu.has("--tcp-established") {
            refusals.push(format!(
                "the program has TCP connections (at {}): close them, or add -- --tcp-close on both hosts, \
                 or -- --tcp-established if their address moves along",
                shown(&connected)
            ));
        }
        refusals
    }

    /// Whether the program uses GPUs.
    pub(crate) fn uses_gpus(&self) -> bool {
        !self.gpus.is_empty()
    }

    /// Reads the source's text.
    ///
    /// # Errors
    /// It is none of a source's.
    pub(crate) fn read(text: &str) -> anyhow::Result<Self> {
        serde_json::from_str(text).context("reading the source's offer")
    }

    /// Compares this host with the source's text: what it lacks. Nothing is changed.
    pub(crate) fn refused_there(text: &str, criu: &CriuChoice) -> Vec<String> {
        let (text, criu) = (text.to_owned(), criu.clone());
        match looked_at(move || Self::lacking(&text, &criu)) {
            Ok(refusals) => refusals,
            Err(error) => vec![format!("{error:#}")],
        }
    }

    fn lacking(text: &str, criu: &CriuChoice) -> anyhow::Result<Vec<String>> {
        let offer = Self::read(text)?;
        let here = std::env::consts::ARCH;
        if offer.architecture != here {
            return Ok(vec![format!("the source is a {} machine, this one {here}", offer.architecture)]);
        }
        let mut refusals = Vec::new();
        let mut refuse = |names: Vec<String>, what: &str| {
            if !names.is_empty() {
                refusals.push(format!("{what}: {}", shown(&names)));
            }
        };
        let has = cpu_features()?;
        refuse(
            offer.cpu_features.difference(&has).cloned().collect(),
            "features that this machine's CPUs lack",
        );
        let used = offer.pids.iter().filter(|pid| exists(pid)).map(ToString::to_string);
        refuse(used.collect(), "pids of the program that are in use here");
        let files = offer.files.compare(&mut FileHasher::new(HASH_LIMIT));
        refuse(files.absent, "files of the program that do not exist here");
        refuse(files.different, "files that the program has mapped, and that are other files here");
        refuse(
            files.not_hashed,
            "libraries of the program that could not be hashed here in time, or are on a file system of \
             another kind",
        );
        // Others may have the GPU's place: CRIU's plugin finds one that fits.
        let has_gpu = Path::new(GPU_DEVICES[0]).exists();
        let gpus = offer.gpus.iter().filter(|_| !has_gpu).map(TextPath::printable);
        refuse(gpus.collect(), "GPUs of the program, of which this host has none");
        let taken = offer.terminals.iter().map(|number| format!("/dev/pts/{number}"));
        refuse(
            taken.filter(|path| Path::new(path).exists()).collect(),
            "terminals of the program that are in use here",
        );
        let sockets = offer.sockets.iter().filter_map(|socket| socket.refused());
        refuse(sockets.collect(), "addresses of the program that it cannot have here");
        let own = criu.release()?;
        if own < offer.criu {
            refusals.push(format!("CRIU {own} here is older than CRIU {} at the source", offer.criu));
        }
        refusals.extend(room::refused(offer.size)?);
        refusals.extend(offer.huge_pages.refused());
        let overcommit = Overcommit::now().unwrap_or(Overcommit::Always);
        let no_userfaultfd = offer.has_users.then(user_namespace_refusal).flatten();
        let not_lazily = no_userfaultfd.or_else(|| overcommit.refusal(&offer.mappings));
        refusals.extend(not_lazily.map(|why| format!("the program cannot be restored lazily here: {why}")));
        Ok(refusals)
    }
}

/// Whether a process is in the namespace of this one, of a kind that `/proc/PID/ns` has.
fn shares(pid: i32, kind: &str) -> anyhow::Result<bool> {
    let namespace = |process: &str| {
        let path = format!("/proc/{process}/ns/{kind}");
        fs::read_link(&path).with_context(|| format!("reading {path}"))
    };
    Ok(namespace(&pid.to_string())? == namespace("self")?)
}

fn exists(pid: &i32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

fn shown(names: &[String]) -> String {
    let more = names.len().saturating_sub(SHOWN);
    let first = names[..names.len() - more].join(", ");
    if more == 0 { first } else { format!("{first} and {more} more") }
}

fn cpu_features() -> anyhow::Result<BTreeSet<String>> {
    let text = fs::read_to_string("/proc/cpuinfo").context("reading /proc/cpuinfo")?;
    let list = text.lines().find_map(|line| line.strip_prefix("flags")?.split_once(':'));
    Ok(list.map_or_else(BTreeSet::new, |(_, list)| list.split_whitespace().map(str::to_owned).collect()))
}

fn gpu_devices_of(pid: i32) -> BTreeSet<TextPath> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let paths = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    let is_gpu = |path: &PathBuf| {
        let path = path.as_os_str().as_bytes();
        GPU_DEVICES.iter().any(|device| path.starts_with(device.as_bytes()))
    };
    paths.filter(is_gpu).map(TextPath::from).collect()
}

/// The terminals of which a process has the master's end.
fn terminals_of(pid: i32) -> BTreeSet<u32> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let is_master = |path: PathBuf| path.file_name().is_some_and(|name| name == "ptmx");
    let masters = entries.filter(|entry| fs::read_link(entry.path()).is_ok_and(is_master));
    let number = |entry: fs::DirEntry| {
        let path = Path::new("/proc").join(pid.to_string()).join("fdinfo").join(entry.file_name());
        field(&fs::read(path).ok()?, "tty-index:")?.parse().ok()
    };
    masters.filter_map(number).collect()
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use super::*;
    use crate::pre_copy::PreCopyGoal;

    fn options(criu: &CriuChoice, max_downtime: Option<Duration>) -> SourceOptions {
        SourceOptions {
            tree: 1,
            to: String::new(),
            insecure: true,
            tls: None,
            criu: criu.clone(),
            goal: PreCopyGoal { all_first: false, max_downtime },
            give_up_after: None,
        }
    }

    fn criu(options: &[&str]) -> CriuChoice {
        let options = options.iter().map(Into::into).collect();
        let folder = tempfile::tempdir().unwrap().keep();
        let program = folder.join("criu");
        fs::write(&program, "#!/bin/sh\necho Version: 4.2.1\n").unwrap();
        fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        CriuChoice { program, options, plugins: None }
    }

    #[test]
    fn a_host_can_take_its_own_files_and_features() {
        let criu = criu(&[]);
        let own = std::process::id().cast_signed();
        let mut offer = HostOffer::of(&[own], &criu).unwrap();
        assert!(offer.files.has(&std::env::current_exe().unwrap()), "{:?}", offer.files);
        let refused =
            |offer: &HostOffer| HostOffer::refused_there(&serde_json::to_string(offer).unwrap(), &criu);
        assert_eq!(refused(&offer)[0], format!("pids of the program that are in use here: {own}"));
        offer.pids.clear();
        offer.sockets.clear();
        assert_eq!(refused(&offer), [""; 0]);
        offer.files.add_name("/no/such/file");
        offer.cpu_features.insert("levitation".into());
        offer.sockets.insert(TreeSocket { local: "192.0.2.1:80".parse().unwrap(), listens: true });
        offer.gpus.insert(PathBuf::from("/dev/kfd").into());
        offer.criu = CriuRelease([9, 1]);
        offer.size.resident = u64::MAX / 4;
        let reasons = refused(&offer);
        let begins = [
            "features that this machine's CPUs lack: levitation",
            "files of the program that do not exist here: /no/such/file",
            "GPUs of the program, of which this host has none: /dev/kfd",
            "addresses of the program that it cannot have here: 192.0.2.1:80 (",
            "CRIU 4.2 here is older than CRIU 9.1 at the source",
            "the program has 4398046511103 MiB resident",
        ];
        assert_eq!(reasons.len(), begins.len(), "{reasons:#?}");
        for (reason, begin) in reasons.iter().zip(begins) {
            assert!(reason.starts_with(begin), "{reason:?} {begin:?}");
        }
    }

    #[test]
    fn a_zombie_has_a_pid_only() {
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        let pid = ended.id().cast_signed();
        while proc::status(pid).is_some_and(|status| !status.has_ended()) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let offer = HostOffer::of(&[pid], &criu(&[])).unwrap();
        assert_eq!((offer.pids, offer.files), (BTreeSet::from([pid]), ProgramFiles::default()));
        ended.wait().unwrap();
    }

    #[test]
    fn tcp_connections_are_refused_at_the_source() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let own = std::process::id().cast_signed();
        let (plain, closing) = (criu(&[]), criu(&["--tcp-close"]));
        let offer = HostOffer::of(&[own], &plain).unwrap();
        let listening = TreeSocket { local: listener.local_addr().unwrap(), listens: true };
        assert!(offer.sockets.contains(&listening), "{:?}", offer.sockets);
        let reasons = offer.refused_here(&options(&plain, None));
        assert_eq!(reasons.len(), 1, "{reasons:?}");
        assert!(reasons[0].starts_with("the program has TCP connections (at 127.0.0.1:"), "{reasons:?}");
        let offer = HostOffer::of(&[own], &closing).unwrap();
        assert!(offer.sockets.iter().all(|socket| socket.listens), "{:?}", offer.sockets);
        assert_eq!(offer.refused_here(&options(&closing, None)), [""; 0]);
    }

    #[test]
    fn the_downtime_of_gpu_memory_is_not_promised() {
        let (own, closing) = (std::process::id().cast_signed(), criu(&["--tcp-close"]));
        let mut offer = HostOffer::of(&[own], &closing).unwrap();
        let limited = options(&closing, Some(Duration::from_secs(1)));
        assert_eq!(offer.refused_here(&limited), [""; 0]);
        offer.gpus.insert(PathBuf::from("/dev/kfd").into());
        assert!(offer.refused_here(&limited)[0].starts_with("--max-downtime: a dump of GPU memory"));
        assert_eq!(offer.refused_here(&options(&closing, None)), [""; 0]);
    }
}
