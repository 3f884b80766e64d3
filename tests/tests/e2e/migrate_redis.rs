// SPDX-License-Identifier: MIT OR Apache-2.0
//! A redis under load moves between two hosts. Its client has both addresses, as with a failover: it sees one
//! stall, and no value is lost.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rewake_testkit::hosts::{DESTINATION, HostNetwork, HostPair};
use rewake_testkit::{PATIENCE, until};
use rewake_tests::server::rewake;
use rewake_tests::{Criu, need};

/// Has redis itself; the package redis-server would start it.
const REDIS: &str = "/usr/bin/redis-check-rdb";
const NAME: &str = "redis-server";
const PORT: u16 = 6379;
const HOSTS: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 77, 0, 1), Ipv4Addr::new(10, 77, 0, 2)];
/// Time in which redis answers, or the client tries the other host.
const ANSWER: Duration = Duration::from_millis(300);
/// Keys that exist in addition to the client's: 100 MiB.
const KEYS: &str = "DEBUG POPULATE 100000 ballast 1000";
/// Longest time without an answer that counts as one stall.
const STALL: Duration = Duration::from_millis(200);

/// What the client saw.
#[derive(Debug, Default)]
struct Load {
    /// Writes that redis has acknowledged: key N has value N.
    written: u64,
    reads: u64,
    stalls: Vec<Stall>,
}

/// A time without an answer.
#[derive(Debug)]
struct Stall {
    time: Duration,
    /// Whether the other host answered after it.
    moved: bool,
}

struct RedisClient {
    stream: Option<BufReader<TcpStream>>,
    /// The host that answered last.
    host: usize,
}

impl RedisClient {
    /// Sends a command until it is answered.
    fn command(&mut self, command: &str) -> anyhow::Result<String> {
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            match self.try_command(command) {
                Ok(answer) => return Ok(answer),
                Err(_) => {
                    self.stream = None;
                    self.host = 1 - self.host;
                    sleep(Duration::from_millis(5));
                }
            }
        }
        bail!("{command}: no answer")
    }

    fn try_command(&mut self, command: &str) -> anyhow::Result<String> {
        if self.stream.is_none() {
            let stream = TcpStream::connect_timeout(&SocketAddr::from((HOSTS[self.host], PORT)), ANSWER)?;
            stream.set_read_timeout(Some(ANSWER))?;
            self.stream = Some(BufReader::new(stream));
        }
        let stream = self.stream.as_mut().context("a connection")?;
        stream.get_mut().write_all(format!("{command}\r\n").as_bytes())?;
        let mut line = String::new();
        ensure!(stream.read_line(&mut line)? > 0, "redis ended the connection");
        let Some(len) = line.strip_prefix('$') else { return Ok(line.trim_end().to_owned()) };
        let mut value = vec![0; len.trim_end().parse::<usize>()? + 2];
        stream.read_exact(&mut value)?;
        Ok(String::from_utf8_lossy(&value[..value.len() - 2]).into_owned())
    }
}

/// Writes and reads until the test says stop, then reads all that it has written.
fn load(network: &HostNetwork, stop: &AtomicBool) -> anyhow::Result<Load> {
    network.enter()?;
    let mut client = RedisClient { stream: None, host: 0 };
    let mut load = Load::default();
    while !stop.load(Ordering::Relaxed) {
        let (start, host) = (Instant::now(), client.host);
        let answer = client.command(&format!("SET key{0} {0}", load.written))?;
        ensure!(answer == "+OK", "SET: {answer}");
        load.written += 1;
        let key = load.written.wrapping_mul(0x9e37_79b9) % load.written;
        expect(&mut client, key)?;
        load.reads += 1;
        if start.elapsed() > STALL {
            load.stalls.push(Stall { time: start.elapsed(), moved: client.host != host });
        }
    }
    (0..load.written).try_for_each(|key| expect(&mut client, key))?;
    let ballast = client.command("GET ballast:99999")?;
    ensure!(ballast.starts_with("value:99999") && ballast.len() == 1000, "{ballast:?}");
    Ok(load)
}

fn expect(client: &mut RedisClient, key: u64) -> anyhow::Result<()> {
    let found = client.command(&format!("GET key{key}"))?;
    ensure!(found == key.to_string(), "key{key} is {found:?}");
    Ok(())
}

fn started(command: &mut Command) -> std::process::Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn a_redis_under_load_moves_with_one_stall_and_every_key() {
    let criu = need!(Criu::main());
    need!(
        Path::new(REDIS).exists().then_some(()).ok_or("redis is not installed: apt-get install redis-tools")
    );
    let folder = tempfile::tempdir().unwrap();
    let hosts = HostPair::start(folder.path()).unwrap();
    let program = folder.path().join(NAME);
    symlink(REDIS, &program).unwrap();
    let mut redis = Command::new(&program);
    redis.args(["--port", &PORT.to_string(), "--save", "", "--protected-mode", "no"]);
    redis.args(["--enable-debug-command", "yes"]);
    let mut redis = hosts.source.apart(&redis).spawn().unwrap();
    let pid = until(PATIENCE, || hosts.source.named(NAME).into_iter().min()).expect("redis");
    let pid = hosts.source.own_number(pid).unwrap().to_string();

    let mut receive = hosts.destination.command(rewake().unwrap());
    receive.args(["receive", "--address", DESTINATION, "--port", "7700", "--insecure", "--criu"]);
    let receive = started(receive.arg(AsRef::<std::ffi::OsStr>::as_ref(&criu)).args(["--", "--tcp-close"]));
    let network = hosts.destination.network().unwrap();
    let mut filler = RedisClient { stream: None, host: 0 };
    let filled = spawn(move || network.enter().and_then(|()| filler.command(KEYS))).join().unwrap();
    assert_eq!(filled.unwrap(), "+OK");
    let (network, stop) = (hosts.destination.network().unwrap(), Arc::new(AtomicBool::new(false)));
    let stopped = Arc::clone(&stop);
    let client = spawn(move || load(&network, &stopped));
    sleep(Duration::from_millis(500));

    let mut migrate = hosts.source.command(rewake().unwrap());
    migrate.args(["migrate", "-t", &pid, "--to", &format!("{DESTINATION}:7700"), "--insecure", "--criu"]);
    let migrate = started(migrate.arg(AsRef::<std::ffi::OsStr>::as_ref(&criu)).args(["--", "--tcp-close"]));
    let migrated = migrate.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&[&migrated.stdout[..], &migrated.stderr].concat()).into_owned();
    assert_eq!(migrated.status.code(), Some(0), "{text}");
    assert_eq!(receive.wait_with_output().unwrap().status.code(), Some(0));
    sleep(Duration::from_millis(500));
    stop.store(true, Ordering::Relaxed);
    let load = client.join().unwrap().unwrap();
    eprintln!("{text}{} writes, {} reads, stalls {:?}", load.written, load.reads, load.stalls);
    // A machine that does other work stalls redis, too: not on the way to another host, and for less time.
    let moves: Vec<&Stall> = load.stalls.iter().filter(|stall| stall.moved).collect();
    let [moves] = moves[..] else { panic!("{:?}\n{text}", load.stalls) };
    assert!(load.stalls.iter().all(|of| of.moved || of.time < moves.time), "{:?}\n{text}", load.stalls);
    assert_eq!((hosts.source.named(NAME).len(), hosts.destination.named(NAME).len()), (0, 1));
    let _ = redis.wait();
}
