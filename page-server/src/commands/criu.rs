// SPDX-License-Identifier: MIT OR Apache-2.0
//! The `criu dump` and `criu restore` that commands of ours run.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::{Context as _, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_process::criu::{self, starting};
use tokio::io::unix::AsyncFd;

use crate::cli::Programs;
use rewake_plugin_protocol::plugin_folder;
use rewake_process::pidfd::pidfd_open;
use rewake_streamer::supervise::processes;
use rewake_streamer::watched;

/// Letters of CRIU's short options that have a value.
const WITH_VALUE: &str = "tDovxrJLWM";
/// Error lines of the log that are shown.
const SHOWN: usize = 8;
/// Bytes of the log's end that are searched.
const LOOKED_AT: usize = 256 * 1024;
/// The file that `criu restore` writes into its work directory when it has let the tree run.
const RESUMED: &str = "stats-restore";

/// Options for CRIU that matter here.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct CriuOptions {
    /// `-d` of a restore: CRIU ends once the tree runs.
    pub(super) detached: bool,
    /// Its log, relative to the work directory.
    pub(super) log: Option<PathBuf>,
    /// A folder of plugins is given.
    pub(super) plugins: bool,
    /// `-R` or `-s` of a dump: CRIU does not kill the tree.
    pub(super) keeps_tree: bool,
    /// `--stream`: a dump writes no files.
    pub(super) streams: bool,
    /// `--auto-dedup`: a dump removes pages from its parent image.
    pub(super) dedups: bool,
    /// `--action-script`: programs that CRIU runs.
    pub(super) scripts: Vec<OsString>,
}

impl CriuOptions {
    /// Reads the options; `ours` are those that the command has itself.
    ///
    /// # Errors
    /// One of `ours` is given.
    pub(super) fn read(options: &[OsString], ours: &[&str]) -> anyhow::Result<Self> {
        let mut found = Self::default();
        let mut options = options.iter();
        while let Some(option) = options.next() {
            let mut parts = option.as_bytes().splitn(2, |byte| *byte == b'=');
            // A name that is no text is none of these options.
            let name = parts.next().and_then(|name| str::from_utf8(name).ok()).unwrap_or_default();
            let value = parts.next().map(OsStr::from_bytes);
            match name {
                "-d" | "--restore-detached" => found.detached = true,
                "-L" | "--libdir" => found.plugins = true,
                "-R" | "--leave-running" | "-s" | "--leave-stopped" => found.keeps_tree = true,
                "--stream" | "--page-server" | "--lazy-pages" => found.streams = true,
                "--auto-dedup" => found.dedups = true,
                "-o" | "--log-file" | "--action-script" => {
                    let value = value.or_else(|| options.next().map(OsString::as_os_str));
                    let value = value.with_context(|| format!("{name}: expected a file"))?.to_owned();
                    if name == "--action-script" {
                        found.scripts.push(value);
                    } else {
                        found.log = Some(value.into());
                    }
                }
                name if ours.contains(&name) => bail!("{name}: give it before `--`: rewake needs it too"),
                _ => {}
            }
        }
        Ok(found)
    }
}

impl CriuOptions {
    /// Refuses options that a command gives to CRIU itself, in all forms that CRIU accepts: `--tree=9`,
    /// `--tre 9`, `-t9`, `-jt9`.
    ///
    /// # Errors
    /// One of them is given.
    pub(super) fn refuse(options: &[OsString], ours: &[&str]) -> anyhow::Result<()> {
        for option in options {
            let text = option.to_string_lossy();
            if let Some(name) = ours.iter().find(|name| is_form_of(&text, name)) {
                bail!("{text}: rewake gives {name} to CRIU itself");
            }
        }
        Ok(())
    }
}

/// Whether CRIU may take a text for an option: `--long` or `-s`.
fn is_form_of(text: &str, option: &str) -> bool {
    let is_long = |text: &str| text.strip_prefix("--").is_some_and(|name| !name.is_empty());
    if is_long(text) {
        let name = text.split_once('=').map_or(text, |(name, _)| name);
        return option.starts_with(name);
    }
    let (Some(letters), Some(letter)) = (text.strip_prefix('-'), option.strip_prefix('-')) else {
        return false;
    };
    // What follows a letter with a value is the value.
    let value = letters.find(|letter| WITH_VALUE.contains(letter)).map_or(letters.len(), |at| at + 1);
    !is_long(option) && letters[..value].contains(letter)
}

/// One command of CRIU.
#[derive(Debug)]
pub(super) struct CriuInvocation<'a> {
    /// `dump` or `restore`.
    pub(super) name: &'static str,
    /// The images directory.
    pub(super) images: &'a Path,
    /// The work directory.
    pub(super) work: &'a Path,
    /// Options that we give.
    pub(super) ours: &'a [&'a str],
    /// A folder of plugins.
    pub(super) plugins: Option<&'a Path>,
    /// Options of the user's, last.
    pub(super) given: &'a [OsString],
    /// The same, read.
    pub(super) options: &'a CriuOptions,
    /// What is added to its environment, and to that of its action scripts.
    pub(super) environment: &'a [(&'a str, &'a str)],
}

impl CriuInvocation<'_> {
    /// The command line.
    pub(super) fn command(&self, program: &Path) -> Command {
        let mut command = criu::command(
            program,
            self.name,
            self.ours,
            [self.images, self.work],
            self.options.log.is_none().then(|| self.log_name()).as_deref(),
            self.plugins,
        );
        command.args(self.given).envs(self.environment.iter().copied());
        command
    }

    /// Where CRIU writes its log.
    pub(super) fn log(&self) -> PathBuf {
        self.work.join(self.log_name())
    }

    fn log_name(&self) -> PathBuf {
        self.options.log.clone().unwrap_or_else(|| format!("{}.log", self.name).into())
    }
}

impl Programs {
    /// CRIU.
    pub(super) fn criu(&self) -> PathBuf {
        let program = self.criu.clone().or_else(|| std::env::var_os("CRIU").map(PathBuf::from));
        program.unwrap_or_else(|| "criu".into())
    }

    /// The folder of plugins to give to CRIU: none where no GPU `needs` one and none was chosen, and none
    /// besides one that CRIU's options name.
    ///
    /// # Errors
    /// The chosen folder has no plugin, or there are two.
    pub(super) fn plugins(&self, needed: bool, options: &CriuOptions) -> anyhow::Result<Option<PathBuf>> {
        match (&self.plugin_dir, options.plugins) {
            (Some(_), true) => bail!("--plugin-dir and CRIU's --libdir are one thing: give one of them"),
            (None, true) => Ok(None),
            (None, false) if !needed => Ok(None),
            (chosen, false) => plugin_folder::find(chosen.as_deref()),
        }
    }
}

/// For a failure where a GPU is in play and CRIU was given no folder of plugins.
pub(super) const NO_PLUGIN: &str = "; no amdgpu_plugin.so was found, so CRIU had to do with the plugins in \
                                    its own folder (name ours with --plugin-dir)";

/// A running CRIU.
#[derive(Debug)]
pub(super) struct Criu {
    child: Child,
    pidfd: AsyncFd<OwnedFd>,
    log: PathBuf,
    resumed: PathBuf,
}

impl Criu {
    /// Starts it. With `stdout` false its output goes to stderr.
    ///
    /// # Errors
    /// There is no such program, or the statistics of an earlier restore cannot be removed.
    pub(super) fn start(program: &Path, act: &CriuInvocation<'_>, stdout: bool) -> anyhow::Result<Self> {
        let mut command = act.command(program);
        if !stdout {
            command.stdout(Stdio::from(io::stderr().as_fd().try_clone_to_owned()?));
        }
        let resumed = act.work.join(RESUMED);
        match fs::remove_file(&resumed) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("removing an old {}", resumed.display()));
            }
            _ => {}
        }
        let child = command.spawn().with_context(|| starting(program))?;
        let pidfd = pidfd_open(child.id().cast_signed()).and_then(watched::watch).context("watching criu")?;
        Ok(Self { child, pidfd, log: act.log(), resumed })
    }

    /// Waits for its end. May be dropped and called again.
    pub(super) async fn ended(&mut self) -> anyhow::Result<ExitStatus> {
        self.pidfd.readable().await.context("watching criu")?.retain_ready();
        self.child.wait().context("waiting for criu")
    }

    /// Returns whether CRIU has let the tree run.
    pub(super) fn has_resumed(&self) -> bool {
        self.resumed.exists()
    }

    /// Kills it and the tasks that it has made: they are parts of a tree that will never run.
    pub(super) fn kill_tree(&self) {
        let pid = self.child.id().cast_signed();
        // Not collected yet, so the number is its own.
        if let Ok(pidfd) = pidfd_open(pid) {
            processes::kill_descendants(pid, pidfd.as_raw_fd());
        }
        // It may have ended.
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
    }

    /// Shows the last error lines of its log.
    pub(super) fn show_errors(&self) {
        show_errors(&self.log);
    }
}

/// Shows the last error lines of a log of CRIU on stderr.
pub(super) fn show_errors(log: &Path) {
    let bytes = fs::read(log).unwrap_or_default();
    let end = String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(LOOKED_AT)..]);
    for line in criu::error_lines(&end, SHOWN) {
        // If stderr is closed, the exit code alone reports it.
        let _ = writeln!(io::stderr(), "criu: {line}");
    }
}

/// The exit code of a program in a shell's convention: 128 and the signal for a killed one.
pub(super) fn code(exit: ExitStatus) -> u8 {
    let code = exit.code().unwrap_or_else(|| 128 + exit.signal().unwrap_or(0));
    u8::try_from(code).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt as _;

    use super::*;

    fn read(options: &[&str]) -> anyhow::Result<CriuOptions> {
        CriuOptions::read(&strings(options), &["-D", "--images-dir", "-W", "--work-dir"])
    }

    fn strings(options: &[&str]) -> Vec<OsString> {
        options.iter().map(OsString::from).collect()
    }

    /// A command line in words.
    fn words(command: &Command) -> String {
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
        words.join(" ")
    }

    #[test]
    fn options_of_rewake_are_refused_in_all_forms() {
        let ours = ["-t", "--tree", "-D", "--images-dir", "--ps-socket"];
        let refused = |options: &[&str]| CriuOptions::refuse(&strings(options), &ours).is_err();
        let forms =
            ["-t", "-t999", "-jt999", "--tree=9", "--tre", "--tr=9", "-D/x", "--images", "--ps-socket=3"];
        for form in forms {
            assert!(refused(&[form]), "{form}");
        }
        let others =
            ["-v4", "-j", "-L/t/D", "-vt", "--tcp-established", "--trees", "--", "-", "t", "--shell-job"];
        assert!(!refused(&others));
    }

    #[test]
    fn detached_in_both_spellings() {
        assert!(!read(&["-v4", "--shell-job"]).unwrap().detached);
        assert!(read(&["-d"]).unwrap().detached && read(&["--restore-detached"]).unwrap().detached);
    }

    #[test]
    fn the_log_in_all_spellings() {
        for options in [&["-o", "-d"][..], &["--log-file", "-d"], &["--log-file=-d"]] {
            let found = read(options).unwrap();
            assert_eq!(
                found,
                CriuOptions { log: Some("-d".into()), ..CriuOptions::default() },
                "{options:?}"
            );
        }
        assert!(read(&["-o"]).is_err());
    }

    #[test]
    fn a_file_s_name_need_not_be_utf_8() {
        let named = |option: &[u8]| [option, b"caf\xe9"].concat();
        let given = [named(b"--log-file="), named(b"--action-script="), b"-o".to_vec(), named(b"")];
        let given = given.map(OsString::from_vec);
        let name = OsString::from_vec(named(b""));
        let first = CriuOptions::read(&given[..2], &[]).unwrap();
        assert_eq!((first.log, first.scripts), (Some(name.clone().into()), vec![name.clone()]));
        assert_eq!(CriuOptions::read(&given[2..], &[]).unwrap().log, Some(name.into()));
    }

    #[test]
    fn what_a_dump_leaves_and_runs_is_read() {
        for option in ["-R", "--leave-running", "-s", "--leave-stopped"] {
            assert!(read(&[option]).unwrap().keeps_tree, "{option}");
        }
        let found =
            read(&["--stream", "--auto-dedup", "--action-script", "-R", "--action-script=b"]).unwrap();
        let scripts = strings(&["-R", "b"]);
        let expected = CriuOptions { streams: true, dedups: true, scripts, ..CriuOptions::default() };
        assert_eq!(found, expected);
    }

    #[test]
    fn directories_are_refused_by_name() {
        for option in ["-D", "--images-dir=/x", "-W", "--work-dir"] {
            let error = read(&[option]).unwrap_err().to_string();
            assert!(error.starts_with(option.split('=').next().unwrap()), "{error}");
        }
    }

    #[test]
    fn a_command_line_is_ours_then_the_log_and_the_plugins_then_the_user_s() {
        let given = strings(&["-v4", "--shell-job"]);
        let options = CriuOptions::default();
        let (images, work) = (Path::new("/img"), Path::new("/jobs"));
        let act = CriuInvocation {
            name: "dump",
            images,
            work,
            ours: &["-t", "7"],
            plugins: Some(Path::new("/plugins")),
            given: &given,
            options: &options,
            environment: &[],
        };
        let line = "dump -t 7 -D /img -W /jobs -o dump.log --libdir /plugins -v4 --shell-job";
        assert_eq!(words(&act.command(Path::new("criu"))), line);
        assert_eq!(act.log(), Path::new("/jobs/dump.log"));
        let options = CriuOptions { log: Some("/tmp/x".into()), ..CriuOptions::default() };
        let act = CriuInvocation { plugins: None, options: &options, ..act };
        assert_eq!(words(&act.command(Path::new("criu"))), "dump -t 7 -D /img -W /jobs -v4 --shell-job");
        assert_eq!(act.log(), Path::new("/tmp/x"));
    }

    #[test]
    fn a_folder_of_plugins_is_given_once_and_only_where_needed() {
        let chosen = tempfile::tempdir().unwrap();
        fs::write(chosen.path().join(plugin_folder::FILE), "").unwrap();
        let none = Programs { criu: None, plugin_dir: None };
        let one = Programs { criu: None, plugin_dir: Some(chosen.path().to_owned()) };
        let plain = CriuOptions::default();
        assert_eq!(none.plugins(false, &plain).unwrap(), None, "nothing needs it");
        assert_eq!(one.plugins(false, &plain).unwrap().as_deref(), Some(chosen.path()), "it was asked for");
        for option in [&["-L", "/x"][..], &["--libdir", "/x"], &["--libdir=/x"]] {
            let given = read(option).unwrap();
            assert_eq!(none.plugins(true, &given).unwrap(), None, "{option:?}");
            assert!(one.plugins(true, &given).unwrap_err().to_string().contains("--libdir"), "{option:?}");
        }
    }

    #[test]
    fn only_the_last_error_lines_of_a_log_are_shown() {
        let mut log = String::from("(00.1) Warn  (x.c:1): no\n");
        for number in 0..20 {
            log.push_str(&format!("(00.2) Error (criu/x.c:{number}): went wrong\n(00.2) fine\n"));
        }
        let shown = criu::error_lines(&log, SHOWN);
        assert_eq!(shown.len(), SHOWN);
        assert!(shown.iter().all(|line| line.contains("went wrong")) && shown[SHOWN - 1].contains("x.c:19"));
    }
}
