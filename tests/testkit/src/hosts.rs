// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two hosts on one machine: each has network, pid and mount namespaces of its own, and a `/run/rewake`. The
//! file system is shared, as a migration needs it. [`own_tmpfs`] gives one thread a place of its own.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context;
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_process::names::field;
use rewake_process::proc;

use crate::process::{PATIENCE, ProcessId as _, children, output, until};

const SOURCE_ADDRESS: &str = "10.77.0.1/24";
const DESTINATION_ADDRESS: &str = "10.77.0.2/24";
/// Where the destination is reached.
pub const DESTINATION: &str = "10.77.0.2";
/// Time that `nsenter` has to start a command.
const ENTER_LIMIT: Duration = Duration::from_secs(10);
/// What the first process of a host does. It collects orphans.
const INIT: &str = "mount --make-rprivate / && mount -t tmpfs tmpfs /run/rewake && ip link set lo up && \
                    echo $1 > /proc/sys/kernel/ns_last_pid && touch \"$0\" && while :; do sleep 1; done";
/// The pids of both hosts begin after these: a program's pid must be free on the other host.
const FIRST_PIDS: [&str; 2] = ["5000", "300"];

/// A host. Dropping it ends all its processes.
#[derive(Debug)]
pub struct Host {
    unshare: Child,
    init: Pid,
}

impl Host {
    fn start(ready: &Path, first_pid: &str) -> anyhow::Result<Self> {
        fs::create_dir_all("/run/rewake").context("make /run/rewake")?;
        let mut command = Command::new("unshare");
        command.args([
            "--net",
            "--pid",
            "--mount",
            "--mount-proc",
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            INIT,
        ]);
        // A test that is killed leaves its hosts: they must not keep its output open.
        command.arg(ready).arg(first_pid).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let unshare = command.spawn().context("start unshare")?;
        let mut host = Self { unshare, init: Pid::from_raw(0) };
        until(PATIENCE, || ready.exists().then_some(())).context("a host did not start")?;
        let first = children(host.unshare.id().pid());
        host.init = *first.first().context("the host's first process")?;
        Ok(host)
    }

    /// A command on this host, whose input and output stay the caller's.
    #[must_use]
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.init.to_string(), "-n", "-p", "-m", "--wdns=/", "--"]);
        command.arg(program).stdin(Stdio::null());
        command
    }

    /// A command on this host that has no file of another host.
    #[must_use]
    pub fn alone(&self, command: &Command) -> Command {
        let mut alone = self.command("sh");
        alone.args(["-c", "exec \"$@\" </dev/null >/dev/null 2>&1", "sh"]);
        alone.arg(command.get_program()).args(command.get_args());
        alone
    }

    /// [`Host::alone`], for a program that does not leave the caller's session: CRIU dumps whole sessions.
    /// Its shell keeps files of the caller's above the standard ones.
    #[must_use]
    pub fn apart(&self, command: &Command) -> Command {
        let mut apart = Command::new("setsid");
        apart.args(["bash", "-c", "exec 10>&- 11>&- 12>&-; exec \"$@\"", "bash"]);
        apart.arg(command.get_program()).args(command.get_args());
        self.alone(&apart)
    }

    /// The network of this host, which a thread can enter.
    ///
    /// # Errors
    /// The host has ended.
    pub fn network(&self) -> anyhow::Result<HostNetwork> {
        let path = format!("/proc/{}/ns/net", self.init);
        Ok(HostNetwork(File::open(path).context("a host's network")?))
    }

    /// Processes of this host with a name, as this machine numbers them.
    #[must_use]
    pub fn named(&self, name: impl AsRef<[u8]>) -> Vec<Pid> {
        let space = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
        let own = space(&self.init.to_string());
        let is_one = |pid: &i32| {
            let lives = proc::status(*pid).is_some_and(|status| !status.has_ended());
            lives && proc::name(*pid) == name.as_ref() && space(&pid.to_string()) == own
        };
        let pids = proc::processes().unwrap_or_default().into_iter();
        pids.filter(is_one).map(Pid::from_raw).collect()
    }

    /// Whether a process runs on this host, in a pid namespace of its own or not.
    #[must_use]
    pub fn has(&self, pid: Pid) -> bool {
        let network = |pid: Pid| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
        network(pid).is_some() && network(pid) == network(self.init)
    }

    /// The number that a process has on its host.
    ///
    /// # Errors
    /// It has ended.
    pub fn own_number(&self, pid: Pid) -> anyhow::Result<i32> {
        let status = fs::read(format!("/proc/{pid}/status")).context("a process has ended")?;
        // This machine's number is the first, and those in namespaces of its own follow.
        let numbers = field(&status, "NSpid:").context("this kernel has no PID namespaces")?;
        Ok(numbers.split_whitespace().nth(1).context("it runs on no host")?.parse()?)
    }

    /// A path of this host.
    #[must_use]
    pub fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.init))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // The first process takes all others of its host along.
        let _ = kill(self.init, Signal::SIGKILL);
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
    }
}

/// The network of a host.
#[derive(Debug)]
pub struct HostNetwork(File);

impl HostNetwork {
    /// Moves the calling thread into it, to its end.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn enter(&self) -> anyhow::Result<()> {
        setns(&self.0, CloneFlags::CLONE_NEWNET).context("entering a host's network")
    }
}

/// Two hosts, with a network between them.
#[derive(Debug)]
pub struct HostPair {
    /// Where programs start.
    pub source: Host,
    /// Where they move to.
    pub destination: Host,
}

impl HostPair {
    /// Cuts the network between both, or joins it again.
    ///
    /// # Errors
    /// No `ip`.
    pub fn cut(&self, is_cut: bool) -> anyhow::Result<()> {
        let name = format!("rws{}", self.source.init);
        let state = if is_cut { "down" } else { "up" };
        output(self.source.command("ip").args(["link", "set", &name, state]))?;
        Ok(())
    }

    /// Both ends of the network: a host, and the name of its device.
    #[must_use]
    pub fn links(&self) -> [(&Host, String); 2] {
        let name = |end: &str, host: &Host| format!("{end}{}", host.init);
        [(&self.source, name("rws", &self.source)), (&self.destination, name("rwd", &self.destination))]
    }

    /// Starts both.
    ///
    /// # Errors
    /// The machine has no such namespaces, or no `ip`.
    pub fn start(files: &Path) -> anyhow::Result<Self> {
        let source = Host::start(&files.join("source-runs"), FIRST_PIDS[0])?;
        let destination = Host::start(&files.join("destination-runs"), FIRST_PIDS[1])?;
        let pair = Self { source, destination };
        let names = [format!("rws{}", pair.source.init), format!("rwd{}", pair.destination.init)];
        let [one, two] = &names;
        output(Command::new("ip").args(["link", "add", one, "type", "veth", "peer", "name", two]))?;
        let ends = [(&pair.source, one, SOURCE_ADDRESS), (&pair.destination, two, DESTINATION_ADDRESS)];
        for (host, name, address) in ends {
            output(Command::new("ip").args(["link", "set", name, "netns", &host.init.to_string()]))?;
            output(host.command("ip").args(["addr", "add", address, "dev", name]))?;
            output(host.command("ip").args(["link", "set", name, "up"]))?;
        }
        Ok(pair)
    }
}

/// The process that `nsenter` has started.
///
/// # Errors
/// It has ended.
pub fn entered(nsenter: &Child) -> anyhow::Result<Pid> {
    let found = until(ENTER_LIMIT, || children(nsenter.id().pid()).first().copied());
    found.context("a command of a host has ended")
}

/// Mounts a tmpfs at a place, for the calling thread and all that it starts from now on.
///
/// # Errors
/// The kernel has no mount namespaces, or `mount` is missing.
pub fn own_tmpfs(place: &str) -> anyhow::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS).context("a mount namespace of this thread's own")?;
    for arguments in [vec!["--make-rprivate", "/"], vec!["-t", "tmpfs", "tmpfs", place]] {
        output(Command::new("mount").args(&arguments)).context("package mount")?;
    }
    Ok(())
}
