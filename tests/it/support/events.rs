//! The crate's `tracing` events, for one test among many that run at the same time.

use std::fmt::{Debug, Write};
use std::sync::{Mutex, Once};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// The events of all tests as `LEVEL message field=value …`, and spans as `SPAN name …`.
/// DEBUG events and spans are recorded only for locks with [`TRACED`] in their names, and for
/// rounds without a majority.
static EVENTS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// The prefix of locks whose DEBUG events and spans are recorded too.
pub const TRACED: &str = "traced-";

/// All spans, by their ids.
static SPANS: Mutex<Vec<String>> = Mutex::new(Vec::new());

type Action = Box<dyn Fn() + Send>;

/// Actions of tests to run inside the subscriber, each with the text of the event that triggers it.
static ACTIONS: Mutex<Vec<(String, Action)>> = Mutex::new(Vec::new());

/// Runs the action once, inside the subscriber, at the next event above DEBUG that contains
/// the word.
pub fn on_event(word: &str, action: impl Fn() + Send + 'static) {
    ACTIONS.lock().unwrap().push((word.to_owned(), Box::new(action)));
}

/// Installs the subscriber, for all tests.
pub fn listen() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| tracing::subscriber::set_global_default(Listener).unwrap());
}

/// The events that contain a word. The word must be unique to the test: a port, or a lock's name.
pub fn logged_with(word: &str) -> Vec<String> {
    EVENTS.lock().unwrap().iter().filter(|event| event.contains(word)).cloned().collect()
}

struct Listener;

impl Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "redlatch"
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line { level: event.metadata().level().to_string(), ..Line::default() };
        event.record(&mut line);
        let line = format!("{} {}{}", line.level, line.message, line.fields);
        if *event.metadata().level() == Level::DEBUG {
            if line.contains(TRACED) || line.starts_with("DEBUG no majority") {
                EVENTS.lock().unwrap().push(line);
            }
            return;
        }
        EVENTS.lock().unwrap().push(line.clone());
        let position =
            |actions: &[(String, Action)]| actions.iter().position(|(word, _)| line.contains(word));
        // Removed from the list before it runs: it may cause events itself.
        let action = {
            let mut actions = ACTIONS.lock().unwrap();
            position(&actions).map(|index| actions.swap_remove(index))
        };
        if let Some((_, action)) = action {
            action();
        }
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut line = Line::default();
        span.record(&mut line);
        let line = format!("SPAN {}{}", span.metadata().name(), line.fields);
        let mut spans = SPANS.lock().unwrap();
        spans.push(line.clone());
        if line.contains(TRACED) {
            EVENTS.lock().unwrap().push(line);
        }
        Id::from_u64(spans.len() as u64)
    }

    fn record(&self, id: &Id, values: &Record<'_>) {
        let mut line = Line::default();
        values.record(&mut line);
        let span = SPANS.lock().unwrap()[id.into_u64() as usize - 1].clone();
        if span.contains(TRACED) {
            EVENTS.lock().unwrap().push(format!("RECORDED {span}{}", line.fields));
        }
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[derive(Default)]
struct Line {
    level: String,
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.message = format!("{value:?}");
        } else {
            write!(self.fields, " {field}={value:?}").unwrap();
        }
    }
}
