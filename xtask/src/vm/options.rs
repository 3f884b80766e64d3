// SPDX-License-Identifier: MIT OR Apache-2.0
//! The arguments of `cargo xtask vm`.

use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

/// Space for the file system itself, with some to spare. MiB.
const SMALLEST_DISK: u32 = 16;

/// Memory of a machine unless `--mem` says otherwise, MiB.
pub(super) const MEMORY: u32 = 4096;

/// A kernel series of Debian, of which the newest is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Series {
    /// Debian 13's.
    Linux6_12,
    /// Debian sid's.
    Linux7,
}

impl Series {
    pub(crate) const ALL: [Self; 2] = [Self::Linux6_12, Self::Linux7];

    /// The name in the option, and in the root's `/kernels`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Linux6_12 => "6.12",
            Self::Linux7 => "7",
        }
    }

    fn named(name: &str) -> anyhow::Result<Self> {
        let found = Self::ALL.into_iter().find(|series| series.name() == name);
        found.with_context(|| format!("--kernel {name}: no such kernel; use 6.12 or 7"))
    }
}

/// Which Debian system a machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum System {
    /// With all that tests and measurements use, and with every kernel.
    Whole,
    /// With what the demo needs and sid's kernel alone, because a visitor waits while it is made.
    Demo,
}

/// A scratch disk of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Disk {
    /// Size, MiB; the host allocates what is written.
    pub(crate) mib: u32,
    /// Reads and writes together, in 10^6 bytes a second; without one, as fast as the host's.
    pub(crate) mbps: Option<u32>,
}

impl Disk {
    /// `MIB` or `MIB@MBPS`.
    fn parse(text: &str) -> anyhow::Result<Self> {
        let (size, rate) = text.split_once('@').map_or((text, None), |(size, rate)| (size, Some(rate)));
        let mib = number("--disk", size)?;
        ensure!(mib >= SMALLEST_DISK, "--disk {mib}: at least {SMALLEST_DISK} MiB");
        Ok(Self { mib, mbps: rate.map(|rate| number("--disk, MB/s", rate)).transpose()? })
    }
}

/// One run of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Options {
    pub(crate) system: System,
    pub(crate) series: Series,
    /// Virtual processors.
    pub(crate) processors: u32,
    /// Memory, MiB; the host allocates what is used.
    pub(crate) memory: u32,
    /// Parameters of softgpu.ko.
    pub(crate) module_arguments: String,
    /// More words for the kernel's command line.
    pub(crate) kernel_arguments: String,
    /// A disk in addition to the system's, for measurements.
    pub(crate) disk: Option<Disk>,
    /// From the start of the machine to its end.
    pub(crate) time_limit: Duration,
    /// Program and arguments; not empty.
    pub(crate) command: Vec<String>,
}

impl Options {
    /// The defaults for a command.
    pub(crate) fn new(command: Vec<String>) -> Self {
        Self {
            system: System::Whole,
            series: Series::Linux6_12,
            processors: 2,
            memory: MEMORY,
            module_arguments: String::new(),
            kernel_arguments: String::new(),
            disk: None,
            time_limit: Duration::from_secs(600),
            command,
        }
    }

    /// The defaults of the demo's machine.
    pub(crate) fn for_demo(command: Vec<String>) -> Self {
        Self { system: System::Demo, series: Series::Linux7, ..Self::new(command) }
    }

    /// `[--option value]... -- command argument...`
    pub(crate) fn parse(words: &[&str]) -> anyhow::Result<Self> {
        let split = words.iter().position(|word| *word == "--");
        let (before, command) = words.split_at(split.context(
            "the command comes after `--`, for example: cargo xtask vm --kernel 7 -- sh -c 'uname -r'",
        )?);
        let command: Vec<String> = command[1..].iter().map(|word| (*word).to_owned()).collect();
        ensure!(!command.is_empty(), "there is no command after `--`");
        let mut options = Self::new(command);
        let mut words = before.iter();
        while let Some(&option) = words.next() {
            let value = || words.clone().next().with_context(|| format!("{option} needs a value"));
            match option {
                "--kernel" => options.series = Series::named(value()?)?,
                "--smp" => options.processors = number(option, value()?)?,
                "--mem" => options.memory = number(option, value()?)?,
                "--module-args" => options.module_arguments = (*value()?).to_owned(),
                "--kernel-args" => options.kernel_arguments = (*value()?).to_owned(),
                "--disk" => options.disk = Some(Disk::parse(value()?)?),
                "--time-limit" => {
                    options.time_limit = Duration::from_secs(number(option, value()?)?.into());
                }
                other => bail!(
                    "`{other}` is no option of `cargo xtask vm`: --kernel, --smp, --mem (MiB), \
                     --module-args, --kernel-args, --disk (MiB or MiB@MB/s) and --time-limit (seconds) are"
                ),
            }
            words.next();
        }
        Ok(options)
    }
}

fn number(option: &str, text: &str) -> anyhow::Result<u32> {
    let number = text.parse().ok().filter(|number| *number > 0);
    number.with_context(|| format!("{option} {text}: expected a whole number above 0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(words: &[&str]) -> String {
        format!("{:#}", Options::parse(words).unwrap_err())
    }

    #[test]
    fn a_command_alone_gets_the_defaults() {
        let options = Options::parse(&["--", "ls", "-l"]).unwrap();
        assert_eq!(options, Options::new(vec!["ls".to_owned(), "-l".to_owned()]));
    }

    #[test]
    fn options_are_before_the_dashes_and_the_command_after() {
        let words = ["--kernel", "7", "--smp", "3", "--mem", "512", "--module-args", "gpus=2 xnack=1"];
        let more = ["--kernel-args", "lsm=yama quiet", "--disk", "512@200", "--time-limit", "9"];
        let command = ["--", "sh", "--", "--smp"];
        let options = Options::parse(&[&words[..], &more[..], &command[..]].concat()).unwrap();
        assert_eq!((options.series, options.processors, options.memory), (Series::Linux7, 3, 512));
        assert_eq!(options.module_arguments, "gpus=2 xnack=1");
        assert_eq!(options.kernel_arguments, "lsm=yama quiet");
        assert_eq!(options.disk, Some(Disk { mib: 512, mbps: Some(200) }));
        assert_eq!(options.time_limit, Duration::from_secs(9));
        assert_eq!(options.command, ["sh", "--", "--smp"]);
    }

    #[test]
    fn a_disk_without_a_rate_is_as_fast_as_the_host_s() {
        let options = Options::parse(&["--disk", "64", "--", "ls"]).unwrap();
        assert_eq!(options.disk, Some(Disk { mib: 64, mbps: None }));
    }

    #[test]
    fn wrong_options_are_named() {
        assert!(refusal(&["ls"]).contains("after `--`"));
        assert!(refusal(&["--"]).contains("no command"));
        assert!(refusal(&["--kernel", "5", "--", "ls"]).contains("6.12 or 7"));
        assert!(refusal(&["--smp", "0", "--", "ls"]).contains("--smp 0"));
        assert!(refusal(&["--disk", "9", "--", "ls"]).contains("at least 16 MiB"));
        assert!(refusal(&["--disk", "64@fast", "--", "ls"]).contains("MB/s fast"));
        assert!(refusal(&["--disk", "64@", "--", "ls"]).contains("whole number above 0"));
        assert!(refusal(&["--smp", "--", "ls"]).contains("--smp needs a value"));
        assert!(refusal(&["--gpu", "1", "--", "ls"]).contains("`--gpu` is no option"));
    }
}
