// SPDX-License-Identifier: MIT OR Apache-2.0
//! redis: its keys and values, and a client that gets them one by one. It speaks as much of redis's protocol
//! as that needs (<https://redis.io/docs/latest/develop/reference/protocol-spec/>).

use std::io::Write as _;
use std::net::Shutdown;
use std::ops::Range;
use std::os::unix::net::UnixStream;

use anyhow::{Context as _, bail, ensure};

use super::answer::SPREAD_64;
use super::client::Client;

/// 64-bit words of one value, which has 4 KiB.
const VALUE_WORDS: u64 = 512;
/// A reply with a value: its length, the value and the end of the line.
const HEADER: &[u8] = b"$4096\r\n";
const VALUE_END: usize = HEADER.len() + 4096;
const REPLY_BYTES: usize = VALUE_END + 2;
/// The reply to one SET.
const STORED: &[u8] = b"+OK\r\n";
/// Values that one write sends to redis while it is filled.
const STORED_AT_ONCE: u64 = 64;

/// Stores the values of the keys from 0 on.
///
/// # Errors
/// The connection breaks, redis refuses a value, or the client gives up.
pub(super) fn fill(client: &Client<'_>, keys: u64) -> anyhow::Result<()> {
    let mut stream = client.connect()?;
    let mut next = 0;
    while next < keys {
        let batch = next..keys.min(next + STORED_AT_ONCE);
        let mut request = Vec::new();
        for key in batch.clone() {
            let name = key.to_string();
            let _ = write!(request, "*3\r\n$3\r\nSET\r\n${}\r\n{name}\r\n$4096\r\n", name.len());
            request.extend(words(key).flat_map(u64::to_le_bytes));
            request.extend(b"\r\n");
        }
        stream.write_all(&request).context("send values to redis")?;
        next = batch.end;
        check_stored(client, &mut stream, batch)?;
    }
    close(client, stream)
}

/// Reads the replies to the SETs of a batch of keys.
fn check_stored(client: &Client<'_>, stream: &mut UnixStream, batch: Range<u64>) -> anyhow::Result<()> {
    for key in batch {
        let mut reply = [0; STORED.len()];
        let mut length = 0;
        while length < reply.len() {
            let count = client.read(stream, &mut reply[length..])?;
            length += count.with_context(|| format!("redis ended the connection at key {key}"))?;
            if reply[..length] != STORED[..length] {
                let mut rest = [0; 256];
                let count = client.read(stream, &mut rest)?.unwrap_or(0);
                bail!("redis refused key {key}: {}", line(&[&reply[..length], &rest[..count]].concat()));
            }
        }
    }
    Ok(())
}

/// Waits until redis has closed the connection: CRIU dumps no open one.
fn close(client: &Client<'_>, mut stream: UnixStream) -> anyhow::Result<()> {
    stream.shutdown(Shutdown::Write).context("end the connection to redis")?;
    while client.read(&mut stream, &mut [0; 256])?.is_some() {}
    Ok(())
}

/// Requests for the keys of a redis, one at a time on one connection.
#[derive(Debug)]
pub(super) struct Requests<'a> {
    client: Client<'a>,
    /// Number of keys that redis has.
    keys: u64,
    seed: u32,
    /// Number of requests that redis has answered.
    answered: u64,
    stream: UnixStream,
    reply: Box<[u8; REPLY_BYTES]>,
}

impl<'a> Requests<'a> {
    /// Connects. The order of the keys depends on `seed`.
    pub(super) fn connect(client: Client<'a>, keys: u64, seed: u32) -> anyhow::Result<Self> {
        let stream = client.connect()?;
        Ok(Self { client, keys, seed, answered: 0, stream, reply: Box::new([0; REPLY_BYTES]) })
    }

    /// Gets the next key and checks its value. After a broken connection it asks again on a new one.
    ///
    /// # Errors
    /// The value is wrong, or the client gave up.
    pub(super) fn get_next(&mut self) -> anyhow::Result<()> {
        let key = key(self.keys, self.seed, self.answered);
        while !self.get(key)? {
            self.client.pause()?;
            self.stream = self.client.connect()?;
        }
        self.answered += 1;
        Ok(())
    }

    /// False if the connection breaks before a whole reply.
    fn get(&mut self, key: u64) -> anyhow::Result<bool> {
        if self.stream.write_all(format!("GET {key}\r\n").as_bytes()).is_err() {
            return Ok(false);
        }
        let mut length = 0;
        while length < REPLY_BYTES {
            let Some(count) = self.client.read(&mut self.stream, &mut self.reply[length..])? else {
                return Ok(false);
            };
            length += count;
            let known = length.min(HEADER.len());
            ensure!(
                self.reply[..known] == HEADER[..known],
                "wrong answer to \"GET {key}\": {}, and a value of 4096 bytes is right",
                line(&self.reply[..length])
            );
        }
        let (value, _) = self.reply[HEADER.len()..VALUE_END].as_chunks::<8>();
        let wrong = value.iter().zip(words(key)).position(|(word, right)| *word != right.to_le_bytes());
        if let Some(word) = wrong {
            bail!("wrong answer to \"GET {key}\": wrong bytes from byte {} of the value on", word * 8);
        }
        Ok(true)
    }

    /// Ends the connection.
    pub(super) fn close(self) -> anyhow::Result<()> {
        close(&self.client, self.stream)
    }
}

/// The value of a key: multiples of an odd number, which look random, and none of which is zero.
fn words(key: u64) -> impl Iterator<Item = u64> {
    let first = key * VALUE_WORDS + 1;
    (first..first + VALUE_WORDS).map(|number| number.wrapping_mul(SPREAD_64))
}

/// The key of one step. As many steps as there are keys give each key once, in an order that looks random.
fn key(keys: u64, seed: u32, step: u64) -> u64 {
    let bits = keys.next_power_of_two().trailing_zeros().max(2);
    let mask = (1 << bits) - 1;
    let offset = u64::from(seed).wrapping_mul(SPREAD_64) >> 32;
    let mut key = step % keys;
    loop {
        // Each line is one to one among numbers of `bits` bits.
        key = (key + offset).wrapping_mul(SPREAD_64) & mask;
        key ^= key >> (bits / 2);
        key = key.wrapping_mul(SPREAD_64) & mask;
        key ^= key >> (bits / 2);
        // So is the next number below `keys`.
        if key < keys {
            return key;
        }
    }
}

/// The first line of a reply.
fn line(reply: &[u8]) -> String {
    format!("{:?}", String::from_utf8_lossy(reply).lines().next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::io::{BufRead as _, BufReader};
    use std::os::unix::net::UnixListener;
    use std::path::Path;
    use std::sync::atomic::AtomicBool;
    use std::thread::JoinHandle;
    use std::time::{Duration, Instant};

    use super::*;

    const KEYS: u64 = 100;
    static STOP: AtomicBool = AtomicBool::new(false);

    fn client(socket: &Path) -> Client<'_> {
        Client { socket, deadline: Instant::now() + Duration::from_secs(20), stop: &STOP }
    }

    fn value(key: u64) -> Vec<u8> {
        words(key).flat_map(u64::to_le_bytes).collect()
    }

    fn reply(key: u64) -> Vec<u8> {
        [HEADER, &value(key), b"\r\n"].concat()
    }

    /// A server with one connection for each list: it answers a request with each element, then ends the
    /// connection.
    fn serve(socket: &Path, connections: Vec<Vec<Vec<u8>>>) -> JoinHandle<Vec<String>> {
        let listener = UnixListener::bind(socket).unwrap();
        std::thread::spawn(move || {
            let mut requests = Vec::new();
            for replies in connections {
                let (stream, _) = listener.accept().unwrap();
                let mut stream = BufReader::new(stream);
                for reply in replies {
                    let mut request = String::new();
                    stream.read_line(&mut request).unwrap();
                    requests.push(request);
                    stream.get_mut().write_all(&reply).unwrap();
                }
            }
            requests
        })
    }

    #[test]
    fn an_order_has_each_key_once_and_depends_on_the_seed() {
        for keys in [1, 2, 100, 4096, 5000] {
            let order: Vec<u64> = (0..keys).map(|step| key(keys, 1001, step)).collect();
            let different: BTreeSet<&u64> = order.iter().collect();
            assert_eq!(
                (different.len(), order.iter().max()),
                (order.len(), Some(&(keys - 1))),
                "{keys} keys"
            );
            let neighbours = order.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) == 1).count();
            assert!(neighbours * 10 <= order.len().max(20), "{neighbours} of {keys} keys follow a neighbour");
        }
        let first = |seed| -> Vec<u64> { (0..20).map(|step| key(4096, seed, step)).collect() };
        assert_ne!(first(1001), first(1002));
    }

    #[test]
    fn values_have_four_kib_that_differ_from_key_to_key() {
        let values: BTreeSet<Vec<u8>> = (0..KEYS).map(value).collect();
        assert_eq!(values.len(), 100);
        for value in values {
            assert_eq!(value.len(), 4096);
            assert!(value.chunks(8).all(|word| word != [0; 8]));
        }
    }

    #[test]
    fn a_broken_connection_is_followed_by_another_that_asks_for_the_same_key() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let [first, second] = [0, 1].map(|step| key(KEYS, 7, step));
        let half = reply(second)[..2000].to_vec();
        let server = serve(&socket, vec![vec![reply(first), half], vec![reply(second)]]);
        let mut requests = Requests::connect(client(&socket), KEYS, 7).unwrap();
        requests.get_next().unwrap();
        requests.get_next().unwrap();
        assert_eq!(requests.answered, 2);
        let asked = [first, second, second].map(|key| format!("GET {key}\r\n"));
        assert_eq!(server.join().unwrap(), asked);
        requests.close().unwrap();
    }

    #[test]
    fn a_wrong_byte_and_a_missing_key_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let key = key(KEYS, 7, 0);
        let mut wrong = reply(key);
        wrong[HEADER.len() + 4095] ^= 1;
        let other = reply(key + 1);
        let cases = [
            (wrong, "wrong bytes from byte 4088 of the value on"),
            (other, "wrong bytes from byte 0 of the value on"),
            (b"$-1\r\n".to_vec(), "\"$-1\", and a value of 4096 bytes is right"),
            (b"-LOADING data\r\n".to_vec(), "\"-LOADING data\", and a value of 4096 bytes is right"),
        ];
        for (number, (reply, expected)) in cases.into_iter().enumerate() {
            let socket = directory.path().join(number.to_string());
            let server = serve(&socket, vec![vec![reply]]);
            let error = Requests::connect(client(&socket), KEYS, 7).unwrap().get_next().unwrap_err();
            assert_eq!(error.to_string(), format!("wrong answer to \"GET {key}\": {expected}"));
            server.join().unwrap();
        }
    }

    #[test]
    fn redis_is_filled_with_every_value_and_a_refusal_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let store = |name: &str, replies: &'static [u8]| {
            let socket = directory.path().join(name);
            let listener = UnixListener::bind(&socket).unwrap();
            let server = std::thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = vec![0; stored(0).len() + stored(1).len()];
                std::io::Read::read_exact(&mut stream, &mut request).unwrap();
                stream.write_all(replies).unwrap();
                request
            });
            let filled = fill(&client(&socket), 2);
            assert_eq!(server.join().unwrap(), [stored(0), stored(1)].concat());
            filled
        };
        store("fine", b"+OK\r\n+OK\r\n").unwrap();
        let error = store("full", b"+OK\r\n-OOM no memory\r\n").unwrap_err().to_string();
        assert_eq!(error, "redis refused key 1: \"-OOM no memory\"");
    }

    /// The bytes that store one of the first ten keys.
    fn stored(key: u64) -> Vec<u8> {
        let start = format!("*3\r\n$3\r\nSET\r\n$1\r\n{key}\r\n$4096\r\n");
        [start.as_bytes(), &value(key), b"\r\n"].concat()
    }
}
