// SPDX-License-Identifier: MIT OR Apache-2.0
//! A target in a container that runc made: with namespaces of its own, the one of pids among them, and a root
//! of the host's libraries.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{self, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::criu::Criu;
use crate::page_server::PageServer;
use crate::process::{adopt_orphans, in_group, kill_all, run, tail, until, wait_pid};
use crate::scene::{ACT, END};
use crate::server::{Server, Setup};
use crate::verdict::Verdict;
use rewake_testkit::programs;

/// Time that one runc command may take: only so that none hangs for ever.
const LIMIT: Duration = Duration::from_secs(120);

/// The host's number for root of a container's user namespace.
const ROOT_INSIDE: u32 = 100_000;

/// Folders of the host that the target's program needs, read only.
const LIBRARIES: [&str; 3] = ["/usr", "/lib", "/lib64"];

/// Numbers of containers differ, since their control groups are visible to all containers.
static NUMBER: AtomicU64 = AtomicU64::new(1);

/// Whether runc makes containers on this machine.
///
/// # Errors
/// It is not installed, or this machine lets it make no container.
pub fn runc_works(criu: &Criu) -> Result<(), String> {
    if let Err(error) = Command::new("runc").arg("--version").output() {
        return Err(format!("runc: {error}: apt-get install runc"));
    }
    let probe = || {
        let container = Container::new(criu, Network::Own, false, "none", 0)?;
        // The target reports that no scenario has this name: it ran.
        container.start()?;
        until(ACT, || container.written().contains("no scenario").then_some(())).context("nothing ran")
    };
    probe().map_err(|error| format!("runc makes no container here: {error:#}"))
}

/// The network of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// One of its own, which CRIU must not lock while it dumps: that would need iptables. The option is in a
    /// file that runc passes on; CRIU 4.1.1 fails on this line of it.
    Own,
    /// The host's.
    Hosts,
}

/// A container with one target, its bundle, images and logs. Dropping it ends it; when the test fails, the
/// ends of all logs are printed first.
#[derive(Debug)]
pub struct Container {
    dir: TempDir,
    criu: Criu,
    id: String,
    network: Network,
    /// It is root of a user namespace, whom the host calls [`ROOT_INSIDE`].
    maps_users: bool,
    /// The target's arguments.
    arguments: Vec<String>,
}

impl Container {
    /// Starts the target `scenario` with `mib` MiB in a container, and dumps it with runc.
    ///
    /// # Errors
    /// The target or runc failed.
    pub fn dumped(criu: &Criu, network: Network, scenario: &str, mib: usize) -> anyhow::Result<Self> {
        let container = Self::new(criu, network, false, scenario, mib)?;
        container.start_target()?;
        container.dump()?;
        Ok(container)
    }

    /// Starts the target in a container with a network and users of its own.
    ///
    /// # Errors
    /// The target or runc failed.
    pub fn in_user_namespace(criu: &Criu, scenario: &str, mib: usize) -> anyhow::Result<Self> {
        let container = Self::new(criu, Network::Own, true, scenario, mib)?;
        container.start_target()?;
        Ok(container)
    }

    fn start_target(&self) -> anyhow::Result<()> {
        self.start()?;
        until(ACT, || self.files().join("ready").exists().then_some(()))
            .with_context(|| format!("the target did not get ready: {}", self.written()))
    }

    fn new(
        criu: &Criu,
        network: Network,
        maps_users: bool,
        scenario: &str,
        mib: usize,
    ) -> anyhow::Result<Self> {
        adopt_orphans()?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let dir =
            tempfile::Builder::new().prefix("rewake-container-").tempdir().context("make a directory")?;
        let id = format!("rewake-test-{}-{number}", process::id());
        let files = dir.path().join("files");
        let files = files.to_str().context("a directory that JSON can name")?;
        let (mib, seed) = (mib.to_string(), (1_000_000 + number).to_string());
        let arguments =
            [scenario, "--dir", files, "--mib", &mib, "--seed", &seed].map(str::to_owned).to_vec();
        let container = Self { dir, criu: criu.clone(), id, network, maps_users, arguments };
        for folder in ["images", "files", "work", "bundle", "bundle/rootfs", "path"] {
            fs::create_dir(container.dir.path().join(folder)).with_context(|| format!("create {folder}"))?;
        }
        if maps_users {
            fs::set_permissions(container.dir.path(), Permissions::from_mode(0o711)).context("chmod")?;
            for path in ["files", "bundle/rootfs"].map(|name| container.dir.path().join(name)) {
                chown(path, Some(ROOT_INSIDE), Some(ROOT_INSIDE)).context("chown")?;
            }
        }
        // runc takes the first `criu` of the path: 1.2 and newer know no option for it.
        let program = criu.command("").get_program().to_owned();
        if Path::new(&program).is_absolute() {
            symlink(program, container.dir.path().join("path/criu")).context("a link to CRIU")?;
        }
        fs::write(container.options(), "network-lock skip\n").context("write CRIU's options")?;
        let bundle = serde_json::to_vec(&container.bundle()?)?;
        fs::write(container.dir.path().join("bundle/config.json"), bundle).context("write the bundle")?;
        Ok(container)
    }

    /// The bundle's configuration for OCI runtimes.
    fn bundle(&self) -> anyhow::Result<Value> {
        let programs = programs::folder()?;
        let binds = LIBRARIES.iter().map(|path| (PathBuf::from(path), "ro"));
        let binds = binds.chain([(programs.clone(), "ro"), (self.files(), "rw")]).map(|(path, access)| {
            let source = path.canonicalize().with_context(|| format!("find {}", path.display()))?;
            Ok(json!({"destination": path, "type": "bind", "source": source, "options": ["rbind", access]}))
        });
        let mut mounts = vec![
            json!({"destination": "/proc", "type": "proc", "source": "proc"}),
            json!({"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]}),
        ];
        mounts.extend(binds.collect::<anyhow::Result<Vec<_>>>()?);
        let program = programs.join("target");
        let arguments = [Value::from(program.to_str().context("a program that JSON can name")?)]
            .into_iter()
            .chain(self.arguments.iter().cloned().map(Value::from));
        let mut namespaces = vec!["pid", "ipc", "uts", "mount"];
        let mut annotations = json!({});
        if self.network == Network::Own {
            namespaces.push("network");
            annotations = json!({"org.criu.config": self.options()});
        }
        let mut users = json!([]);
        if self.maps_users {
            namespaces.push("user");
            users = json!([{"containerID": 0, "hostID": ROOT_INSIDE, "size": 1000}]);
        }
        let namespaces: Vec<Value> = namespaces.into_iter().map(|kind| json!({"type": kind})).collect();
        Ok(json!({
            "ociVersion": "1.0.2",
            "root": {"path": "rootfs"},
            "hostname": "rewake",
            "process": {"cwd": "/", "user": {"uid": 0, "gid": 0}, "args": arguments.collect::<Vec<_>>()},
            "mounts": mounts,
            "linux": {"namespaces": namespaces, "uidMappings": users, "gidMappings": users},
            "annotations": annotations,
        }))
    }

    /// CRIU's options for which runc has no option of its own.
    fn options(&self) -> PathBuf {
        self.dir.path().join("criu.conf")
    }

    /// The images directory.
    #[must_use]
    pub fn images(&self) -> PathBuf {
        self.dir.path().join("images")
    }

    /// The work directory: socket and logs.
    #[must_use]
    pub fn work(&self) -> PathBuf {
        self.dir.path().join("work")
    }

    fn files(&self) -> PathBuf {
        self.dir.path().join("files")
    }

    /// The target's first process, as the host calls it; in the container it is 1.
    ///
    /// # Errors
    /// The container was not started.
    pub fn pid(&self) -> anyhow::Result<Pid> {
        let text = fs::read_to_string(self.dir.path().join("pid")).context("read runc's pid file")?;
        Ok(Pid::from_raw(text.trim().parse().context("a pid")?))
    }

    fn start(&self) -> anyhow::Result<()> {
        let mut command = self.runc("run");
        command.arg("--detach").arg("--pid-file").arg(self.dir.path().join("pid"));
        command.arg("--bundle").arg(self.dir.path().join("bundle"));
        self.finish(command)
    }

    /// Has runc dump it into its images directory.
    ///
    /// # Errors
    /// runc failed, and the container continues.
    pub fn dump(&self) -> anyhow::Result<()> {
        self.dump_with(&[])
    }

    /// The same through a page server.
    ///
    /// # Errors
    /// As [`Container::dump`].
    pub fn dump_through(&self, server: &PageServer) -> anyhow::Result<()> {
        self.dump_with(&["--page-server", &format!("127.0.0.1:{}", server.port())])
    }

    fn dump_with(&self, options: &[&str]) -> anyhow::Result<()> {
        let mut command = self.runc("checkpoint");
        command.arg("--image-path").arg(self.images()).arg("--work-path").arg(self.work()).args(options);
        self.finish(command)?;
        // Its number must be free for the restore, and this process collects it.
        self.verdict(END).map(drop)
    }

    /// Has CRIU load the plugins of a folder from now on.
    ///
    /// # Errors
    /// Its options cannot be written; the network is the host's, so that it has none.
    pub fn load_plugins(&self, folder: &Path) -> anyhow::Result<()> {
        ensure!(self.network == Network::Own, "a container in the host's network has no file of options");
        let options = format!("network-lock skip\nlibdir {}\n", folder.display());
        fs::write(self.options(), options).context("write CRIU's options")
    }

    /// Gives the images directory another name, below this container's folder, and makes an empty one.
    ///
    /// # Errors
    /// It cannot be renamed.
    pub fn put_images_aside(&self, name: &str) -> anyhow::Result<()> {
        fs::rename(self.images(), self.dir.path().join(name)).context("rename the images directory")?;
        fs::create_dir(self.images()).context("create the images directory")
    }

    /// A page server for its images.
    ///
    /// # Errors
    /// No program to start.
    pub fn setup(&self) -> anyhow::Result<Setup> {
        Setup::new(&self.criu, &self.images(), &self.work())
    }

    /// Lets the target act as soon as it runs.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn go(&self) -> anyhow::Result<()> {
        fs::write(self.files().join("go"), "").context("say go")
    }

    /// Lets a target that repeats itself end after the pass that it is in.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn stop(&self) -> anyhow::Result<()> {
        fs::write(self.files().join("stop"), "").context("say stop")
    }

    /// Has runc restore it with lazy pages.
    ///
    /// # Errors
    /// runc failed.
    pub fn restore(&self) -> anyhow::Result<()> {
        self.restore_with(&["--lazy-pages", "--work-path", self.work().to_str().context("a path in words")?])
    }

    /// The same with all memory first.
    ///
    /// # Errors
    /// runc failed.
    pub fn restore_eagerly(&self) -> anyhow::Result<()> {
        self.restore_with(&["--work-path", self.work().to_str().context("a path in words")?])
    }

    /// The same without an option, in an environment that wants it lazy and names this agent.
    ///
    /// # Errors
    /// runc failed.
    pub fn restore_by_policy(&self, agent: &Path) -> anyhow::Result<()> {
        let mut command = self.runc("restore");
        command.env("REWAKE_LAZY", "1").env("REWAKE_SOCKET", agent);
        self.finish_restore(command, &["--work-path", self.work().to_str().context("a path in words")?])
    }

    /// The same without a work directory of its own.
    ///
    /// # Errors
    /// runc failed.
    pub fn restore_without_work_path(&self) -> anyhow::Result<()> {
        self.restore_with(&["--lazy-pages"])
    }

    fn restore_with(&self, options: &[&str]) -> anyhow::Result<()> {
        self.finish_restore(self.runc("restore"), options)
    }

    fn finish_restore(&self, mut command: Command, options: &[&str]) -> anyhow::Result<()> {
        command.args(["--detach", "--image-path"]).arg(self.images()).args(options);
        command.arg("--pid-file").arg(self.dir.path().join("pid"));
        command.arg("--bundle").arg(self.dir.path().join("bundle"));
        self.finish(command)
    }

    /// How the target ended.
    ///
    /// # Errors
    /// No target was restored.
    pub fn verdict(&self, limit: Duration) -> anyhow::Result<Verdict> {
        let status = wait_pid(self.pid()?, limit).context("wait for the container's first process")?;
        Ok(Verdict::new(status, &self.written()))
    }

    /// What the target wrote to its verdict file.
    #[must_use]
    pub fn written(&self) -> String {
        fs::read_to_string(self.files().join("verdict")).unwrap_or_default()
    }

    /// The target must see right bytes only, and the server end with status 0.
    ///
    /// # Errors
    /// The target or the server failed.
    pub fn expect_good_end(&self, server: &mut Server) -> anyhow::Result<()> {
        let verdict = self.verdict(ACT)?;
        ensure!(verdict == Verdict::Ok, "the target: {verdict:?}");
        let status = server.ended(END)?;
        ensure!(status.code() == Some(0), "the server ended with {status}");
        Ok(())
    }

    /// A runc command for this container, without its number, which comes last.
    fn runc(&self, act: &str) -> Command {
        let mut path = self.dir.path().join("path").into_os_string();
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        let mut command = Command::new("runc");
        command.arg("--root").arg(self.dir.path().join("state"));
        command.arg("--log").arg(self.log(act)).arg(act).env("PATH", path);
        // The target's own: CRIU cannot dump a file of the host's that is open in a container.
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    fn log(&self, act: &str) -> PathBuf {
        self.dir.path().join(format!("runc-{act}.log"))
    }

    fn finish(&self, mut command: Command) -> anyhow::Result<()> {
        let status = run(command.arg(&self.id), LIMIT)?;
        if !status.success() {
            bail!("{command:?}: {status}\n{}", self.logs());
        }
        Ok(())
    }

    /// The ends of all logs.
    #[must_use]
    pub fn logs(&self) -> String {
        let acts = ["run", "checkpoint", "restore"].map(|act| self.log(act));
        let others = ["lazy.out", "lazy.log", "dump.log", "restore.log"].map(|name| self.work().join(name));
        let present = acts.iter().chain(&others).filter(|path| path.exists());
        present.map(|path| tail(path, 20)).chain([self.written()]).collect()
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}: {:?}\n{}", self.id, self.arguments, self.logs());
        }
        // Also kills a restore that was cut off, and its CRIU: runc knows neither.
        kill_all(&in_group(&self.id));
        let mut command = self.runc("delete");
        // There may be no container any more.
        let _ = run(command.args(["--force", &self.id]), LIMIT);
        unmount_below(self.dir.path());
    }
}

/// Unmounts, in a folder that is to be removed, what an interrupted restore has mounted.
fn unmount_below(folder: &Path) {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let places = mounts.lines().filter_map(|mount| mount.split(' ').nth(1));
    for place in places.filter(|place| Path::new(place).starts_with(folder)) {
        // The unmount above may have included it.
        let _ = Command::new("umount").args(["--lazy", place]).stderr(Stdio::null()).status();
    }
}
