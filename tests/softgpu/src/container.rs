// SPDX-License-Identifier: MIT OR Apache-2.0
//! The workload in a container that runc made: pids, mounts and a network of its own, `/dev/kfd` and the
//! render nodes, no privilege.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use gpu_app::client;
use gpu_app::shape::Shape;
use rewake_testkit::process::output;
use rewake_testkit::{PATIENCE, until};
use serde_json::{Value, json};

use crate::answers::Answers;
use crate::app;
use crate::criu::Plugin;

/// Folders of the host that it has, read only.
const SYSTEM: [&str; 4] = ["/usr", "/bin", "/lib", "/lib64"];
/// The user and group in it, without privileges: not root.
const USER: u32 = 1000;
/// Calls for which a seccomp filter kills the workload. It makes none of them, and no injected call may be
/// one.
const DEADLY: [&str; 7] =
    ["userfaultfd", "bpf", "ptrace", "pidfd_getfd", "process_vm_writev", "io_uring_setup", "memfd_create"];
/// The answer that is unfinished at the dump.
const PROMPT: [u32; 2] = [7, 8];
const TOKENS: usize = 12;

/// A container; dropping it removes it.
#[derive(Debug)]
pub struct Container {
    folder: tempfile::TempDir,
    /// The folder that it sees as its own: that of the container that was dumped.
    inside: PathBuf,
    shape: Shape,
    right: Answers,
}

impl Container {
    /// Starts a server of this shape in a container, begins an answer, and dumps it with runc.
    ///
    /// # Errors
    /// It does not serve, or cannot be dumped.
    pub fn dumped(shape: &Shape) -> anyhow::Result<Self> {
        Self::dumped_with(shape, &render_nodes()?)
    }

    /// The same, in a container that has these render nodes only.
    ///
    /// # Errors
    /// As [`Container::dumped`].
    pub fn dumped_with(shape: &Shape, nodes: &[PathBuf]) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let inside = folder.path().to_owned();
        let container = Self { folder, inside, shape: shape.clone(), right: Answers::of(shape) };
        container.make_folders()?;
        container.has(nodes)?;
        container.runc("run", |run| run.arg("--detach").arg("--bundle").arg(container.folder.path()))?;
        container.serves()?;
        client::start(&container.socket(), &PROMPT, TOKENS)?;
        container.dump("images")?;
        Ok(container)
    }

    /// Another container of the same image, with these render nodes. It is not restored yet.
    ///
    /// # Errors
    /// Its files cannot be written.
    pub fn copy(&self, nodes: &[PathBuf]) -> anyhow::Result<Self> {
        let (inside, shape) = (self.inside.clone(), self.shape.clone());
        let copy = Self { folder: tempfile::tempdir()?, inside, right: Answers::of(&shape), shape };
        copy.make_folders()?;
        // The program has its log open.
        fs::copy(self.path("files/log"), copy.path("files/log")).context("copy the log")?;
        for file in fs::read_dir(self.images())?.flatten() {
            if file.file_type()?.is_file() {
                fs::copy(file.path(), copy.images().join(file.file_name())).context("copy the images")?;
            }
        }
        copy.has(nodes)?;
        Ok(copy)
    }

    fn make_folders(&self) -> anyhow::Result<()> {
        for folder in ["images", "files", "rootfs"] {
            fs::create_dir(self.path(folder)).with_context(|| format!("create {folder}"))?;
        }
        fs::set_permissions(self.path("files"), Permissions::from_mode(0o777))?;
        fs::set_permissions(self.folder.path(), Permissions::from_mode(0o755))?;
        let options = format!("network-lock skip\nlibdir {}\n", Plugin::Ours.folder()?.display());
        fs::write(self.path("criu.conf"), options).context("write CRIU's options")
    }

    /// Its name for runc.
    fn id(&self) -> String {
        self.folder
            .path()
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .trim_start_matches('.')
            .to_owned()
    }

    /// Gives it these render nodes from its next start or restore on.
    ///
    /// # Errors
    /// The bundle cannot be written.
    pub fn has(&self, nodes: &[PathBuf]) -> anyhow::Result<()> {
        Ok(fs::write(self.path("config.json"), self.bundle(nodes)?.to_string())?)
    }

    /// The bundle's configuration for runc.
    fn bundle(&self, nodes: &[PathBuf]) -> anyhow::Result<Value> {
        let program = app::program()?;
        let programs = program.parent().context("the folder of programs")?;
        let bind = |source: &Path, path: &Path, access: &str| {
            let source = source.canonicalize().with_context(|| format!("find {}", source.display()))?;
            anyhow::Ok(
                json!({"destination": path, "type": "bind", "source": source, "options": ["rbind", access]}),
            )
        };
        let mut mounts = vec![
            json!({"destination": "/proc", "type": "proc", "source": "proc"}),
            json!({"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]}),
            json!({"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]}),
        ];
        for path in SYSTEM.iter().map(Path::new).chain([programs]) {
            mounts.push(bind(path, path, "ro")?);
        }
        let files = self.inside.join("files");
        mounts.push(bind(&self.path("files"), &files, "rw")?);
        // Opened inside: CRIU cannot dump an open file of the host in a container.
        let command = ["sh", "-c", "exec \"$0\" \"$@\" > \"${3%/*}/log\" 2>&1"].map(str::to_owned);
        let serve = [program.display().to_string(), "serve".to_owned(), "--socket".to_owned()];
        let arguments = command.into_iter().chain(serve).chain([files.join("socket").display().to_string()]);
        let devices = devices(nodes)?;
        let allowed = devices.iter().map(|device| {
            let (major, minor) = (&device["major"], &device["minor"]);
            json!({"allow": true, "type": "c", "major": major, "minor": minor, "access": "rwm"})
        });
        let denied = [json!({"allow": false, "access": "rwm"})];
        let namespaces = ["pid", "network", "ipc", "uts", "mount"].map(|kind| json!({"type": kind}));
        Ok(json!({
            "ociVersion": "1.0.2",
            "root": {"path": "rootfs"},
            "process": {
                "cwd": "/",
                "user": {"uid": USER, "gid": USER},
                "noNewPrivileges": true,
                "capabilities": {"bounding": [], "effective": [], "permitted": []},
                "env": ["PATH=/usr/bin"],
                "args": arguments.chain(self.shape.arguments()).collect::<Vec<_>>(),
            },
            "mounts": mounts,
            "linux": {
                "namespaces": namespaces,
                "devices": devices,
                "seccomp": {
                    "defaultAction": "SCMP_ACT_ALLOW",
                    "syscalls": [{"names": DEADLY, "action": "SCMP_ACT_KILL_PROCESS"}],
                },
                "resources": {"devices": denied.into_iter().chain(allowed).collect::<Vec<_>>()},
            },
            "annotations": {"org.criu.config": self.path("criu.conf")},
        }))
    }

    /// The path of a file or folder of its bundle.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn socket(&self) -> PathBuf {
        self.path("files").join("socket")
    }

    /// The images directory, which is CRIU's work directory, too.
    #[must_use]
    pub fn images(&self) -> PathBuf {
        self.path("images")
    }

    /// Dumps it into a folder of that name; it ends.
    ///
    /// # Errors
    /// The error of CRIU; the container continues then.
    pub fn dump(&self, images: &str) -> anyhow::Result<()> {
        let images = self.path(images);
        fs::create_dir_all(&images)?;
        let act = self.runc("checkpoint", |checkpoint| {
            // A dump with missing memory fails, and does not wait.
            checkpoint.env("REWAKE_DUMP_WAIT", "0");
            checkpoint.arg("--image-path").arg(&images).arg("--work-path").arg(&images)
        });
        act.with_context(|| errors(&images.join("dump.log")))
    }

    /// Restores it, for streamers whose work directory is that of the images.
    ///
    /// # Errors
    /// The error of CRIU.
    pub fn restore(&self) -> anyhow::Result<()> {
        self.restore_from("images")
    }

    /// As [`Container::restore`], from the folder of another dump.
    ///
    /// # Errors
    /// The error of CRIU.
    pub fn restore_from(&self, images: &str) -> anyhow::Result<()> {
        let images = self.path(images);
        let act = self.runc("restore", |restore| {
            restore.args(["--detach", "--lazy-pages", "--image-path"]).arg(&images);
            restore.arg("--work-path").arg(&images).arg("--bundle").arg(self.folder.path())
        });
        act.with_context(|| errors(&images.join("restore.log")))
    }

    /// The answer that was begun is right, and so is another; then the server ends.
    ///
    /// # Errors
    /// An answer is wrong or missing.
    pub fn ends_well(&self) -> anyhow::Result<()> {
        self.answer_is(&PROMPT, TOKENS)?;
        client::start(&self.socket(), &[200], 3)?;
        self.answer_is(&[200], 3)?;
        client::ask(&self.socket(), "quit")?;
        self.ends()
    }

    fn answer_is(&self, prompt: &[u32], count: usize) -> anyhow::Result<()> {
        let (found, right) = (client::result(&self.socket())?, self.right.to(prompt, count));
        ensure!(found == right, "the answer to {prompt:?} is {found:?}, expected {right:?}");
        Ok(())
    }

    /// Waits until none of its processes is left.
    ///
    /// # Errors
    /// Processes are left.
    pub fn ends(&self) -> anyhow::Result<()> {
        let state = || {
            let state = output(Command::new("runc").args(["state", &self.id()]))?;
            serde_json::from_str::<Value>(&state).context("the output of runc state")
        };
        let stopped = || state().is_ok_and(|state| state["status"] == "stopped").then_some(());
        until(PATIENCE, stopped).with_context(|| format!("the container does not end: {:?}", state()))
    }

    fn serves(&self) -> anyhow::Result<()> {
        let said = || fs::read_to_string(self.path("files").join("log")).unwrap_or_default();
        let ready = until(PATIENCE, || said().contains("READY").then_some(()));
        ready.with_context(|| format!("gpu-app does not serve: {}", said()))
    }

    fn runc(&self, act: &str, with: impl FnOnce(&mut Command) -> &mut Command) -> anyhow::Result<()> {
        let log = self.path("runc.log");
        let mut command = Command::new("runc");
        command.arg("--log").arg(&log).arg(act);
        // The container has these, too.
        with(&mut command).arg(self.id()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let status = command.status().context("start runc: is it installed?")?;
        ensure!(status.success(), "{command:?}: {status}: {}", fs::read_to_string(log).unwrap_or_default());
        Ok(())
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.runc("delete", |delete| delete.arg("--force"));
    }
}

/// All render nodes of this machine, in order.
///
/// # Errors
/// Their folder cannot be read.
pub fn render_nodes() -> anyhow::Result<Vec<PathBuf>> {
    let nodes = fs::read_dir("/dev/dri").context("list /dev/dri")?.flatten().map(|node| node.path());
    let mut nodes: Vec<PathBuf> =
        nodes.filter(|path| path.display().to_string().contains("/renderD")).collect();
    nodes.sort();
    Ok(nodes)
}

/// `/dev/kfd` and these render nodes, as runc is to make them.
fn devices(nodes: &[PathBuf]) -> anyhow::Result<Vec<Value>> {
    let device = |path: &Path| {
        let number = fs::metadata(path).with_context(|| format!("look at {}", path.display()))?.rdev();
        let (major, minor) = (libc::major(number), libc::minor(number));
        Ok(json!({"path": path, "type": "c", "major": major, "minor": minor, "fileMode": 0o666}))
    };
    [Path::new("/dev/kfd")].into_iter().chain(nodes.iter().map(PathBuf::as_path)).map(device).collect()
}

/// The error lines of a log of CRIU.
fn errors(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    text.lines().filter(|line| line.contains("Error")).collect::<Vec<_>>().join("\n")
}
