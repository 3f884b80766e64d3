// SPDX-License-Identifier: MIT OR Apache-2.0
//! Command lines: CRIU's options, pidfiles of daemons, and the unit that is shipped.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::WaitStatus;
use nix::unistd::Pid;
use rewake_tests::daemon::{has_namespaces, processes_naming};
use rewake_tests::printed::{PrintedCommand, Terminals, recipe};
use rewake_tests::process::{adopt_orphans, children, kill_all, run, wait_child, wait_pid};
use rewake_tests::scene::{ACT, END};
use rewake_tests::server::rewake;
use rewake_tests::{Criu, Scene, Verdict, need, skip};

#[test]
fn long_options_with_an_equals_sign_and_in_words_work() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 16).unwrap();
    let setup = scene.setup().unwrap().joined();
    let mut server = setup.listening().unwrap();
    scene.go().unwrap();
    scene.restore().unwrap();
    scene.expect_good_end(&mut server).unwrap();
    assert!(fs::metadata(setup.log()).unwrap().len() > 0, "-o names a file below the work directory");
}

/// Scripts give the same options to `dump`, `restore` and `lazy-pages`.
#[test]
fn options_that_mean_nothing_here_are_accepted() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 16).unwrap();
    let mut setup = scene.setup().unwrap();
    for option in [
        "-jl",
        "--tcp-est",
        "--manage-cgroups",
        "--libdir",
        "/",
        "--config=/dev/null",
        "--status-fd",
        "-1",
        "-t",
        "1",
    ] {
        setup = setup.with(option);
    }
    let mut server = setup.listening().unwrap();
    scene.go().unwrap();
    scene.restore().unwrap();
    scene.expect_good_end(&mut server).unwrap();
}

#[test]
fn a_descriptor_that_is_not_open_is_refused_by_its_number() {
    let refused = |arguments: &[&str]| {
        let output = Command::new(rewake().unwrap()).args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && said.lines().count() == 1, "{said}");
        said
    };
    let folder = tempfile::tempdir().unwrap();
    let images = folder.path().to_str().unwrap();
    assert!(
        refused(&["page-server", "-D", images, "--status-fd", "99"])
            .contains("--status-fd 99: this descriptor")
    );
    assert!(
        refused(&["page-server", "-D", images, "--ps-socket", "99"])
            .contains("--ps-socket 99: this descriptor")
    );
    assert!(refused(&["page-server", "-D", images, "--ps-socket", "0"]).contains("is no socket"));
}

#[test]
fn without_a_work_directory_socket_and_log_are_with_the_images() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 16).unwrap();
    let mut server = scene.setup().unwrap().without_work_dir().listening().unwrap();
    assert!(fs::exists(scene.images().join("lazy-pages.socket")).unwrap());
    assert!(fs::exists(scene.images().join("lazy.log")).unwrap());
    scene.go().unwrap();
    criu.restore(&scene.images(), &scene.images()).unwrap();
    scene.expect_good_end(&mut server).unwrap();
}

/// Kills a daemon, which no other code ends.
struct Daemon(Pid);

impl Drop for Daemon {
    fn drop(&mut self) {
        let below = children(self.0);
        kill_all(&[self.0]);
        kill_all(&below);
    }
}

#[test]
fn a_detached_server_listens_at_once_and_writes_its_pidfile() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 16).unwrap();
    let pidfile = scene.work().join("pid");
    let setup = scene.setup().unwrap().with("-d").with("--pidfile").with(pidfile.to_str().unwrap());
    let status = run(setup.command().stdout(Stdio::null()).stderr(Stdio::null()), END).unwrap();
    assert_eq!(status.code(), Some(0), "{}", setup.text());
    let daemon = Daemon(Pid::from_raw(fs::read_to_string(&pidfile).unwrap().parse().unwrap()));
    scene.go().unwrap();
    scene.restore().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
    let ended = wait_pid(daemon.0, END).unwrap();
    assert_eq!(ended, Some(WaitStatus::Exited(daemon.0, 0)));
}

#[test]
fn an_option_that_does_not_exist_is_refused() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 4).unwrap();
    let refusal = scene.setup().unwrap().with("--no-such-option").start().unwrap().expect_err("accepted");
    assert!(refusal.status.code().is_some_and(|code| code != 0), "{}", refusal.status);
    assert!(refusal.line_with(&["no-such-option"]), "{}", refusal.text);
}

/// The commands of the README and of the pages about one host, from top to bottom.
#[test]
fn the_printed_commands_of_one_host_work() {
    let criu = need!(Criu::main());
    let mut terminals = Terminals::open(&criu, 4).unwrap();
    let (folder, pid) = (terminals.folder(""), terminals.migration.pid().to_string());
    let place = |name: &str| folder.join(name).display().to_string();
    fs::create_dir(folder.join("IMG")).unwrap();
    let line = format!("criu dump -t {pid} -D IMG --leave-running");
    terminals.run(&PrintedCommand { host: String::new(), line }).unwrap();

    let names = [("PID", &pid[..]), ("/run/rewake.pid", &place("pid"))];
    let commands = recipe("local", &names).commands();
    let [mkdir, dump, restore, lazy, criu_restore, serve, recover] = &commands[..] else {
        panic!("{commands:?}")
    };
    terminals.run(mkdir).unwrap();
    terminals.run(dump).unwrap();
    terminals.run(restore).unwrap();
    assert_eq!(terminals.migration.processes(), (1, 0));
    terminals.end("target").unwrap();
    terminals.run(lazy).unwrap();
    terminals.run(criu_restore).unwrap();
    terminals.migration.expect_right_bytes().unwrap();
    terminals.run(serve).unwrap();
    terminals.run(recover).unwrap();
    terminals.end("rewake").unwrap();

    for command in recipe("inspect", &[]).commands().iter_mut().chain(&mut recipe("doctor", &[]).commands()) {
        command.line = command.line.replace(['[', ']'], "");
        let mut typed = terminals.type_in(command).unwrap();
        let status = typed.ended().unwrap();
        // `rewake doctor` ends with 1 where the machine lacks something.
        assert!(matches!(status.code(), Some(0 | 1)), "{}", typed.text());
        serde_json::from_str::<serde_json::Value>(&typed.text()).expect("JSON");
    }
    for command in &recipe("seal", &[]).commands() {
        terminals.run(command).unwrap();
    }
    let store = format!("file://{}", place("store"));
    for command in &recipe("store", &[("s3://bucket/models", &store)]).commands() {
        terminals.run(command).unwrap();
    }
    let [serve, curl] = &recipe("metrics", &[("/var/lib/rewake/cache", &place("cache"))]).commands()[..]
    else {
        panic!("metrics")
    };
    terminals.run(serve).unwrap();
    assert!(terminals.run(curl).unwrap().contains("# EOF"));
    terminals.end("rewake").unwrap();
}

#[test]
fn a_pidfile_that_exists_is_refused_before_a_server_is_started() {
    let folder = tempfile::tempdir().unwrap();
    let (images, pidfile) = (folder.path().to_str().unwrap(), folder.path().join("pid"));
    // Of a process that has ended: CRIU refuses every file.
    fs::write(&pidfile, "4194304").unwrap();
    for server in ["lazy-pages", "page-server"] {
        let mut command = Command::new(rewake().unwrap());
        command.args([server, "-D", images, "-d", "--pidfile", "pid"]).stdin(Stdio::null());
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.starts_with("rewake: --pidfile pid: the file exists already"), "{said}");
        assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
        assert_eq!(processes_naming(images), [], "{server}");
    }
    assert_eq!(fs::read_to_string(&pidfile).unwrap(), "4194304");
}

/// `rewake serve -d` with its files in a folder.
fn agent(folder: &Path, socket: &str) -> Output {
    let mut command = Command::new(rewake().unwrap());
    // The agent keeps standard error open: a pipe would not end.
    let said = folder.join("said");
    command
        .args(["serve", "-d", "--socket"])
        .arg(folder.join(socket))
        .arg("--pidfile")
        .arg(folder.join("pid"));
    command.arg("-o").arg(folder.join("log")).stdin(Stdio::null());
    command.stdout(Stdio::null()).stderr(fs::File::create(&said).unwrap());
    let status = command.status().unwrap();
    Output { status, stdout: Vec::new(), stderr: fs::read(said).unwrap() }
}

#[test]
fn an_agent_takes_over_the_pidfile_of_one_that_has_ended() {
    adopt_orphans().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (folder, pidfile) = (folder.path(), folder.path().join("pid"));
    let started = || {
        let output = agent(folder, "socket");
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(said, format!("rewake: listening on {}\n", folder.join("socket").display()));
        assert_eq!(output.status.code(), Some(0));
        Pid::from_raw(fs::read_to_string(&pidfile).unwrap().parse().unwrap())
    };
    let ended = |pid, signal| {
        kill(pid, signal).unwrap();
        wait_pid(pid, END).unwrap().expect("it ends")
    };
    let killed = started();
    assert_eq!(ended(killed, Signal::SIGKILL), WaitStatus::Signaled(killed, Signal::SIGKILL, false));
    assert!(pidfile.exists());

    let stopped = started();
    assert_ne!(stopped, killed);
    let second = agent(folder, "another");
    let said = String::from_utf8(second.stderr).unwrap();
    let expected = format!("rewake: --pidfile {}: it names process {stopped}, which runs", pidfile.display());
    assert!(said.starts_with(&expected) && said.lines().count() == 1, "{said}");
    assert_eq!((second.status.code(), folder.join("another").exists()), (Some(1), false));
    assert_eq!(fs::read_to_string(&pidfile).unwrap(), stopped.to_string());

    assert_eq!(ended(stopped, Signal::SIGTERM), WaitStatus::Exited(stopped, 0));
    assert!(!pidfile.exists(), "a clean end removes it");
    let last = started();
    assert_eq!(ended(last, Signal::SIGTERM), WaitStatus::Exited(last, 0));
}

/// The units that are shipped.
fn units() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../page-server/package")
}

#[test]
fn the_command_line_of_the_unit_starts_an_agent() {
    let text = fs::read_to_string(units().join("rewake.service")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
    let (_, arguments) = line.split_once(' ').unwrap();
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let mut command = Command::new(rewake().unwrap());
    command.args(arguments.split(' ')).arg("--socket").arg(&socket);
    let (reader, writer) = std::io::pipe().unwrap();
    let mut agent = command.stdin(Stdio::null()).stderr(writer).spawn().unwrap();
    drop(command);
    let line = std::io::BufRead::lines(std::io::BufReader::new(reader)).map_while(Result::ok);
    let mut line = line.filter(|line| line.starts_with("rewake: "));
    assert_eq!(line.next(), Some(format!("rewake: listening on {}", socket.display())));
    kill(Pid::from_raw(agent.id().cast_signed()), Signal::SIGTERM).unwrap();
    assert_eq!(wait_child(&mut agent, END).expect("it ends").code(), Some(0));
}

/// Runs the units under a systemd of its own, in namespaces with an empty /run: a client starts the agent by
/// its socket, the agent is killed, is started again, and is stopped.
const UNDER_SYSTEMD: &str = r#"
mount -t tmpfs none /run && mkdir -p /run/systemd/system /run/units && mkdir -m 700 /run/user || exit
for tree in /sys/fs/cgroup /sys/fs/cgroup/systemd /sys/fs/cgroup/unified; do
    [ -e "$tree/cgroup.procs" ] || continue
    mkdir "$tree/$GROUP" && echo $$ >"$tree/$GROUP/cgroup.procs" || { echo no cgroups; exit; }
done
export HOME=/run XDG_RUNTIME_DIR=/run/user SYSTEMD_UNIT_PATH=/run/units: SYSTEMD_LOG_TARGET=console
sed "s|^ExecStart=[^ ]*|ExecStart=$REWAKE|" "$UNITS/rewake.service" >/run/units/rewake.service
cp "$UNITS/rewake.socket" /run/units/
"$SYSTEMD" --user --unit=rewake.socket </dev/null >/run/log 2>&1 &
agent() {
    for attempt in $(seq 600); do
        "$REWAKE" status --json 2>/dev/null | sed -n 's/.*"pid": *\([0-9]*\).*/\1/p' | grep . && return
        sleep 0.1
    done
    cat /run/log
}
show() { systemctl --user show -P "$1" rewake.service; }
for attempt in $(seq 600); do
    [ -S /run/rewake/rewake.sock ] && break
    sleep 0.1
done
echo "before a client: $(show ActiveState), $(stat -c %a /run/rewake /run/rewake/rewake.sock | xargs)"
first=$(agent)
[ "$first" = "$(show MainPID)" ] && echo "the agent answers"
kill -9 "$first"
second=$(agent)
[ "$first" != "$second" ] && [ "$second" = "$(show MainPID)" ] && echo "it was started again: $(show \
    NRestarts)"
systemctl --user stop rewake.socket rewake.service
echo "$(show Result) $(show ActiveState) $(show KillMode) $(show OOMPolicy)"
"$REWAKE" status 2>/dev/null || echo "no agent answers"
"#;

#[test]
fn the_units_run_under_systemd_and_again_after_a_kill() {
    let places = ["/usr/lib/systemd/systemd", "/lib/systemd/systemd"].map(Path::new);
    let Some(systemd) = places.into_iter().find(|path| path.exists()) else { skip!("there is no systemd") };
    if !has_namespaces() {
        skip!("this machine makes no namespaces");
    }
    let group = format!("rewake-unit-{}", std::process::id());
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", UNDER_SYSTEMD]);
    command
        .env("SYSTEMD", systemd)
        .env("REWAKE", rewake().unwrap())
        .env("UNITS", units())
        .env("GROUP", &group);
    let output = command.stdin(Stdio::null()).output().unwrap();
    let remove = "find /sys/fs/cgroup -depth -type d -path \"*/$0*\" -exec rmdir {} + 2>/dev/null";
    let _ = Command::new("sh").args(["-c", remove, &group]).status();
    let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    if said.starts_with("no cgroups") {
        skip!("this machine makes no cgroups");
    }
    let expected = [
        "before a client: inactive, 700 600",
        "the agent answers",
        "it was started again: 1",
        "success inactive process continue",
        "no agent answers",
    ];
    assert_eq!(said.lines().collect::<Vec<_>>(), expected);
}
