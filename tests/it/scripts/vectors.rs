//! The conformance vectors of `lua/vectors`: the scripts give these answers. The README there
//! describes their form.

use std::collections::{BTreeMap, BTreeSet};

use redis::Value;
use redis::aio::MultiplexedConnection;
use serde_json::Value as Json;
use tokio::task::JoinSet;

use super::subscriber::Subscriber;
use super::{folder, scripts};
use crate::support::Server;

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
                (low, high) => number
                    .is_some_and(|it| low.is_none_or(|low| low <= it) && high.is_none_or(|high| it <= high)),
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
