// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rewrites command lines as CRIU reads them into those that clap reads.
//!
//! `rewake lazy-pages` and `rewake page-server` stand in the places of CRIU's commands, whose scripts give
//! the same options to all of them. So an option that means nothing there is accepted and left out, as CRIU
//! 4.1 and 4.2 do it; an option may be abbreviated, as getopt_long(3) has it; and the last one of repeated
//! options counts. Names and arguments are those that `criu` itself reports in its errors.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

use clap::CommandFactory as _;

use crate::cli::Cli;

/// The commands that are read so.
const COMMANDS: [&str; 2] = ["lazy-pages", "page-server"];
/// CRIU's options without an argument.
const FLAGS: &str = "all allow-uprobes auto-dedup daemon deprecated display-stats enable-external-masters \
    enable-external-sharing evasive-devices exec-cmd experimental extra file-locks force-irmap ghost-fiemap \
    help lazy-pages leave-running leave-stopped link-remap log-pid mntns-compat-mode ms no-default-config \
    page-server restore-detached restore-sibling shell-job skip-file-rwx-check skip-in-flight stream \
    tcp-close tcp-established tls tls-no-cn-verify track-mem unprivileged version weak-sysctls";
/// The options that `--no-` before their name takes back.
const NEGATED: &str = "allow-uprobes auto-dedup deprecated display-stats evasive-devices experimental extra \
    file-locks force-irmap ghost-fiemap link-remap log-pid mntns-compat-mode page-server restore-detached \
    restore-sibling shell-job skip-file-rwx-check skip-in-flight stream tcp-close tcp-established tls \
    track-mem unprivileged weak-sysctls";
/// CRIU's options with an argument.
const VALUES: &str = "action-script address cgroup-dump-controller cgroup-props cgroup-props-file \
    cgroup-root cgroup-yard close config empty-ns enable-fs ext-mount-map external feature file-validation \
    freeze-cgroup ghost-limit images-dir inherit-fd irmap-scan-path join-ns libdir log-file \
    lsm-mount-context lsm-profile network-lock pidfile port pre-dump-mode prev-images-dir ps-socket root \
    skip-mnt status-fd timeout tls-cacert tls-cacrl tls-cert tls-key tree veth-pair work-dir";
/// CRIU's options that may have an argument, after an equals sign.
const OPTIONAL: &str = "cpu-cap ext-unix-sk manage-cgroups verbosity";
/// Those that CRIU refuses for these commands, too.
const REFUSED: &str = "exec-cmd inherit-fd mntns-compat-mode ms stream";
/// What CRIU's letters stand for.
const LETTERS: [(u8, &str); 18] = [
    (b'd', "restore-detached"),
    (b'h', "help"),
    (b'j', "shell-job"),
    (b'l', "file-locks"),
    (b'o', "log-file"),
    (b'r', "root"),
    (b's', "leave-stopped"),
    (b't', "tree"),
    (b'v', VERBOSITY),
    (b'x', "ext-unix-sk"),
    (b'D', "images-dir"),
    (b'J', "join-ns"),
    (b'L', "libdir"),
    (b'M', "ext-mount-map"),
    (b'R', "leave-running"),
    (b'S', "restore-sibling"),
    (b'V', "version"),
    (b'W', "work-dir"),
];
const VERBOSITY: &str = "verbosity";
/// What is about the page server of `lazy-pages`: without `--page-server`, there is none.
const OF_PAGE_SERVER: &str = "address port ps-socket tls";
/// What is about TLS: without `--tls`, there is none.
const OF_TLS: &str = "tls-cacert tls-cacrl tls-cert tls-key tls-no-cn-verify";

/// Rewrites a command line, which begins with the program.
///
/// # Errors
/// An abbreviation has several meanings, or CRIU refuses the option, too.
pub fn normalise(args: impl Iterator<Item = OsString>) -> Result<Vec<OsString>, String> {
    let args: Vec<OsString> = args.collect();
    let Some((program, rest)) = args.split_first() else { return Ok(args) };
    let first = CriuLine::read(rest, &Known::of(None)).operands.into_iter().next();
    let command = first.and_then(|first| COMMANDS.into_iter().find(|command| first == *command));
    match command {
        Some(command) => CriuLine::read(rest, &Known::of(Some(command))).for_clap(program, command),
        None => Ok(verbosity_of_all(args)),
    }
}

/// Rewrites `-v`, `-v4` and `-vvv` to `--verbosity=N`.
fn verbosity_of_all(args: Vec<OsString>) -> Vec<OsString> {
    let mut ours = true; // up to `--`: the rest are arguments of another program
    let level = |arg: &OsString| {
        let rest = arg.as_bytes().strip_prefix(b"-v")?;
        raised(None, rest)
    };
    let normalised = args.into_iter().map(|arg| {
        ours &= arg != "--";
        match level(&arg) {
            Some(level) if ours => format!("--verbosity={level}").into(),
            _ => arg,
        }
    });
    normalised.collect()
}

/// The level after another `-v` with this argument: CRIU counts repeated letters, and a number sets it.
fn raised(level: Option<u8>, argument: &[u8]) -> Option<u8> {
    if argument.iter().all(|byte| *byte == b'v') {
        let count = u8::try_from(argument.len() + 1).unwrap_or(u8::MAX);
        return Some(level.unwrap_or(0).saturating_add(count));
    }
    let number: u64 = str::from_utf8(argument).ok()?.parse().ok()?;
    Some(u8::try_from(number).unwrap_or(u8::MAX))
}

/// Whether an option has an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Argument {
    None,
    Needed,
    Optional,
}

/// The options by their names.
#[derive(Debug)]
struct Known {
    criu: BTreeMap<String, Argument>,
    /// Of our command: with CRIU's names among them.
    own: BTreeMap<String, Argument>,
}

impl Known {
    fn of(command: Option<&str>) -> Self {
        let mut criu = BTreeMap::new();
        for (names, argument) in
            [(FLAGS, Argument::None), (VALUES, Argument::Needed), (OPTIONAL, Argument::Optional)]
        {
            criu.extend(names.split_whitespace().map(|name| (name.to_owned(), argument)));
        }
        criu.extend(NEGATED.split_whitespace().map(|name| (format!("no-{name}"), Argument::None)));
        let cli = Cli::command();
        let command = command.and_then(|name| cli.find_subcommand(name));
        let own = command.into_iter().flat_map(clap::Command::get_arguments).filter_map(|option| {
            let has_value = option.get_action().takes_values();
            Some((option.get_long()?.to_owned(), if has_value { Argument::Needed } else { Argument::None }))
        });
        Self { criu, own: own.collect() }
    }

    /// Finds the option that a text means, or the beginning of whose name alone it is: one of CRIU's before
    /// ours.
    fn find(&self, given: &str) -> Result<Option<(&str, Argument)>, String> {
        for known in [&self.criu, &self.own] {
            if let Some((name, argument)) = known.get_key_value(given) {
                return Ok(Some((name, *argument)));
            }
        }
        for known in [&self.criu, &self.own] {
            let all: Vec<_> = known.iter().filter(|(name, _)| name.starts_with(given)).collect();
            match *all {
                [] => {}
                [(name, argument)] => return Ok(Some((name, *argument))),
                _ => {
                    let names = all.iter().map(|(name, _)| format!("--{name}"));
                    let names = names.collect::<Vec<_>>().join(", ");
                    return Err(format!("--{given} may be short for {names}: write more of the name"));
                }
            }
        }
        Ok(None)
    }
}

/// A command line, as getopt_long(3) reads it.
#[derive(Debug, Default)]
struct CriuLine {
    /// Of each option the last argument.
    options: BTreeMap<String, Option<OsString>>,
    /// Options that are not known, for clap to refuse.
    unknown: Vec<OsString>,
    operands: Vec<OsString>,
    /// What is wrong first.
    wrong: Option<String>,
}

impl CriuLine {
    fn read(args: &[OsString], known: &Known) -> Self {
        let (mut line, mut args) = (Self::default(), args.iter());
        while let Some(arg) = args.next() {
            let bytes = arg.as_bytes();
            if bytes == b"--" {
                line.operands.extend(args.by_ref().cloned());
            } else if let Some(long) = bytes.strip_prefix(b"--") {
                line.read_long(arg, long, known, &mut args);
            } else if bytes.len() > 1 && bytes[0] == b'-' {
                line.read_letters(arg, &bytes[1..], known, &mut args);
            } else {
                line.operands.push(arg.clone());
            }
        }
        line
    }

    fn read_long<'a>(
        &mut self,
        arg: &OsString,
        long: &[u8],
        known: &Known,
        rest: &mut impl Iterator<Item = &'a OsString>,
    ) {
        let mut parts = long.splitn(2, |byte| *byte == b'=');
        // A name that is no text is none of an option.
        let name = parts.next().and_then(|name| str::from_utf8(name).ok()).unwrap_or_default();
        let attached = parts.next().map(|value| OsStr::from_bytes(value).to_owned());
        match known.find(name) {
            Err(wrong) => {
                self.wrong.get_or_insert(wrong);
            }
            Ok(Some((name, argument))) => match (argument, attached) {
                (Argument::None, Some(_)) => self.unknown.push(arg.clone()),
                (Argument::Needed, None) => match rest.next() {
                    Some(value) => self.take(name, Some(value.clone())),
                    None => self.unknown.push(arg.clone()),
                },
                (_, attached) => self.take(name, attached),
            },
            Ok(None) => self.unknown.push(arg.clone()),
        }
    }

    fn read_letters<'a>(
        &mut self,
        arg: &OsString,
        mut letters: &[u8],
        known: &Known,
        rest: &mut impl Iterator<Item = &'a OsString>,
    ) {
        while let Some((letter, after)) = letters.split_first() {
            letters = after;
            let name = LETTERS.iter().find(|(of, _)| of == letter).map(|(_, name)| *name);
            let attached = || (!after.is_empty()).then(|| OsStr::from_bytes(after).to_owned());
            match name.and_then(|name| Some((name, *known.criu.get(name)?))) {
                Some((name, Argument::None)) => {
                    self.take(name, None);
                    continue;
                }
                Some((name, Argument::Optional)) => self.take(name, attached()),
                Some((name, Argument::Needed)) => match attached().or_else(|| rest.next().cloned()) {
                    Some(value) => self.take(name, Some(value)),
                    None => self.unknown.push(arg.clone()),
                },
                None => self.unknown.push(arg.clone()),
            }
            return;
        }
    }

    fn take(&mut self, name: &str, value: Option<OsString>) {
        let is_refused = REFUSED.split_whitespace().any(|refused| refused == name);
        if is_refused {
            self.wrong.get_or_insert_with(|| {
                format!("--{name}: criu refuses it for this command, too: leave it out")
            });
        }
        if let Some(negated) = name.strip_prefix("no-")
            && NEGATED.split_whitespace().any(|of| of == negated)
        {
            self.options.remove(of_clap(negated));
            return;
        }
        let value = if name == VERBOSITY {
            let before = self.options.get(VERBOSITY).and_then(|level| level.as_ref()?.to_str()?.parse().ok());
            let given = value.unwrap_or_default();
            raised(before, given.as_bytes()).map_or(Some(given), |level| Some(level.to_string().into()))
        } else {
            value
        };
        self.options.insert(of_clap(name).to_owned(), value);
    }

    /// The same for clap, which knows the options of this command.
    fn for_clap(mut self, program: &OsString, command: &str) -> Result<Vec<OsString>, String> {
        if let Some(wrong) = self.wrong {
            return Err(wrong);
        }
        if self.options.contains_key("version") {
            return Ok(vec![program.clone(), "--version".into()]);
        }
        let has = |options: &BTreeMap<_, _>, name: &str| options.contains_key(name);
        let is_among = |names: &str, name: &str| names.split_whitespace().any(|of| of == name);
        if command == "lazy-pages" && !has(&self.options, "page-server") {
            self.options.retain(|name, _| !is_among(OF_PAGE_SERVER, name));
        }
        if !has(&self.options, "tls") {
            self.options.retain(|name, _| !is_among(OF_TLS, name));
        }
        let own = Known::of(Some(command)).own;
        let mut args = vec![program.clone(), command.into()];
        for (name, value) in self.options {
            if name != "help" && !own.contains_key(&name) {
                continue; // CRIU reads it, too, and does nothing
            }
            let mut arg = format!("--{name}").into_bytes();
            if let Some(value) = value {
                arg.push(b'=');
                arg.extend(value.as_bytes());
            }
            args.push(OsString::from_vec(arg));
        }
        args.extend(self.unknown);
        // The first operand is the command.
        args.extend(self.operands.into_iter().skip(1));
        Ok(args)
    }
}

/// The name of an option of CRIU's for clap.
fn of_clap(name: &str) -> &str {
    if name == "restore-detached" { "daemon" } else { name }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::{Cli, Command};

    fn normalised(args: &[&str]) -> Vec<String> {
        let args = normalise(args.iter().map(OsString::from)).unwrap();
        args.into_iter().map(|arg| arg.into_string().unwrap()).collect()
    }

    #[test]
    fn all_of_criu_s_spellings_of_verbosity_are_read() {
        for (given, level) in [("-v", 1), ("-vv", 2), ("-vvvv", 4), ("-v4", 4), ("-v0", 0)] {
            assert_eq!(normalised(&[given]), [format!("--verbosity={level}")], "{given}");
        }
    }

    #[test]
    fn the_long_option_has_its_value_after_an_equals_sign_as_criu_s_has() {
        let level = |given: &[&str]| {
            let cli = Cli::try_parse_from([&["rewake", "serve"], given].concat()).ok()?;
            let Command::Serve(options) = cli.command else { return None };
            Some(options.verbosity)
        };
        assert_eq!(
            [level(&[]), level(&["--verbosity"]), level(&["--verbosity=3"])],
            [Some(2), Some(1), Some(3)]
        );
        assert_eq!(level(&["--verbosity", "3"]), None, "CRIU refuses the number, too");
        let help = Cli::try_parse_from(["rewake", "serve", "--help"]).unwrap_err().to_string();
        assert!(help.contains("--verbosity[=<LEVEL>]"), "{help}");
    }

    /// The command line of a unit is of this program, so a unit that is shipped starts.
    #[test]
    fn the_command_line_of_the_shipped_unit_is_read() {
        let unit = include_str!("../package/rewake.service");
        let line = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
        let cli = Cli::try_parse_from(normalise(line.split(' ').map(OsString::from)).unwrap()).unwrap();
        let Command::Serve(options) = cli.command else { panic!("{line}") };
        assert_eq!(
            (options.verbosity, options.daemon),
            (3, false),
            "systemd watches the process that it starts"
        );
    }

    #[test]
    fn options_of_another_program_stay() {
        assert_eq!(normalised(&["-v", "--", "-v4"]), ["--verbosity=1", "--", "-v4"]);
    }

    #[test]
    fn other_arguments_stay() {
        let args = ["serve", "--verbosity=4", "--socket", "-dir-with-v", "--version", "-o", "v4"];
        assert_eq!(normalised(&[&["rewake"], &args[..]].concat())[1..], args);
    }

    /// A command line after its program and its command, as clap gets it.
    fn for_clap(line: &str) -> Result<String, String> {
        let words = ["rewake"].into_iter().chain(line.split(' ')).map(OsString::from);
        let args = normalise(words)?;
        let words: Vec<_> = args[2..].iter().map(|arg| arg.to_str().unwrap()).collect();
        Ok(words.join(" "))
    }

    #[test]
    fn what_means_nothing_here_is_left_out() {
        for left_out in [
            "--shell-job",
            "-j",
            "-jlsR",
            "--tcp-established",
            "--ext-unix-sk",
            "-x",
            "-x12",
            "--manage-cgroups=soft",
            "--manage-cgroups",
            "--cpu-cap",
            "-t 9",
            "--tree=9",
            "-L /lib",
            "--external dev[1/3]:x",
            "-M a:b",
            "--action-script -v",
            "--no-shell-job",
            "--shell",
            "--link",
            "--tcp-e",
            "--timeout -1",
            "--lazy-pages",
            "--prev-images-dir /a",
            "--address 1.2.3.4",
            "--port 5",
            "--ps-socket 7",
            "--tls",
            "--tls-key k",
            "--tls --tls-cert c",
            "--page-server --no-page-server",
            "-S",
            "--restore-s",
        ] {
            assert_eq!(
                for_clap(&format!("lazy-pages -D d {left_out} -W w")).as_deref(),
                Ok("--images-dir=d --work-dir=w")
            );
        }
        assert_eq!(for_clap("page-server --page-server --port 5 --tls-key k").as_deref(), Ok("--port=5"));
    }

    #[test]
    fn options_are_read_as_getopt_reads_them() {
        for (line, expected) in [
            ("lazy-pages -Dd -olog -d", "--daemon --images-dir=d --log-file=log"),
            ("lazy-pages -jdDx -vv", "--daemon --images-dir=x --verbosity=2"),
            ("lazy-pages -v -v", "--verbosity=2"),
            ("lazy-pages -v4 -v", "--verbosity=5"),
            ("lazy-pages --verbosity=999", "--verbosity=255"),
            ("lazy-pages --images a --imag=b", "--images-dir=b"),
            ("lazy-pages --restore-d", "--daemon"),
            ("lazy-pages --status-fd -1", "--status-fd=-1"),
            ("lazy-pages --page-s --addr a --port 5", "--address=a --page-server --port=5"),
            ("page-server --keep --insec --port 1", "--insecure --keep-listening --port=1"),
            ("lazy-pages --connect-timeout 5", "--connect-timeout=5"),
            ("-D d lazy-pages", "--images-dir=d"),
            ("-j -o l -v4 page-server", "--log-file=l --verbosity=4"),
        ] {
            assert_eq!(for_clap(line).as_deref(), Ok(expected), "{line}");
        }
    }

    #[test]
    fn what_is_wrong_is_left_to_clap_or_is_one_line() {
        for (line, expected) in [
            ("lazy-pages --bogus --port", "--bogus --port"),
            ("lazy-pages -jZ", "-jZ"),
            ("lazy-pages --daemon=1 operand", "--daemon=1 operand"),
            ("lazy-pages -- -v", "-v"),
        ] {
            assert_eq!(for_clap(line).as_deref(), Ok(expected), "{line}");
        }
        let ambiguous = for_clap("lazy-pages --tcp").unwrap_err();
        assert_eq!(
            ambiguous,
            "--tcp may be short for --tcp-close, --tcp-established: write more of the name"
        );
        assert!(
            for_clap("page-server --inherit-fd fd[0]:x")
                .unwrap_err()
                .starts_with("--inherit-fd: criu refuses it")
        );
        let version = normalise(["rewake", "lazy-pages", "-V"].into_iter().map(OsString::from));
        assert_eq!(version.unwrap(), ["rewake", "--version"]);
    }

    #[test]
    fn each_option_of_criu_is_taken_by_both_commands() {
        let names = |names: &'static str| names.split_whitespace();
        let flags = names(FLAGS).chain(names(OPTIONAL)).map(|name| format!("--{name}"));
        let negated = names(NEGATED).map(|name| format!("--no-{name}"));
        let values = names(VALUES).map(|name| format!("--{name}=1"));
        let letters = LETTERS.iter().filter(|(_, name)| !names(VALUES).any(|value| value == *name));
        let letters = letters.map(|(letter, _)| format!("-{}", char::from(*letter)));
        let is_other =
            |option: &String| ["help", "version", "-h", "-V"].iter().any(|other| option.contains(other));
        for option in flags.chain(negated).chain(values).chain(letters).filter(|option| !is_other(option)) {
            for command in COMMANDS {
                let args = ["rewake", command, &option].map(OsString::from);
                let refused = match normalise(args.into_iter()) {
                    Ok(args) => Cli::try_parse_from(args).err().map(|error| error.to_string()),
                    Err(wrong) => Some(wrong),
                };
                let name = option.trim_start_matches('-').split('=').next().unwrap();
                assert_eq!(
                    refused.is_some(),
                    names(REFUSED).any(|of| of == name),
                    "{command} {option}: {refused:?}"
                );
            }
        }
    }
}
