//! The conformance vectors of `lua/vectors`: the scripts give these answers, and the vectors reach
//! every branch of every script. `lua/vectors/README.md` describes their form.

use std::collections::{BTreeMap, BTreeSet};

use redis::Value;
use redis::aio::MultiplexedConnection;
use serde_json::Value as Json;
use tokio::task::JoinSet;

use super::subscriber::Subscriber;
use super::{folder, scripts};
use crate::support::Server;

/// Why no vector reaches these lines of these scripts. A script is named by its name or the end of
/// it. A script contains whole fragments, also where it needs a part of them.
const UNREACHED: &[(&str, &[&str], &[&str])] = &[
    (
        "these scripts ignore a min_token that is far ahead, and a counter at 2^53 is not 1",
        &[
            "/release",
            "force",
            "downgrade",
            "quorum/mutex_acquire",
            "quorum/reentrant_acquire",
            "quorum/read_acquire",
            "quorum/write_acquire",
        ],
        &["if token == 1 then redis.call('DEL', KEYS[2]) else redis.call('DECR', KEYS[2]) end"],
    ),
    (
        "the write hold has not expired, or was removed before",
        &["rwlock/release", "downgrade", "write_force"],
        &["if state.write then -- its writer is dead"],
    ),
    (
        "the owner reads afterwards, so no writer is granted the lock, and the end of the write hold has \
         removed the mark of an upgrade",
        &["downgrade"],
        &[
            "for _ = 1, reader and 1 or 32 do",
            "if not entry then",
            "if not is_unfinished then redis.call('HDEL', KEYS[1], 'writer_wait_until', 'upgrade') end",
            "if reader and waiter_owner ~= reader then return false end",
            "if not token then token, no_token = next_token() end",
            "if not token then return false end",
            "if next_attempt == attempt then waiter_channel = '' end",
            "if notify(waiter_channel, message(next_attempt, token)) then",
            "if no_writer_waits() then redis.call('HDEL', KEYS[1], 'writer_wait_until') end",
            "if is_alone and admit_writer(waiter_owner) then return end",
            "if waited and admit_readers(waited) then",
            "elseif not is_unfinished and not admit_writer() and not is_unfinished then",
        ],
    ),
    (
        "the key exists: it was written just before",
        &["downgrade", "read_force", "write_force"],
        &[
            "if state.pttl == -2 then",
            "if waiter_place then waited = string.format('(%.0f', waiter_place - 2^52) end",
            "if ms then",
        ],
    ),
    (
        "the answer has left a mark in the queue",
        &["read_force", "write_force"],
        &["if redis.call('EXISTS', KEYS[3]) == 0 then return end"],
    ),
    (
        "no owner reads where these scripts admit waiters",
        &["read_force", "write_acquire"],
        &[
            "if reader and waiter_owner ~= reader then return false end",
            "if readers > 0 then",
            "if not gated then",
            "if admit_readers('(0') then return end",
            "elseif not (waited and admit_readers(waited)) and not is_unfinished then",
            "if is_alone and admit_writer(waiter_owner) then return end",
            "if no_writer_waits() then",
        ],
    ),
    (
        "the write hold has ended, and with it the mark of an upgrade",
        &["write_force"],
        &[
            "if read_state() or unexpired(state.write) then return end",
            "if reader and waiter_owner ~= reader then return false end",
            "if is_alone and admit_writer(waiter_owner) then return end",
        ],
    ),
    (
        "waiters are admitted only if no owner writes",
        &["write_acquire"],
        &["if read_state() or unexpired(state.write) then return end"],
    ),
    (
        "without claim_ms, an attempt that wants to read does not come so far",
        &["read_acquire"],
        &["if not claim then return end"],
    ),
    (
        "the owner has no read hold: one that had expired was just removed",
        &["read_acquire", "rwlock/release"],
        &[
            "if reads == 0 then redis.call('HDEL', KEYS[1], 'readers') else redis.call('HSET', KEYS[1], 'readers', 1) end",
        ],
    ),
    (
        "the counter is absent, below min_token or spoilt where readers need a new token",
        &["read_acquire_many"],
        &["if token > 1 and token > (minimum or 0) and token < 2^53 then return token end"],
    ),
    (
        "a read-write lock keeps no token that was made for a dead waiter",
        &["rwlock/write_acquire"],
        &["if new_token then return new_token end"],
    ),
    (
        "the token of these kinds is in the lock",
        &["reentrant/acquire", "rwlock/write_acquire"],
        &["if kind == 'mutex' then current = to_token(redis.call('GET', KEYS[2])) end"],
    ),
];

/// The channel to which an instrumented script publishes each branch that it takes.
const BRANCHES: &str = "branches";

/// The names that a vector has bound to answers.
type Names = BTreeMap<String, String>;

/// The files, by their names.
fn files() -> BTreeMap<String, Vec<Json>> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(folder().join("vectors")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "jsonl") {
            let text = std::fs::read_to_string(&path).unwrap();
            let vectors = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            files.insert(path.file_name().unwrap().to_str().unwrap().to_owned(), vectors);
        }
    }
    assert!(files.len() >= 9, "{:?}", files.keys());
    files
}

/// The text with each `$name`, `$name+5` and `$name-5` replaced.
fn filled(text: &str, names: &Names) -> String {
    let mut output = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        output += before;
        let end = after.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(after.len());
        if end == 0 {
            (output, rest) = (output + "$", after);
            continue;
        }
        let value = names.get(&after[..end]).unwrap_or_else(|| panic!("{text}: not bound"));
        let (sign, digits) = after[end..].split_at(usize::from(after[end..].starts_with(['+', '-'])));
        let length = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
        match digits[..length].parse::<i64>() {
            Ok(by) if !sign.is_empty() => {
                let by = if sign == "-" { -by } else { by };
                output += &(value.parse::<i64>().unwrap() + by).to_string();
                rest = &digits[length..];
            }
            _ => {
                output += value;
                rest = &after[end..];
            }
        }
    }
    output + rest
}

/// A reply as text; `None`: it has none.
fn text(reply: &Value) -> Option<String> {
    match reply {
        Value::Int(number) => Some(number.to_string()),
        Value::BulkString(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
        Value::SimpleString(text) => Some(text.clone()),
        Value::Okay => Some("OK".to_owned()),
        _ => None,
    }
}

/// Whether a reply is the expected answer. Binds the names in it.
fn is_equal(expected: &Json, reply: &Result<Value, String>, names: &mut Names) -> bool {
    let Ok(reply) = reply else { return expected.get("error").is_some() };
    match expected {
        Json::Object(fields) => {
            let bound = |end: &str, names: &Names| {
                let end = fields.get(end)?;
                end.as_i64().or_else(|| filled(end.as_str()?, names).parse().ok())
            };
            let number = if let Value::Int(number) = reply { Some(*number) } else { None };
            let is_in_range = match (bound("min", names), bound("max", names)) {
                (None, None) => true,
                (low, high) => number.is_some_and(|number| {
                    low.is_none_or(|low| low <= number) && high.is_none_or(|high| number <= high)
                }),
            };
            if let Some(name) = fields.get("bind") {
                names.insert(name.as_str().unwrap().to_owned(), text(reply).unwrap());
            }
            is_in_range && !fields.contains_key("error")
        }
        Json::Array(items) => match reply {
            Value::Array(replies) if replies.len() == items.len() => {
                items.iter().zip(replies).all(|(item, reply)| is_equal(item, &Ok(reply.clone()), names))
            }
            _ => false,
        },
        Json::String(expected) => text(reply) == Some(filled(expected, names)),
        Json::Number(number) => matches!(reply, Value::Int(found) if Some(*found) == number.as_i64()),
        Json::Null => *reply == Value::Nil,
        Json::Bool(_) => false,
    }
}

/// Runs vectors on a server of its own.
struct Runner {
    server: Server,
    connection: MultiplexedConnection,
    scripts: BTreeMap<String, String>,
}

impl Runner {
    async fn start(scripts: BTreeMap<String, String>) -> Runner {
        let server = Server::start().await;
        let connection = server.connection().await;
        Runner { server, connection, scripts }
    }

    async fn send(&mut self, words: &[String]) -> Result<Value, String> {
        let mut command = redis::cmd(&words[0]);
        command.arg(&words[1..]).query_async(&mut self.connection).await.map_err(|error| error.to_string())
    }

    async fn run(&mut self, file: &str, vector: &Json) {
        self.send(&["FLUSHALL".to_owned()]).await.unwrap();
        let (mut names, mut subscriber) = (Names::new(), None);
        for field in ["name", "shows"] {
            assert!(vector[field].is_string(), "{file}: {vector} has no {field}");
        }
        for step in ["steps", "after"].into_iter().flat_map(|part| vector[part].as_array().unwrap()) {
            let list = |field: &str, names: &Names| -> Vec<String> {
                let words = step.get(field).map_or(&[][..], |words| words.as_array().unwrap());
                words.iter().map(|word| filled(word.as_str().unwrap(), names)).collect()
            };
            let reply = if let Some(name) = step.get("time") {
                names.insert(name.as_str().unwrap().to_owned(), self.server.time().await.to_string());
                continue;
            } else if let Some(pause) = step.get("wait") {
                tokio::time::sleep(std::time::Duration::from_millis(pause.as_u64().unwrap())).await;
                continue;
            } else if let Some(channel) = step.get("subscribe") {
                assert!(subscriber.is_none(), "{file}: {vector} subscribes twice");
                subscriber = Some(Subscriber::of(&self.server, channel.as_str().unwrap()).await);
                continue;
            } else if let Some(channel) = step.get("message") {
                let subscriber = subscriber.as_mut().unwrap();
                // Every message was published before the answer that came before this step.
                let text = match &step["answer"] {
                    Json::Null => subscriber.published(channel.as_str().unwrap()).await.into_iter().next(),
                    _ => Some(subscriber.next().await),
                };
                Ok(text.map_or(Value::Nil, |text| Value::BulkString(text.into_bytes())))
            } else if step.get("command").is_some() {
                self.send(&list("command", &names)).await
            } else {
                let (keys, name) = (list("keys", &names), step["run"].as_str().unwrap());
                let mut words = vec!["EVAL".to_owned(), self.scripts[name].clone(), keys.len().to_string()];
                words.extend(keys.into_iter().chain(list("args", &names)));
                self.send(&words).await
            };
            let expected = step.get("answer").cloned().unwrap_or_else(|| Json::Object(Default::default()));
            let is_right = is_equal(&expected, &reply, &mut names);
            assert!(is_right, "{file}: {}: {step}\nanswered {reply:?}; bound: {names:?}", vector["name"]);
        }
    }
}

/// Runs all files, each on a server of its own. Returns what was published to `BRANCHES`.
async fn run_all(scripts: &BTreeMap<String, String>) -> BTreeSet<String> {
    let mut running = JoinSet::new();
    for (file, vectors) in files() {
        let scripts = scripts.clone();
        running.spawn(async move {
            let mut runner = Runner::start(scripts).await;
            let mut subscriber = Subscriber::of(&runner.server, BRANCHES).await;
            let mut found = BTreeSet::new();
            for vector in &vectors {
                runner.run(&file, vector).await;
                found.extend(subscriber.published(BRANCHES).await);
            }
            found
        });
    }
    running.join_all().await.into_iter().flatten().collect()
}

#[tokio::test]
async fn vectors_get_their_answers() {
    let found = run_all(&scripts().into_iter().collect()).await;
    assert!(found.is_empty(), "the scripts are not instrumented: {found:?}");
}

/// The script with a PUBLISH at the beginning of each branch, and the line of each branch, by what
/// it publishes.
fn instrumented(name: &str, script: &str, branches: &mut BTreeMap<String, String>) -> String {
    let mut output = String::new();
    for (number, line) in script.lines().enumerate() {
        let (mut word, mut is_quoted) = (String::new(), false);
        for (at, character) in line.char_indices() {
            if !is_quoted && line[at..].starts_with("--") {
                break;
            }
            is_quoted ^= character == '\'';
            if !is_quoted && (character.is_alphanumeric() || character == '_') {
                word.push(character);
                output.push(character);
                let ends = !line[at + 1..].starts_with(|next: char| next.is_alphanumeric() || next == '_');
                if ends && ["then", "else", "do"].contains(&word.as_str()) {
                    let id = format!("{name}:{}:{at}", number + 1);
                    output += &format!(" redis.call('PUBLISH', '{BRANCHES}', '{id}')");
                    branches.insert(id, line.trim().to_owned());
                }
            } else {
                word.clear();
                output.push(character);
            }
        }
        output.push('\n');
    }
    output
}

#[tokio::test]
async fn vectors_reach_every_branch() {
    let mut branches = BTreeMap::new();
    let scripts: BTreeMap<String, String> = scripts()
        .into_iter()
        .map(|(name, text)| (name.clone(), instrumented(&name, &text, &mut branches)))
        .collect();
    assert!(branches.len() > 1_000, "only {} branches found", branches.len());
    let reached = run_all(&scripts).await;
    let (mut excused, mut missed) = (BTreeSet::new(), String::new());
    for (id, line) in branches.iter().filter(|(id, _)| !reached.contains(*id)) {
        let name = id.split(':').next().unwrap();
        let is_of =
            |scripts: &[&'static str]| scripts.iter().find(|script| name.ends_with(**script)).copied();
        let excuse = UNREACHED.iter().find_map(|(reason, scripts, lines)| {
            lines.contains(&line.as_str()).then(|| is_of(scripts)).flatten().map(|script| (*reason, script))
        });
        match excuse {
            Some((reason, script)) => excused.extend([(reason, script), (reason, line.as_str())]),
            None => missed += &format!("{id}: {line}\n"),
        }
    }
    assert!(missed.is_empty(), "of {} branches, no vector reaches:\n{missed}", branches.len());
    let excuses = UNREACHED
        .iter()
        .flat_map(|(reason, scripts, lines)| scripts.iter().chain(*lines).map(|word| (*reason, *word)));
    let needless: Vec<_> = excuses.filter(|excuse| !excused.contains(excuse)).collect();
    assert!(needless.is_empty(), "vectors reach these: {needless:#?}");
}
