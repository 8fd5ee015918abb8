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

/// Why no vector reaches these lines of these scripts.
const UNREACHED: &[(&str, &[&str], &[&str])] = &[
    (
        "only while a slot moves: cluster::slots",
        &["mutex", "reentrant", "rwlock"],
        &["if string.find(answer, 'non local key', 1, true) then return 'TRYAGAIN its slot moves' end"],
    ),
    (
        "only a user without a right comes here: half_refused.rs",
        &["mutex"],
        &[
            "if not ok and redis.call('GET', lock) == holder then",
            "if spare > 0 then redis.pcall('INCRBY', fence, spare) end -- the hold may use them",
        ],
    ),
    (
        "only a user without a right comes here: half_refused.rs",
        &["reentrant"],
        &[
            "if not ok and redis.call('HEXISTS', lock, hold) == 1 then",
            "if spare > 0 then redis.pcall('INCRBY', fence, spare) end -- the hold may use them",
        ],
    ),
    (
        "only a user without a right comes here: missing_rights.rs",
        &["mutex", "reentrant"],
        &[
            "elseif redis.pcall('DEL', fence) ~= 1 then -- it must not be left without a TTL",
            "elseif clock.err then",
            "if clock.err and n == 1 then return clock end",
            "if clock.err then",
            "for _, i in ipairs(left) do answers[i] = to_answer(false, clock) end",
            "if not string.find(reply.err, 'WRONGTYPE', 1, true) then error(reply) end",
            "if type(kept) == 'table' then",
            "if is_added then redis.call('ZREM', queue, waiter, 'seen ' .. attempt) end",
            "if set and set.err then return 'refused', set end",
            "if type(removed) == 'table' then return 'refused', removed end",
            "if type(removed) == 'table' then",
            "if is_new[i] then redis.pcall('DEL', KEYS[i]) end",
            "if accepted[i] then redis.pcall('SET', KEYS[2 * n + i], accepted[i], 'PX', token_ttl_ms) end",
            "if set and set.err then token = nil end",
            "if set == 3 and redis.pcall('PEXPIRE', lock, ttl_ms) ~= 1 then",
            "else",
            "if type(reply) == 'table' then return reply end",
            "if type(reply) == 'table' then break end",
            "if type(reply) == 'table' then",
            "for at = #fields, 3, -1 do fields[at] = nil end",
            "if refusal then return 'refused', refusal end",
            "if refusal then return refusal end",
            "if not hold.has_attempt then",
            "if not ok and call.has_mark then redis.pcall('ZREM', queue, 'ended ' .. attempt) end",
            "if accepted and not token then redis.call('SET', fence, accepted, 'PX', token_ttl_ms) end",
            "if call.accepted and type(answers[i]) ~= 'number' then -- nothing was granted",
            "if states[i] then",
            "elseif states[i] == false then",
        ],
    ),
    (
        "only a user without a right comes here: missing_rights.rs",
        &["rwlock"],
        &[
            "elseif redis.pcall('DEL', fence) ~= 1 then -- it must not be left without a TTL",
            "elseif clock.err then",
            "if stored ~= 1 then",
            "if stored ~= 1 then redis.call('DEL', lock) end -- it must not be left without a TTL",
            "if clock.err then",
            "for _, i in ipairs(left) do answers[i] = to_answer(false, clock) end",
            "if not string.find(reply.err, 'WRONGTYPE', 1, true) then error(reply) end",
            "if type(kept) == 'table' then",
            "if is_new then redis.call('ZREM', lock.queue, lock.entry, 'seen ' .. lock.attempt) end",
            "if type(stored) == 'table' then",
            "if lock.pttl == -2 then redis.call('DEL', lock.key) end",
            "elseif accepted then",
            "if not ok and lock.has_mark then redis.pcall('ZREM', lock.queue, 'ended ' .. lock.attempt) end",
            "if lock.accepted and not is_granted then -- the node has not accepted the proposal either",
            "if type(refusal) == 'table' then",
            "for _, lock in ipairs(is_blocked and locks or {}) do",
            "if type(answers[lock.index]) == 'number' and answers[lock.index] >= 0 then",
            "if lock.accepted and (lock.is_alone or verb == 'write' and not lock.was_inside) then",
            "if not (lock.was_held or is_gone) then pcall(release, lock, call) end",
        ],
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
            assert!(!text.contains(r#""answer": "OK""#), "redis-py answers True: leave it out");
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
            let begins = fields.get("begins").is_none_or(|begins| {
                text(reply).is_some_and(|text| text.starts_with(begins.as_str().unwrap()))
            });
            if let Some(name) = fields.get("bind") {
                names.insert(name.as_str().unwrap().to_owned(), text(reply).unwrap());
            }
            is_in_range && begins && !fields.contains_key("error")
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
        let parts = ["steps", "after"].into_iter().flat_map(|part| vector[part].as_array().unwrap());
        let times = |step: &Json| step.get("times").map_or(1, |times| times.as_u64().unwrap() as usize);
        for step in parts.flat_map(|step| std::iter::repeat_n(step, times(step))) {
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
    let found = run_all(&scripts()).await;
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
    assert!(branches.len() > 300, "only {} branches found", branches.len());
    let reached = run_all(&scripts).await;
    let (mut excused, mut missed) = (BTreeSet::new(), String::new());
    for (id, line) in branches.iter().filter(|(id, _)| !reached.contains(*id)) {
        let name = id.split(':').next().unwrap();
        let is_of = |scripts: &[&'static str]| scripts.iter().find(|script| **script == name).copied();
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
