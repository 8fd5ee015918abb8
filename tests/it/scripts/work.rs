//! How much a script does beside many readers or many waiters.

use std::collections::BTreeMap;

use super::client::{Acquire, Answer, Client, KEYS, Request};
use crate::support::Server;
use crate::support::raw::script;
use Answer::{Busy, Final};

/// The bound for every script: commands, and a quarter of the words that they send and receive. On
/// a usual machine that is less than 5 ms; a time would depend on what else the machine does.
const MOST: u64 = 4_000;

/// Counts what a script does, and writes it to a key. The script sees no difference.
fn counted(source: &str) -> String {
    let count = "work = work + 1 + select('#', ...) / 4 + (type(reply) == 'table' and #reply / 4 or 0)";
    format!("{} server.call('SET', 'work', math.ceil(work)) return answer", observed(source, count))
}

/// A script that is observed: after each command, `count` may add its `reply` to `work`, or change
/// it. The script's answer is in `answer`, and `server` sends commands that are not observed.
pub(super) fn observed(source: &str, count: &str) -> String {
    format!(
        "local server, work = redis, 0
        local function counts(send)
          return function(...)
            local reply = send(...)
            {count}
            return reply
          end
        end
        local redis = setmetatable({{call = counts(server.call), pcall = counts(server.pcall)}},
          {{__index = server}})
        local function script()\n{source}\nend
        local answer = script()"
    )
}

const MANY: u64 = 10_000;

/// Encodings of a large hash: a table, or, on servers configured so, one list that every look-up
/// scans.
const ENTRIES: [&str; 2] = ["128", "20000"];

/// Runs scripts, and records the most that each request did.
struct Profiler {
    client: Client,
    sums: BTreeMap<String, String>,
    worst: BTreeMap<String, u64>,
    time: u64,
}

impl Profiler {
    async fn start(server: &Server, entries: &str) -> Profiler {
        let client = Client::of(server).await;
        // The old name of the setting, which all versions accept.
        client.run::<()>(&["CONFIG", "SET", "hash-max-ziplist-entries", entries]).await;
        let time = client.time().await;
        Profiler { client, sums: BTreeMap::new(), worst: BTreeMap::new(), time }
    }

    async fn send(&mut self, request: &Request) -> Answer {
        let kind = &request.verb.script;
        let sum = match self.sums.get(kind) {
            Some(sum) => sum.clone(),
            None => {
                let sum: String = self.client.run(&["SCRIPT", "LOAD", &counted(&script(kind))]).await;
                self.sums.insert(kind.clone(), sum.clone());
                sum
            }
        };
        let answer = request.send_sum(&self.client, &sum).await;
        let work: u64 = self.client.run(&["GET", "work"]).await;
        let worst = self.worst.entry(request.title()).or_default();
        *worst = work.max(*worst);
        answer
    }

    async fn fresh(&mut self) {
        self.client.flush().await;
        self.time = self.client.time().await;
    }

    /// Writes 10,000 readers, of which all but every tenth have expired.
    async fn readers(&self) {
        let now = self.time / 1000;
        let mut fields = vec![
            ("mode".to_owned(), "several".to_owned()),
            ("readers".to_owned(), MANY.to_string()),
            ("token".to_owned(), self.time.to_string()),
        ];
        for number in 0..MANY {
            let ends = if number % 10 == 0 { now + 60_000 } else { now - 1 };
            fields.push((format!("read:{}", owner(number)), format!("{ends} {}", attempt(number))));
        }
        let words = fields.iter().flat_map(|(name, value)| [name.as_str(), value.as_str()]);
        let words: Vec<_> = ["HSET", "k"].into_iter().chain(words).collect();
        let _: i64 = self.client.run(&words).await;
        let _: i64 = self.client.run(&["PEXPIRE", "k", "60000"]).await;
    }

    /// Writes 10,000 waiters of a kind; if some are dead, only every tenth is alive.
    async fn waiters(&self, kind: &str, are_dead: bool) {
        let mut words = vec!["ZADD".to_owned(), KEYS[1].to_owned()];
        for number in 0..MANY {
            let age = if are_dead && number % 10 != 9 { 60_000_000 } else { 0 };
            let place = self.time + number - age - MANY;
            let score =
                if kind == "read" { format!("-{}", (1_u64 << 52) - place) } else { place.to_string() };
            let rest = if kind == "mutex" { String::new() } else { format!("{} 255", owner(number)) };
            words.extend([score, format!("{} {kind} 60000  {rest}", attempt(number))]);
        }
        let _: i64 = self.client.run(&words.iter().map(String::as_str).collect::<Vec<_>>()).await;
        let _: i64 = self.client.run(&["PEXPIRE", KEYS[1], "60000"]).await;
    }

    /// Prints the largest work, and fails if some is beyond the bound.
    fn assert_short(&self, what: &str) {
        println!("{what}: {:?}", self.worst);
        for (script, worst) in &self.worst {
            // An operator's call, which removes each reader by itself: a key that is deleted and
            // written again could not be written while its slot moves.
            let bound = if script.contains("force") { 3 * MOST } else { MOST };
            assert!(*worst <= bound, "{what}: {script} does {worst} of {bound}");
        }
    }
}

fn owner(number: u64) -> String {
    format!("8743c9c0-0795-4907-87fd-{number:012x}")
}

fn attempt(number: u64) -> String {
    format!("{number:032x}")
}

fn of(kind: &'static str) -> Acquire {
    Acquire { kind, is_for_quorum: false }
}

#[tokio::test]
async fn scripts_are_short_beside_10000_readers_of_which_9000_expired() {
    let server = Server::start().await;
    for entries in ENTRIES {
        let what = format!("10,000 readers, hash-max-listpack-entries {entries}");
        beside_readers(&server, entries).await.assert_short(&what);
    }
}

async fn beside_readers(server: &Server, entries: &str) -> Profiler {
    let mut watch = Profiler::start(server, entries).await;
    let (read, write) = (of("read"), of("write"));
    watch.fresh().await;
    watch.readers().await;
    watch.send(&read.inspect()).await;
    watch.send(&read.inspect().owner(&owner(10))).await;
    let renewed = watch.send(&read.renew(&owner(10), &attempt(10))).await;
    assert!(matches!(renewed, Final(1..)));
    assert_eq!(watch.send(&read.renew(&owner(11), &attempt(11))).await, Final(0), "expired");
    let nested = watch.send(&read.fenced(&owner(10), "nested", 0)).await;
    assert!(matches!(nested, Final(1..)));
    assert_eq!(watch.send(&read.release(&owner(10), "nested")).await, Final(2));
    watch.send(&write.downgrade(&owner(10), &attempt(10))).await;
    // New readers get the places of dead ones, after some attempts.
    let mut polls = 0;
    while watch.send(&read.fenced("new", "new", 0)).await == Final(-7) {
        polls += 1;
        assert!(polls < 1000);
    }
    assert_eq!(watch.send(&write.fenced("w", "w", 0).queued()).await, Busy);
    assert_eq!(watch.send(&read.fenced("late", "late", 0).queued()).await, Busy, "behind the writer");
    assert_eq!(watch.send(&read.release("new", "new")).await, Final(1));
    for number in (0..MANY).step_by(10) {
        let release = read.release(&owner(number), &attempt(number));
        assert_eq!(watch.send(&release).await, Final(1), "{number}");
    }
    let mut polls = 0;
    while watch.send(&write.fenced("w", "w", 0).queued()).await == Busy {
        polls += 1;
        assert!(polls < 10_000, "the writer is never granted the lock");
    }
    println!("{entries} entries: the writer was granted the lock at poll {polls}");
    assert!(matches!(watch.send(&write.force("f1")).await, Final(1)));

    for (number, force) in [read.force("f2"), write.force("f3")].iter().enumerate() {
        watch.fresh().await;
        watch.readers().await;
        let answer = watch.send(force).await;
        assert_eq!(matches!(answer, Final(1..)), number == 0, "{force:?}: {answer:?}");
    }
    watch
}

#[tokio::test]
async fn scripts_are_short_beside_10000_waiters() {
    let server = Server::start().await;
    for entries in ENTRIES {
        let what = format!("10,000 waiters, hash-max-listpack-entries {entries}");
        beside_waiters(&server, entries).await.assert_short(&what);
    }
}

async fn beside_waiters(server: &Server, entries: &str) -> Profiler {
    let mut watch = Profiler::start(server, entries).await;
    for kind in ["read", "write", "mutex", "reentrant"] {
        for are_dead in [false, true] {
            let holder = of(if kind == "read" { "write" } else { kind });
            let mut ways = vec![holder.release("h", "h"), holder.release("h", "h").with("remember", "1")];
            ways.push(holder.force("f"));
            if holder.kind == "write" {
                ways.push(holder.downgrade("h", "h"));
            }
            for end in ways {
                watch.fresh().await;
                assert!(matches!(watch.send(&holder.fenced("h", "h", 0)).await, Final(1..)));
                watch.waiters(kind, are_dead).await;
                assert!(matches!(watch.send(&holder.renew("h", "h")).await, Final(1..)));
                watch.send(&holder.inspect()).await;
                let waiter = of(kind).fenced("p", "p", 0).queued();
                for _poll in 0..3 {
                    watch.send(&waiter).await;
                }
                assert!(matches!(watch.send(&end).await, Final(1..)), "{end:?}");
                // The next ones poll, and leave.
                for number in [9, 19, 5000, 9999] {
                    let queued = of(kind).fenced(&owner(number), &attempt(number), 0);
                    watch.send(&queued.with("claim_ms", "60000")).await;
                }
                for number in [9, 19, 5000, 9999] {
                    let leaves = of(kind).release(&owner(number), &attempt(number));
                    watch.send(&leaves.with("claim_ms", "60000")).await;
                }
            }
        }
    }
    watch
}

/// Each of 128 locks has an owner with 256 holds, which a read or a release has to read: 4 MB in
/// all. A call leaves most of them to later ones.
#[tokio::test]
async fn one_call_reads_the_holds_of_few_owners_with_many() {
    const LOCKS: usize = 128;
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let count_bytes = "for _, text in ipairs(type(reply) == 'table' and reply or {reply}) do
        if type(text) == 'string' then work = work + #text end
      end";
    let counted = format!("{} return work", observed(&script("rwlock"), count_bytes));
    let attempts: Vec<String> = (0..256).map(|number| format!("{number:0128}")).collect();
    let hold = format!("{} o {}", client.time().await / 1000 + 60_000, attempts.join(" "));
    let reads = hold.replacen(" o ", " ", 1);
    let names: Vec<String> = (0..LOCKS).map(|number| format!("k{number}")).collect();
    for (side, field, hold, readers) in [("write", "write", &hold, "0"), ("read", "read:o", &reads, "1")] {
        for verb in ["read", "release"] {
            client.flush().await;
            for name in &names {
                let words = ["HSET", name, "mode", "several", "readers", readers, field, hold];
                client.run::<()>(&words).await;
                client.run::<()>(&["PEXPIRE", name, "60000"]).await;
            }
            let ends = ["", ":waiters", ":fence"];
            let keys = ends.iter().flat_map(|end| names.iter().map(move |name| format!("{{{name}}}{end}")));
            let keys = keys.map(|key| key.strip_suffix('}').map_or(key.clone(), |name| name[1..].into()));
            let attempt = if verb == "read" { "new" } else { &attempts[9] };
            let words: &[&str] = if verb == "read" { &[attempt, "o", "", ""] } else { &[attempt, "o", ""] };
            let words = words.iter().flat_map(|word| vec![(*word).to_owned(); LOCKS]);
            let head = ["EVAL".to_owned(), counted.clone(), (3 * LOCKS).to_string()].into_iter().chain(keys);
            let mut call: Vec<String> = head.chain([verb.to_owned()]).chain(words).collect();
            call.extend((verb == "read").then(|| "60000".to_owned()));
            let call: Vec<&str> = call.iter().map(String::as_str).collect();
            let size: u64 = client.run(&call).await;
            assert!(size > 30_000, "{side}, {verb}: the holds were not read: {size} bytes");
            assert!(size < 500_000, "{side}, {verb}: one call reads {size} bytes");
        }
    }
}
